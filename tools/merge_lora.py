"""Merge a LoRA adapter into its base model: a Hugging Face directory that transformers and vLLM load without PEFT.

    python tools/merge_lora.py BASE ADAPTER -o DIR [--verify]

Every adapted weight becomes W + scale B A, summed in float32 and rounded once to the dtype that W has in its file; all
other tensors, the tokenizer and the configuration are copied. Tensors are read and written block by block, so that a
model of any size takes little memory. DIR appears when everything is in it; after a kill the same command goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from torch import Tensor

from mega_rl.bridge.files.assembly import Assembly, literal_file
from mega_rl.bridge.files.copy import Advance, copy_tensors, digests
from mega_rl.bridge.files.huggingface import HFReader, metadata_files, plan_huggingface
from mega_rl.bridge.files.peft.peft import WEIGHTS_FILE, PeftReader
from mega_rl.bridge.files.peft.peft_config import CONFIG_FILE
from mega_rl.bridge.files.stored import StoredTensors
from mega_rl.bridge.lora import Factors, merged
from mega_rl.bridge.slices import Box
from mega_rl.errors import InputError
from mega_rl.models.shape import ModelShape, read_model_shape

CERTIFICATE = "certificate.json"
MIB, GIB = 1 << 20, 1 << 30


class Merge:
    """The transform of the stream of blocks, which counts what the rounding to the file's dtype leaves of it."""

    def __init__(self, adapter: PeftReader) -> None:
        self._adapter, self._names = adapter, frozenset(adapter.weights)
        self._lock = threading.Lock()  # of the adapter's file, which threads that compute digests share
        self._last: dict[int, tuple[str, Factors]] = {}  # thread -> the factors of the tensor that it works on
        self.num_elements = self.num_unchanged = 0

    def __call__(self, name: str, box: Box, values: Tensor) -> Tensor:
        if name not in self._names:
            return values
        thread = threading.get_ident()
        with self._lock:
            if thread not in self._last or self._last[thread][0] != name:
                self._last[thread] = name, self._adapter.factors(name)
        result = merged(values, self._last[thread][1], box)
        self.num_elements += values.numel()
        self.num_unchanged += int((result == values).sum())
        return result


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, help="Hugging Face directory of the model that the adapter was trained from")
    parser.add_argument("adapter", type=Path, help="directory with adapter_config.json and adapter_model.safetensors")
    parser.add_argument("-o", "--out", type=Path, required=True, help="directory to make")
    parser.add_argument("--max-shard-gib", type=float, default=5.0, help="of a safetensors file (default 5)")
    parser.add_argument("--bucket-mib", type=int, default=32, help="bytes moved at a time, MiB (default 32)")
    parser.add_argument("--verify", action="store_true", help=f"read all back and write {CERTIFICATE}")
    options = parser.parse_args(arguments)
    for name in ("bucket_mib", "max_shard_gib"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be positive")
    return options


@contextmanager
def progress_bar(title: str, num_bytes: int) -> Iterator[Advance]:
    """A bar with rate and remaining time where the console is a terminal."""
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=num_bytes)
        yield lambda count: progress.advance(task, count)


def identity(options: argparse.Namespace, base: StoredTensors) -> dict[str, Any]:
    """What makes two runs of this tool the same job."""
    own = [options.adapter / name for name in (CONFIG_FILE, WEIGHTS_FILE)]
    paths = [*(options.base / file for file in ["config.json", *base.files()]), *own]
    stats = [(str(path.resolve()), path.stat()) for path in paths]
    return {
        "merge": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats],
        "sizes": [options.bucket_mib, options.max_shard_gib],
    }


def merge(options: argparse.Namespace) -> None:
    begin, bucket_bytes = time.monotonic(), options.bucket_mib * MIB
    shape, reader = read_model_shape(options.base, key="BASE"), HFReader(options.base)
    reader.check(shape)
    base = reader.stored(shape)
    adapter = PeftReader(options.adapter, shape, options.base, key="ADAPTER")
    planned, images = plan_huggingface(Path(), shape, base.dtypes, int(options.max_shard_gib * GIB))
    dtype = max(base.dtypes.values(), key=list(base.dtypes.values()).count)
    images |= metadata_files(options.base, dtype)
    transform = Merge(adapter)
    with Assembly(options.out, identity(options, base), images) as assembly:
        target = replace(planned, root=assembly.root)
        if assembly.num_done:
            print(f"continuing an interrupted merge to {assembly.out_dir}", flush=True)
        with progress_bar("merging", target.num_bytes) as advance:
            copy_tensors(base, target, assembly, bucket_bytes, advance, transform)
        if options.verify:
            certificate = certify(options, shape, base, Merge(adapter), assembly.root)
            assembly.add(CERTIFICATE, literal_file(json.dumps(certificate, indent=1) + "\n"))
        assembly.publish()
    figures = f"{len(adapter.weights)} of {len(target.shapes)} tensors merged, {target.num_bytes / 1e9:.2f} GB"
    end = f", verified in {CERTIFICATE}" if options.verify else ""
    print(f"wrote {options.out}: {figures} in {time.monotonic() - begin:.2f} s{end}")
    tell_loss(transform, dtype)


def tell_loss(transform: Merge, dtype: torch.dtype) -> None:
    if dtype == torch.float32 or not transform.num_elements:
        return
    share, name = transform.num_unchanged / transform.num_elements, str(dtype).removeprefix("torch.")
    if share > 0.5:
        print(f"note: {share:.0%} of the elements of adapted weights are unchanged: {name} rounds their updates away")


def certify(
    options: argparse.Namespace, shape: ModelShape, base: StoredTensors, transform: Merge, root: Path
) -> dict[str, Any]:
    """Read the output as anybody would, merge once more, and compare; RuntimeError where they differ."""
    reader = HFReader(root)
    reader.check(shape)
    written, bucket_bytes = reader.stored(shape), options.bucket_mib * MIB
    with progress_bar("verifying", 2 * base.num_bytes) as advance:
        before = digests(base, base.dtypes, bucket_bytes, advance, transform)
        after = digests(written, base.dtypes, bucket_bytes, advance)
    wrong = [name for name in before if before[name] != after[name] or written.dtypes[name] != base.dtypes[name]]
    if wrong:
        raise RuntimeError(f"{root}: {wrong[0]} is not what the merge gives ({len(wrong)} tensors differ); remove it")
    with (options.adapter / WEIGHTS_FILE).open("rb") as file:
        adapter = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "command": "merge_lora",
        "base": str(options.base.resolve()),
        "adapter": str(options.adapter.resolve()),
        "adapter_sha256": adapter,
        "num_bytes": base.num_bytes,
        "tensors": {
            name: {"shape": list(size), "dtype": str(base.dtypes[name]).removeprefix("torch."), "sha256": after[name]}
            for name, size in base.shapes.items()
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        merge(parse(arguments))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
