"""tools/convert.py against ``cp`` of the same model: throughput in each direction, and peak resident memory.

A model of random bfloat16 weights is written first. Then, in turn: a copy with ``cp``, its files synced; Hugging Face
to Megatron; back; to another layout. Every output is synced to disk and removed; before each measurement the source is
read once, so that it is in the page cache as far as memory allows, and earlier writes are waited for. Memory is the
peak of the converting process above what it holds when it has imported everything.

``--quick`` measures the memory alone: each direction once, without copies and without waiting for a disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import publish, table
from mega_rl.bridge.files.huggingface import metadata_files, plan_huggingface
from mega_rl.bridge.files.stored import OpenTensors, row_blocks
from mega_rl.bridge.mapping.tensors import hf_tensors
from mega_rl.models.shape import read_model_shape

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 64000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LAYER_BYTES = 90_000_000  # of CONFIG in bfloat16
VOCABULARY_BYTES = 524_000_000
# Runs in the converting process: what it holds after its imports, then its peak.
CHILD = """
import json, sys
sys.path.insert(0, {tools!r})
import convert
import psutil
base = psutil.Process().memory_info().rss
status = convert.main(sys.argv[1:])
peak = [line for line in open("/proc/self/status") if line.startswith("VmHWM")][0]
print("MEMORY", json.dumps([base, int(peak.split()[1]) * 1024]))
sys.exit(status)
"""


def write_model(directory: Path, gigabytes: float) -> None:
    """A sharded model of about that size, the same bytes every time, block by block."""
    num_layers = max(2, round((gigabytes * 1e9 - VOCABULARY_BYTES) / LAYER_BYTES / 2) * 2)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": num_layers}))
    shape = read_model_shape(directory)
    dtypes = dict.fromkeys(hf_tensors(shape), torch.bfloat16)
    stored, images = plan_huggingface(directory, shape, dtypes, max_shard_bytes=1 << 30)
    for name, image in (images | metadata_files(directory, torch.bfloat16)).items():
        image.create(directory / name)
    generator = torch.Generator().manual_seed(0)
    with OpenTensors(stored, is_writable=True) as tensors:
        for name, size in stored.shapes.items():
            for box in row_blocks(size, 2, 16 << 20):
                rows = torch.Size(end - start for start, end in box)
                values = torch.randint(-(2**15), 2**15, rows, generator=generator, dtype=torch.int16)
                tensors.write(name, box, values.view(torch.bfloat16))


def settle(directory: Path) -> None:
    """Earlier writes are on the disk, and the files of ``directory`` in the page cache."""
    os.sync()
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(16 << 20):
                    pass


def copy(source: Path, out: Path) -> float:
    begin = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(out)], check=True)
    for path in out.rglob("*"):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    return time.perf_counter() - begin


def convert(source: Path, out: Path, *arguments: str) -> tuple[float, int]:
    """Seconds from the first look at the source to the last sync, and bytes of the peak above the imports."""
    command = [sys.executable, "-c", CHILD.format(tools=str(ROOT / "tools")), *arguments, "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    line = next(line for line in done.stdout.splitlines() if line.startswith("MEMORY "))
    base, peak = json.loads(line.removeprefix("MEMORY "))
    seconds = next(line for line in done.stdout.splitlines() if line.startswith("wrote "))
    return float(seconds.rpartition(" GB in ")[2].split()[0]), peak - base


def measure(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    model, checkpoint, out = work / "model", work / "checkpoint", work / "out"
    write_model(model, arguments.gigabytes)
    num_bytes = sum(path.stat().st_size for path in model.rglob("*.safetensors"))
    layout = ("--tp", "2", "--pp", "2")
    ways: dict[str, tuple[Path, tuple[str, ...]]] = {
        "hf-to-megatron, TP2 PP2": (model, ("hf-to-megatron", "--model", str(model), *layout)),
        "megatron-to-hf": (checkpoint, ("megatron-to-hf", "--checkpoint", str(checkpoint))),
        "reshard, TP2 PP2 to TP4": (checkpoint, ("reshard", "--checkpoint", str(checkpoint), "--tp", "4")),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ("cp", *ways)}
    peaks: dict[str, int] = dict.fromkeys(ways, 0)

    def converted(name: str, out: Path) -> None:
        took, peak = convert(ways[name][0], out, *ways[name][1])
        seconds[name].append(took)
        peaks[name] = max(peaks[name], peak)

    first, *others = ways
    converted(first, checkpoint)  # the first time, with cold caches
    if arguments.quick:
        for name in others:
            converted(name, out)
            shutil.rmtree(out)
        return {"num_bytes": num_bytes, "peak_bytes": peaks}
    seconds[first].clear()
    for _ in range(arguments.repeats):
        settle(model)
        seconds["cp"].append(copy(model, out))
        shutil.rmtree(out)
        for name in ways:
            settle(ways[name][0])
            converted(name, out)
            shutil.rmtree(out)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    return {"num_bytes": num_bytes, "seconds": seconds, "median_s": median, "peak_bytes": peaks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="memory alone, each direction once")
    parser.add_argument("--work-dir", type=Path, help="on the file system to measure (default: the temporary one)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.work_dir) as work:
        results = measure(arguments, Path(work))
    peaks, rows = results["peak_bytes"], []
    for name, seconds in results.get("median_s", dict.fromkeys(peaks)).items():
        rate = ["-"] * 3
        if seconds is not None:
            rate = [seconds, results["num_bytes"] / 1e9 / seconds, results["median_s"]["cp"] / seconds]
        rows.append([name, *rate, peaks[name] / 1e6 if name in peaks else "-"])
    text = table(["", "seconds", "GB/s", "of cp's rate", "peak memory above imports, MB"], rows)
    publish(f"Conversion of a {results['num_bytes'] / 1e9:.2f} GB model", text, "cpu", results, arguments.json)


if __name__ == "__main__":
    main()
