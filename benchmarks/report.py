"""What the benchmarks have in common: a markdown table, the command that made it, the machine, a JSON file."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]


def machine(device: str) -> str:
    """One line that names what the figures were measured on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    processor = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    return f"{device}, {processor}, {cores} cores, {torch.get_num_threads()} threads used, torch {torch.__version__}"


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.is_file() else []


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A markdown table; floats get three significant digits."""
    cells = [[_cell(value) for value in row] for row in rows]
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def command() -> str:
    """The command that started this program, as it is typed in the root of the repository."""
    is_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    launcher = ["torchrun", "--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"]] if is_torchrun else ["python"]
    script, *arguments = sys.argv
    path = Path(script).resolve()
    if any(path.is_relative_to(ROOT / folder) for folder in ("benchmarks", "tests")):
        return shlex.join([*launcher, "-m", ".".join(path.relative_to(ROOT).with_suffix("").parts), *arguments])
    return shlex.join([*launcher, script, *arguments])


def publish(title: str, text: str, device: str, results: dict[str, Any], json_path: Path | None) -> None:
    """Print the table with its command and machine; write ``results`` with both where a path is given."""
    print(f"### {title}\n\n{text}\n\nCommand: `{command()}`\nMachine: {machine(device)}", flush=True)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        document = {"command": command(), "machine": machine(device), **results}
        json_path.write_text(json.dumps(document, indent=2) + "\n")
