"""What logs the steps keeps none of them: after many steps as much memory is in use as after a few."""

from __future__ import annotations

import gc
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from mega_rl.observe.observer import Observer
from mega_rl.observe.sinks.sinks import ShownSample
from mega_rl.observe.timers import Timers

NAMES = ("reward/mean", "actor/loss", "actor/grad_norm", "response_length/mean")
STEPS = 300
SLACK = STEPS // 2  # blocks that come and go by themselves; a leak has one per step
PATIENCE_S = 60.0  # for what other threads hold, such as that of TensorBoard on a busy machine; a leak stays


@dataclass
class Options:
    progress: bool = False
    tensorboard: bool = True
    jsonl: bool = True
    wandb_project: str | None = None
    swanlab_project: str | None = None


def blocks_after(steps: range, observer: Observer, timers: Timers) -> int:
    """The number of blocks of memory that Python's objects have after some more steps."""
    for step in steps:
        with timers("step"), timers("update"):
            pass
        metrics = {name: step + 0.5 for name in NAMES}
        observer.log(step, metrics | timers.collect() | timers.collect_peaks())
        observer.samples(step, "validation", [ShownSample("prompt", f"response {step}", "4", 1.0, 3, "stop")])
        observer.distribution(step, "rewards", [0.0, float(step)])
    gc.collect()
    return sys.getallocatedblocks()


def test_logging_keeps_nothing(tmp_path: Path) -> None:
    timers = Timers(memory=lambda: {"host": 1 << 30})
    with Observer.create(Options(), tmp_path, is_main=True, resume_step=0, total_steps=1000) as observer:
        blocks_after(range(50), observer, timers)
        few = blocks_after(range(50, 100), observer, timers)
        many = blocks_after(range(100, 100 + STEPS), observer, timers)
        deadline = time.monotonic() + PATIENCE_S
        while many - few >= SLACK and time.monotonic() < deadline:
            time.sleep(0.1)
            many = blocks_after(range(0), observer, timers)
    assert many - few < SLACK
