"""Convert weights between Hugging Face directories and Megatron checkpoints, and between Megatron layouts.

No device, process group or model is needed: bytes go from file to file, in blocks. An interrupted conversion is
continued by the same command; the output has its name only when it is whole. See docs/convert.md.

Examples:
  python tools/convert.py hf-to-megatron --model MODEL --out CHECKPOINT --tp 2 --pp 2 --verify
  python tools/convert.py megatron-to-hf --checkpoint runs/a/checkpoints/step_00000060 --model MODEL --out EXPORT
  python tools/convert.py reshard --checkpoint CHECKPOINT --out OTHER --tp 4 --ep 2
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from mega_rl import platform
from mega_rl.bridge.files.assembly import Assembly, FileImage, literal_file
from mega_rl.bridge.files.copy import Advance, copy_tensors, digests
from mega_rl.bridge.files.huggingface import HFReader, metadata_files, plan_huggingface, value_changes
from mega_rl.bridge.files.stored import StoredTensors
from mega_rl.bridge.files.torch_dist.manifest import (
    MANIFEST,
    PROGRESS,
    WEIGHTS,
    damage,
    different_key,
    manifest,
    model_record,
    written,
)
from mega_rl.bridge.files.torch_dist.progress import read_progress
from mega_rl.bridge.files.torch_dist.torch_dist import INDEX, read_torch_dist
from mega_rl.bridge.files.torch_dist.torch_dist_layout import layout_chunks, smallest_layout
from mega_rl.bridge.files.torch_dist.torch_dist_write import plan_torch_dist
from mega_rl.bridge.mapping.megatron import padded_vocab_size
from mega_rl.config.schema.sections import ParallelConfig
from mega_rl.data.tokens.tokenizer import load_tokenizer, padding_token
from mega_rl.errors import InputError, input_error, shown
from mega_rl.models.fit import trainer_problems
from mega_rl.models.shape import SUFFIXES, ModelShape, read_model_shape, value_shape
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.types import DTYPES

HUGGINGFACE = "huggingface"  # config and tokenizer files in a converted checkpoint
CERTIFICATE = "certificate.json"
FILE_DTYPES = {**DTYPES, "float16": torch.float16}
LOGITS = "mega_rl.megatron.checkpoint.logits"  # imported once the platform is fixed
LOGITS_TOLERANCE = 1e-4  # float32, relative to the largest logit
MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Source:
    """What is converted."""

    shape: ModelShape
    tensors: StoredTensors
    metadata_dir: Path  # config.json, tokenizer
    files: list[Path]  # by which a later run sees that it is still the same source
    changes: dict[str, Any] = field(default_factory=dict)  # keys of config.json that are otherwise

    def metadata(self, dtype: torch.dtype) -> dict[str, FileImage]:
        """config.json and the tokenizer's files beside weights that are mostly of this dtype."""
        return metadata_files(self.metadata_dir, dtype, self.changes)


@dataclass(frozen=True)
class Target:
    """What is made: all files without the weights, and the places of the weights in them."""

    folder: str  # of the weights
    tensors: StoredTensors  # its root is set when the output directory is there
    images: dict[str, FileImage]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    to_megatron = commands.add_parser("hf-to-megatron", help="write a checkpoint that the trainer and Megatron load")
    to_huggingface = commands.add_parser("megatron-to-hf", help="write a directory that transformers and vLLM load")
    reshard = commands.add_parser("reshard", help="write a checkpoint's weights for another layout")
    to_megatron.add_argument("--model", type=Path, required=True, help="Hugging Face directory with the weights")
    for command in (to_huggingface, reshard):
        command.add_argument("--checkpoint", type=Path, required=True, help="of the trainer, or a torch_dist directory")
        command.add_argument(
            "--model",
            type=Path,
            help="Hugging Face directory with config and tokenizer, where the checkpoint was not made by this tool",
        )
    for command in (to_megatron, reshard):
        for name, axis in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert")):
            command.add_argument(f"--{name}", type=int, default=1, help=f"{axis}-parallel size (default 1)")
        command.add_argument("--vpp", type=int, help="model chunks per pipeline stage (default: one)")
        command.add_argument("--etp", type=int, help="ranks that share one expert (default: as --tp)")
    to_huggingface.add_argument("--max-shard-gib", type=float, default=5.0, help="of a safetensors file (default 5)")
    for command in (to_megatron, to_huggingface, reshard):
        command.add_argument("--out", type=Path, required=True, help="directory to make")
        command.add_argument("--dtype", choices=sorted(FILE_DTYPES), help="default: every tensor keeps its own")
        command.add_argument("--bucket-mib", type=int, default=4, help="bytes moved at a time, MiB (default 4)")
        command.add_argument("--verify", action="store_true", help=f"read all back and write {CERTIFICATE}")
        command.add_argument("--no-logits", action="store_true", help="--verify without running the model")
    options = parser.parse_args(arguments)
    for name in ("tp", "pp", "vpp", "ep", "etp", "bucket_mib", "max_shard_gib"):
        value = getattr(options, name, None)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be positive")
    return options


# --- the two sides ---------------------------------------------------------------------------------------------------


def open_huggingface(model: Path) -> Source:
    shape, reader = read_model_shape(model, key="--model", allowed=list(SUFFIXES)), HFReader(model)
    reader.check(shape)
    tensors = reader.stored(shape)
    return Source(shape, tensors, model, [model / file for file in tensors.files()])


def open_checkpoint(checkpoint: Path, model: Path | None) -> Source:
    is_ours = (checkpoint / MANIFEST).is_file()
    if not is_ours and not (checkpoint / INDEX).is_file():
        raise InputError(f"--checkpoint: {checkpoint} has neither {MANIFEST} nor {INDEX}; name one checkpoint")
    problem = damage(checkpoint) if is_ours else None
    if problem:
        raise InputError(f"--checkpoint: {checkpoint} is not whole: {problem}; use another one")
    metadata_dir = model or checkpoint / HUGGINGFACE
    if not metadata_dir.is_dir():
        raise InputError(f"--model: {checkpoint} has no {HUGGINGFACE} directory; name the model it was trained from")
    shape = read_model_shape(metadata_dir, key="--model" if model else "--checkpoint", allowed=list(SUFFIXES))
    changes: dict[str, Any] = {}
    if is_ours:
        progress = read_progress(checkpoint, needed=("model",))
        _refuse_part(checkpoint, progress)
        saved = progress["model"]
        if saved.get("head") == "value" and shape.head != "value":  # a reward model that began as a language model
            shape = value_shape(shape)
            tokenizer = load_tokenizer(str(metadata_dir))
            changes = value_changes(shape, padding_token(tokenizer, shape.vocab_size))
        _check_model(checkpoint, saved, shape, metadata_dir)
    tensors = read_torch_dist(checkpoint / WEIGHTS if is_ours else checkpoint, shape)
    return Source(shape, tensors, metadata_dir, [tensors.root / file for file in (INDEX, *tensors.files())], changes)


def _refuse_part(checkpoint: Path, progress: Mapping[str, Any]) -> None:
    if "tuning" in progress:
        method = shown(progress["tuning"]["settings"]["method"])
        raise InputError(
            f"{checkpoint} holds only what tuning.method {method} trained, not the model under it: take the Hugging "
            "Face directory that the run exported (checkpoint.export_hf)"
        )


def _check_model(checkpoint: Path, saved: Mapping[str, Any], shape: ModelShape, metadata_dir: Path) -> None:
    if (key := different_key(saved, shape)) is not None:
        own = model_record(shape)[key]
        raise InputError(
            f"{checkpoint} is of another model: {key} is {shown(saved.get(key))} there and {own!r} in "
            f"{metadata_dir / 'config.json'}; name the model it was trained from with --model"
        )


def layout_for(shape: ModelShape, options: argparse.Namespace) -> ParallelLayout:
    """The smallest layout of the given sizes; InputError if the model cannot be cut so."""
    sizes = ParallelConfig(
        tensor=options.tp,
        pipeline=options.pp,
        virtual_pipeline=options.vpp,
        expert=options.ep,
        expert_tensor=options.etp,
        sequence=options.tp > 1,  # how a run is to set it does not matter to the files
    )
    found = trainer_problems(shape, sizes, world_size=None)
    if found:
        raise input_error("the layout of --tp, --pp, --vpp, --ep and --etp", found)
    return smallest_layout(options.tp, options.pp, options.vpp, options.ep, options.etp)


def plan_checkpoint(source: Source, dtypes: dict[str, torch.dtype], layout: ParallelLayout) -> Target:
    shape = source.shape
    padded = padded_vocab_size(shape.vocab_size, layout.tensor)
    images, tensors = plan_torch_dist(Path(), shape, layout_chunks(shape, layout), dtypes, padded)
    progress = {
        "step": 0,
        "weights_only": True,
        "model": model_record(shape),
        "expert_parallel": layout.expert,
        "layout": asdict(layout),
    }
    files = {f"{WEIGHTS}/{name}": image for name, image in images.items()}
    files |= {f"{HUGGINGFACE}/{n}": image for n, image in source.metadata(_main(tensors)).items()}
    return Target(WEIGHTS, tensors, files | {PROGRESS: literal_file(json.dumps(progress, indent=1))})


def plan_export(source: Source, dtypes: dict[str, torch.dtype], max_shard_bytes: int) -> Target:
    tensors, images = plan_huggingface(Path(), source.shape, dtypes, max_shard_bytes)
    return Target(".", tensors, images | source.metadata(_main(tensors)))


def _main(tensors: StoredTensors) -> torch.dtype:
    """The dtype of most of the bytes: what config.json names."""
    num_bytes: Counter[torch.dtype] = Counter()
    for name, size in tensors.shapes.items():
        num_bytes[tensors.dtypes[name]] += prod(size) * tensors.dtypes[name].itemsize
    return num_bytes.most_common(1)[0][0]


def identity(options: argparse.Namespace, source: Source) -> dict[str, Any]:
    """What makes two runs of this tool the same job."""
    ignored = ("out", "verify", "no_logits", "model", "checkpoint")
    stats = [(str(path.resolve()), path.stat()) for path in source.files]
    metadata = source.metadata(torch.float32)
    return {
        "options": {key: value for key, value in vars(options).items() if key not in ignored},
        "source": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats],
        "metadata": {name: hash_of(image) for name, image in metadata.items()},
    }


def hash_of(image: FileImage) -> str:
    return hashlib.sha256(b"".join(content for _, content in image.literals)).hexdigest()


# --- the work --------------------------------------------------------------------------------------------------------


@contextmanager
def progress_bar(title: str, num_bytes: int) -> Iterator[Advance]:
    """A bar with rate and remaining time where the console is a terminal."""
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=num_bytes)
        yield lambda count: progress.advance(task, count)


def convert(options: argparse.Namespace) -> None:
    begin, bucket_bytes = time.monotonic(), options.bucket_mib * MIB
    is_import = options.command == "hf-to-megatron"
    source = open_huggingface(options.model) if is_import else open_checkpoint(options.checkpoint, options.model)
    chosen = FILE_DTYPES.get(options.dtype)
    dtypes = {name: chosen or dtype for name, dtype in source.tensors.dtypes.items()}
    if options.command == "megatron-to-hf":
        target = plan_export(source, dtypes, int(options.max_shard_gib * GIB))
    else:
        target = plan_checkpoint(source, dtypes, layout_for(source.shape, options))
    with Assembly(options.out, identity(options, source), target.images) as assembly:
        tensors = replace(target.tensors, root=assembly.root / target.folder)
        if assembly.num_done:
            print(f"continuing an interrupted conversion to {assembly.out_dir}", flush=True)
        with progress_bar("converting", tensors.num_bytes) as advance:
            copy_tensors(source.tensors, tensors, assembly, bucket_bytes, advance)
        if options.verify:
            certificate = certify(options, source, replace(tensors, dtypes=dtypes), assembly.root)
            assembly.add(CERTIFICATE, literal_file(json.dumps(certificate, indent=1) + "\n"))
        if options.command != "megatron-to-hf":
            paths = [assembly.root / name for name in sorted(assembly.names)]
            assembly.add(MANIFEST, literal_file(manifest(written(assembly.root, paths))))
        assembly.publish()
    figures = f"{len(dtypes)} tensors, {tensors.num_bytes / 1e9:.2f} GB in {time.monotonic() - begin:.2f} s"
    print(f"wrote {options.out}: {figures}" + (f", verified in {CERTIFICATE}" if options.verify else ""))


def certify(options: argparse.Namespace, source: Source, target: StoredTensors, root: Path) -> dict[str, Any]:
    """Read the output as anybody would and compare it with the source; RuntimeError where they differ."""
    if options.command == "megatron-to-hf":
        reader = HFReader(root)
        reader.check(source.shape)
        written = reader.stored(source.shape)
    else:
        written = read_torch_dist(root / WEIGHTS, source.shape)
    bucket_bytes = options.bucket_mib * MIB
    with progress_bar("verifying", 2 * target.num_bytes) as advance:
        before = digests(source.tensors, target.dtypes, bucket_bytes, advance)
        after = digests(written, target.dtypes, bucket_bytes, advance)
    wrong = [name for name in before if before[name] != after[name] or written.dtypes[name] != target.dtypes[name]]
    if wrong:
        raise RuntimeError(f"{root}: {wrong[0]} is not what the source holds ({len(wrong)} tensors differ); remove it")
    return {
        "command": options.command,
        "source": str(source.tensors.root.resolve()),
        "cast_to": options.dtype,
        "round_trip": "bit-exact" if options.dtype is None else "bit-exact after the cast",
        "num_bytes": target.num_bytes,
        "logits": _certify_logits(options, source, root),
        "tensors": {
            name: {"shape": list(size), "dtype": str(target.dtypes[name]).removeprefix("torch."), "sha256": after[name]}
            for name, size in target.shapes.items()
        },
    }


def _certify_logits(options: argparse.Namespace, source: Source, root: Path) -> dict[str, Any]:
    if options.no_logits:
        return {"compared": False, "reason": "--no-logits"}
    if options.command == "reshard":
        return {"compared": False, "reason": "neither side is a Hugging Face directory with weights"}
    sides = (root, source.tensors.root) if options.command == "megatron-to-hf" else (options.model, root / WEIGHTS)
    # The platform is fixed before Megatron-core is imported, which looks for its device at once.
    platform.select("auto")
    found = importlib.import_module(LOGITS).compare_logits(source.shape, *sides)
    if not found.relative < LOGITS_TOLERANCE:
        raise RuntimeError(
            f"{root}: Megatron's logits differ from transformers' by {found.relative:.1e} of the largest one, more "
            f"than {LOGITS_TOLERANCE:.0e}; remove it"
        )
    return {"compared": True, "dtype": "float32", "relative": found.relative, **asdict(found)}


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        convert(parse(arguments))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
