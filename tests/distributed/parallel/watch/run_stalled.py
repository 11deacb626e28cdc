"""``tools/train.py`` with one rank that comes to a halt at a chosen place.

Usage: run_stalled.py PLACE RANK ARGUMENTS...: PLACE is ``sample`` (the engine's next step, its peers spinning in shared
memory), ``learn`` (before the collectives of the optimizer step), ``save`` (a checkpoint's files are being written), or
``loop`` (as ``learn``, but the process is not stopped: it computes for ever).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from mega_rl.megatron.checkpoint import saving
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.rollout.vllm.engine import VLLMEngine
from tools import train

PLACES: dict[str, tuple[Any, str]] = {
    "sample": (VLLMEngine, "numbered_step"),
    "learn": (MegatronEngine, "optimizer_step"),
    "loop": (MegatronEngine, "optimizer_step"),
    "save": (saving, "sharded_state"),
}
BEATS_S = 1.0  # several beats, so that the place is known


def turn_in_circles() -> None:
    while True:
        pass


def halt_at(place: str) -> None:
    owner, name = PLACES[place]
    original = getattr(owner, name)

    def halting(*args: Any, **kwargs: Any) -> Any:
        time.sleep(BEATS_S)
        print(f"halted at {time.monotonic():.3f}\n", end="", flush=True)
        turn_in_circles() if place == "loop" else os.kill(os.getpid(), signal.SIGSTOP)
        return original(*args, **kwargs)

    setattr(owner, name, halting)


if __name__ == "__main__":
    place, rank, *arguments = sys.argv[1:]
    if os.environ["RANK"] == rank:
        halt_at(place)
    train.main(arguments)
