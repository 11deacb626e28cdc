"""Whether a long run grows: resident memory, live objects of Python, open files and threads of each rank, by step.

    python -m tests.faults.soak [--stage sft|rl|made-up] [--steps 700] [--json PATH]

``made-up`` is rl with invented responses in the place of an engine: several times faster, and what grows there is not
the engine's. A tiny model on two processes of a CPU; a checkpoint every 20 steps, a validation every 50 (not with
made-up), TensorBoard and JSON on. Memory is the mean of a tenth of the steps: the second tenth, when everything has
been used once, and the last. The growth is what the project holds below 1 %.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import publish, table
from mega_rl.observe.timers import Timers
from mega_rl.rollout.collect.replay import ReplayEngine
from mega_rl.rollout.engine import Request
from mega_rl.stages.weights import engines
from mega_rl.types import Trajectory
from tests.distributed import conftest
from tests.launching.launch import run, torchrun_command
from tools import train

SETTINGS = ("checkpoint.save_freq=20", "validation.test_freq=50", "checkpoint.export_hf=false")
OUTPUT = "MEGA_RL_SOAK"  # the directory that ranks write their figures to
OBJECTS_EVERY = int(os.environ.get("MEGA_RL_SOAK_OBJECTS_EVERY", 100))  # steps: to count objects takes a while
MADE_UP = "made-up"


class MadeUpEngine(ReplayEngine):
    """Answers every request with digits of its seed."""

    def _find(self, request: Request) -> Trajectory:
        digits = [int(digit) for digit in str(request.seed)[: request.max_tokens]]
        return Trajectory.single_turn(
            request.prompt,
            request.sample_index,
            [3 + digit for digit in digits],
            [-2.5] * len(digits),
            "".join(map(str, digits)),
            "length",
            self._version,
        )

    def turn_to(self, version: int) -> None:
        self._version = version


def rank(arguments: list[str]) -> None:
    """One rank of the run; as each step begins it notes what it has."""
    process, phase = psutil.Process(), Timers.__call__
    path = Path(os.environ[OUTPUT]) / f"rank{os.environ['RANK']}.jsonl"
    number = 0
    with path.open("w", buffering=1) as file:

        @contextlib.contextmanager
        def noted(self: Timers, name: str) -> Iterator[None]:
            nonlocal number
            if name == "step":
                row: dict[str, Any] = {"rss": process.memory_info().rss, "files": process.num_fds()}
                row["threads"], row["blocks"] = process.num_threads(), sys.getallocatedblocks()
                if number % OBJECTS_EVERY == OBJECTS_EVERY - 1:
                    gc.collect()
                    kinds = Counter(type(thing).__name__ for thing in gc.get_objects())
                    row["objects"], row["kinds"] = sum(kinds.values()), dict(kinds.most_common(60))
                file.write(json.dumps(row) + "\n")
                number += 1
            with phase(self, name):
                yield

        Timers.__call__ = noted  # type: ignore[method-assign, assignment]
        engines.ReplayEngine = MadeUpEngine  # type: ignore[misc]
        train.main(arguments)


def figures(path: Path) -> dict[str, Any]:
    """What became more between the second tenth and the last."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    tenth = len(rows) // 10
    early, late = rows[tenth : 2 * tenth], rows[-tenth:]
    memory = [statistics.fmean(row["rss"] for row in part) for part in (early, late)]
    counted = [row for row in rows if "objects" in row]
    first, last = (Counter(row["kinds"]) for row in (counted[0], counted[-1]))
    return {
        "rss_mib": [round(value / 2**20, 1) for value in memory],
        "growth_percent": 100 * (memory[1] / memory[0] - 1),
        "files": [early[0]["files"], late[-1]["files"]],
        "threads": [early[0]["threads"], late[-1]["threads"]],
        "blocks": [early[0]["blocks"], late[-1]["blocks"]],
        "objects": [counted[0]["objects"], counted[-1]["objects"]],
        "grown_kinds": dict((last - first).most_common(5)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=("sft", "rl", MADE_UP), default="sft")
    parser.add_argument("--steps", type=int, default=700, help="at least 300")
    parser.add_argument("--json", type=Path, metavar="PATH")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak_") as scratch:
        root = Path(scratch)
        (root / "world").mkdir()
        world = conftest.write_world(root / "world")
        stage, extra = options.stage, ()
        if stage == MADE_UP:
            (root / "step_000001.jsonl").touch()  # a name that the configuration wants to see; nothing is read of it
            stage, extra = "rl", (f"rollout.replay={root}", "trainer.gates.disabled=[engine]")
        arguments = ("--config", getattr(world, stage), f"trainer.output_dir={root / 'run'}", *extra)
        command = torchrun_command(__file__, *arguments, *SETTINGS, f"trainer.total_steps={options.steps}")
        launched = run(command, timeout=6 * 3600, env={OUTPUT: scratch}).check()
        found = {path.stem: figures(path) for path in sorted(root.glob("rank*.jsonl"))}
    names = ("rss_mib", "growth_percent", "files", "threads", "blocks", "objects")
    rows = [
        [name, *(f"{f[0]} -> {f[1]}" if isinstance(f := row[n], list) else f for n in names)]
        for name, row in found.items()
    ]
    header = ["process", "resident MiB", "growth %", "open files", "threads", "blocks of Python", "objects"]
    title = f"{options.steps} steps of {options.stage}, {launched.seconds:.0f} s"
    publish(title, table(header, rows), "cpu", {"ranks": found}, options.json)


if __name__ == "__main__":
    if OUTPUT in os.environ:
        rank(sys.argv[1:])
    else:
        main()
