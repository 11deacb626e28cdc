"""``tools/train.py`` that stops for ever at a chosen place, so that a test can kill it there.

Usage: run_held.py PLACE STEP ARGUMENTS...: PLACE is ``log`` (rank 0 has logged the step; the others go on) or ``save``
(the step's checkpoint is written but has no name yet).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mega_rl.observe.observer import Observer
from tools import train


def hold(place: str, step: int) -> None:
    print(f"held at {place} {step}\n", end="", flush=True)
    time.sleep(3600)


def hold_after_log(step: int) -> None:
    log = Observer.log

    def held_log(self: Observer, logged: int, metrics: Mapping[str, float]) -> None:
        log(self, logged, metrics)
        if logged == step and os.environ["RANK"] == "0":
            hold("log", step)

    Observer.log = held_log  # type: ignore[method-assign]


def hold_inside_save(step: int) -> None:
    rename = os.rename

    def held_rename(source: Any, target: Any) -> None:
        if Path(target).name == f"step_{step:08d}":
            hold("save", step)
        rename(source, target)

    os.rename = held_rename  # type: ignore[assignment]


if __name__ == "__main__":
    place, step, *arguments = sys.argv[1:]
    {"log": hold_after_log, "save": hold_inside_save}[place](int(step))
    train.main(arguments)
