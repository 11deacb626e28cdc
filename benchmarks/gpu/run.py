"""Every measurement that needs one accelerator, in slices of less than ten minutes: one JSON file and a markdown table.

A slice is a process of its own (``slices.py``): if one fails or takes too long, that is recorded and the others go
on. What has been measured is in the file after each slice, so that a run that is cut off leaves what it has, and a
later one with ``--slices`` adds to it. ``--quick`` takes tiny models: it shows that all works, not how fast it is.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.targets import measured_targets
from benchmarks.report import command, table

MODELS = ("0.5B", "1.5B", "7B", "8B", "mixture")
LOSSES = ("losses:cpu:float32", "losses:device:float32", "losses:device:bfloat16")
PLAIN = ("operators", "kernels", "attention", "step", "logprob", "sync", "offload", "memory")
SLICES = (*PLAIN, *(f"mfu:{name}" for name in MODELS), *LOSSES, "cpu_step")
ON_CPU = (LOSSES[0], "cpu_step")
NEEDED = ("torch", "transformers", "megatron.core", "omegaconf", "safetensors", "numpy", "yaml", "psutil")
RESULTS, TABLE = "gpu.json", "gpu.md"
LIMIT_S = 570.0  # of a slice
GIB = 2**30
Results = dict[str, Any]


def missing() -> list[str]:
    """The packages that this machine lacks."""

    def is_there(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:  # of what holds it
            return False

    return [name for name in NEEDED if not is_there(name)]


def run_slice(argv: Sequence[str], environ: dict[str, str], limit_s: float) -> Results:
    """What a slice wrote to the file named last in ``argv``, with its seconds; ``error`` if it did not."""
    begin = time.monotonic()
    try:
        done = subprocess.run(argv, env=environ, timeout=limit_s, capture_output=True, text=True, check=False)
        output, ending = done.stdout + done.stderr, f"ended with {done.returncode}" if done.returncode else None
    except subprocess.TimeoutExpired as expired:
        parts = [part.decode(errors="replace") for part in (expired.stdout, expired.stderr) if isinstance(part, bytes)]
        output, ending = "".join(parts), f"took longer than {limit_s:.0f} s"
    found: Results = {}
    path = Path(argv[-1])
    if path.is_file() and path.stat().st_size:
        found = json.loads(path.read_text())  # a slice writes after each part
    found["seconds"] = time.monotonic() - begin
    if ending is not None:
        found["error"] = f"{ending}: {' / '.join(output.strip().splitlines()[-3:])}"
        found["output"] = output[-4000:]
    return found


def run_all(arguments: argparse.Namespace) -> Results:
    results_path = arguments.out / RESULTS
    results: Results = json.loads(results_path.read_text()) if results_path.is_file() else {"slices": {}}
    results["command"] = command()
    for name in arguments.slices:
        device = "cpu" if name in ON_CPU else arguments.device
        environ = {**os.environ, "MEGA_RL_PLATFORM": device}
        with tempfile.TemporaryDirectory() as scratch:
            argv = [sys.executable, "-m", "benchmarks.gpu.slices", name, *(["--quick"] if arguments.quick else [])]
            if device == "cuda":
                argv += ["--kernels", arguments.kernels]
            found = run_slice([*argv, "--out", str(Path(scratch) / "slice.json")], environ, arguments.limit_s)
        results["machine"] = found.pop("machine", None) or results.get("machine")
        results["slices"][name] = found
        results_path.write_text(json.dumps(results, indent=1) + "\n")
        (arguments.out / TABLE).write_text(as_text(results))
        print(f"{name}: {found.get('error', 'done')} ({found['seconds']:.0f} s)", flush=True)
    return results


def as_text(results: Results) -> str:
    """All that was measured as markdown."""
    slices: dict[str, Results] = results["slices"]
    parts = [f"Command: `{results['command']}`", f"Machine: {results.get('machine')}"]
    for title, prefix, header, row in SECTIONS:
        rows = [row(one) for name, found in slices.items() if name.startswith(prefix) for one in found.get("rows", [])]
        if rows:
            parts += [f"### {title}", table(header, rows)]
    parts += ["### Targets", table(("target", "", "measured"), measured_targets(slices))]
    losses = compared_losses(slices)
    if losses:
        parts += ["### Training steps", table(("run", "steps", "last loss", "largest difference of a loss"), losses)]
    failed = [[name, found["error"]] for name, found in slices.items() if "error" in found]
    if failed:
        parts += ["### Failed", table(("slice", "error"), failed)]
    return "\n\n".join(parts) + "\n"


def compared_losses(slices: dict[str, Results]) -> list[list[Any]]:
    """Every run of the same steps beside the float32 one of the CPU; differences are relative."""
    found = {name: slices[name]["losses"] for name in LOSSES if slices.get(name, {}).get("losses")}
    reference = found.get(LOSSES[0])
    rows = []
    for name, losses in found.items():
        pairs = list(zip(losses, reference or [], strict=False))
        largest = max((abs(a - b) / abs(b) for a, b in pairs), default=float("nan"))
        rows.append([name.removeprefix("losses:"), len(losses), losses[-1], largest])
    return rows


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def mfu_row(one: Results) -> list[Any]:
    if "error" in one:
        return [one["model"], one["length"], one["recompute"], one["layers"], *["-"] * 7, one["error"]]
    ratio = one["planned_bytes"] / one["peak_bytes"] if one["peak_bytes"] else None
    times = [f"{1e3 * one[name]:,.1f}" for name in ("forward_s", "backward_s", "optimizer_s")]
    shares = [share(one[name]) for name in ("mfu_forward", "mfu_backward", "mfu")]
    return [one["model"], one["length"], one["recompute"], one["layers"], *times, one["tflops"], *shares, share(ratio)]


# Title, how the names of its slices begin, header, row.
SECTIONS = (
    (
        "Operators against the float32 reference",
        "operators",
        ("operator", "dtype", "largest difference", "allowed, absolute and relative"),
        lambda one: [one["operator"], one["dtype"], one.get("largest", "-"), one.get("allowed") or one["error"]],
    ),
    (
        "Norm, SwiGLU and rotary embedding by platform.kernels, bfloat16",
        "kernels",
        ("operator", "kernels", "largest difference", "forward ms", "forward and backward ms"),
        lambda one: [
            *(one["operator"], one["kernels"]),
            *([one["error"], "-", "-"] if "error" in one else []),
            *([] if "error" in one else [one["largest"], 1e3 * one["forward_s"], 1e3 * one["both_s"]]),
        ],
    ),
    (
        "Causal attention, bfloat16, 32 heads of 128 with 8 of keys",
        "attention",
        ("sequences x tokens", "way", "largest difference", "forward ms", "forward and backward ms", "TFLOP/s"),
        lambda one: [
            *(one["pack"], one["way"]),
            *([one["error"], "-", "-", "-"] if "error" in one else []),
            *([] if "error" in one else [one["largest"], 1e3 * one["forward_s"], 1e3 * one["both_s"], one["tflops"]]),
        ],
    ),
    (
        "Training step on the CPU",
        "cpu_step",
        ("model", "against", "times as fast", "by CPU time"),
        lambda one: [one["case"], one["against"], one["speedup"], one["by_cpu_time"]],
    ),
    (
        "A step against transformers in float32 on the CPU",
        "step",
        ("model", "dtype", "log-probability, mean difference", "largest", "gradient norm, relative"),
        lambda one: [one["model"], one["dtype"], one["mean"], one["largest"], one["grad_norm"]],
    ),
    (
        "Model FLOPs utilisation of the trainer",
        "mfu",
        (
            *("model", "tokens", "recompute", "layers", "forward ms", "backward ms", "optimizer ms", "TFLOP/s"),
            *("MFU forward", "MFU backward", "MFU forward and backward", "planned / measured memory"),
        ),
        mfu_row,
    ),
    (
        "Memory against the plan",
        "memory",
        ("model", "layers", "recompute", "planned GiB", "measured GiB"),
        lambda one: [
            *(one["model"], one["layers"], one["recompute"], one["planned_bytes"] / GIB),
            one["peak_bytes"] / GIB if one["peak_bytes"] else "-",
        ],
    ),
    (
        "Log-probabilities",
        "logprob",
        ("tokens x vocabulary x width", "pass", "ms", "matrix products alone, ms", "ratio", "memory besides, GiB"),
        lambda one: [
            *(one["size"], one["pass"], 1e3 * one["seconds"], 1e3 * one["products_s"]),
            *(one["seconds"] / one["products_s"], one["peak_bytes"] / GIB if one["peak_bytes"] else "-"),
        ],
    ),
    (
        "Weight sync into the engine's layout on one rank",
        "sync",
        ("model", "GB", "sync GB/s", "device copy GB/s", "ratio"),
        lambda one: [one["model"], one["bytes"] / 1e9, one["sync"], one["copy"], one["sync"] / one["copy"]],
    ),
    (
        "Offload of weights and optimizer state",
        "offload",
        ("part", "GB", "to the host GB/s", "back GB/s", "one large copy out GB/s", "in GB/s"),
        lambda one: [one["part"], one["bytes"] / 1e9, one["out"], one["back"], one["copy_out"], one["copy_in"]],
    ),
)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "npu", "cpu"), default="cuda")
    parser.add_argument("--kernels", default="torch", help="platform.kernels of all slices on CUDA (default: torch)")
    parser.add_argument("--quick", action="store_true", help="tiny models: shows that it works, not how fast")
    parser.add_argument("--out", type=Path, default=Path("gpu_results"), help="directory of gpu.json and gpu.md")
    parser.add_argument("--slices", default=",".join(SLICES), help="which, joined by commas (default: all)")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help=f"seconds of one slice (default: {LIMIT_S:.0f})")
    arguments = parser.parse_args(argv)
    arguments.slices = arguments.slices.split(",")
    unknown = [name for name in arguments.slices if name not in SLICES]
    if unknown:
        parser.error(f"--slices has {unknown[0]!r}: choose of {', '.join(SLICES)}")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    absent = missing()
    if absent:
        print(f"error: this Python lacks {', '.join(absent)}: put their wheels into a directory and name it in WHEELS")
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = run_all(arguments)
    print((arguments.out / TABLE).read_text())
    return 1 if any("error" in results["slices"][name] for name in arguments.slices) else 0


if __name__ == "__main__":
    sys.exit(main())
