"""``tools/train.py`` to which something happens at a chosen place; ``tests/faults/runs.py`` starts it.

Usage: struck.py PLACE STEP ACT ARGUMENTS...: PLACE is ``start`` (the models are being built) or a phase of the STEP-th
step, or ``writer`` (a process that writes the checkpoint of that step).
The moment, in seconds of the clock that never jumps, is the content of the file ``MEGA_RL_STRUCK`` afterwards.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from mega_rl.observe.timers import Timers
from mega_rl.stages.models import trainer
from tools import train

INTO_PHASE_S = 0.02
MOMENT = "MEGA_RL_STRUCK"
DAY_S = 86400.0


def strike(act: str) -> None:
    """Do it, in the rank that has to."""
    what, _, whom = act.partition(" ")
    rank = os.environ["RANK"]
    if whom.startswith("rank") and whom != f"rank {rank}" or whom in ("torchrun", "worker", "workers") and rank != "0":
        return
    Path(os.environ[MOMENT]).write_text(str(time.monotonic()))
    if what in ("kill", "stop"):
        number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[what]
        for pid in targets(whom):
            os.kill(pid, number)
    else:
        ACTS[what]()


def targets(whom: str) -> list[int]:
    if whom == "torchrun":
        return [os.getppid()]
    if whom.startswith("worker"):
        workers = [p.pid for p in psutil.Process().children() if "mega_rl.rewards" in " ".join(p.cmdline())]
        assert workers, "no reward worker is running"
        return workers if whom == "workers" else workers[:1]
    return [os.getpid()]


def slow_storage() -> None:
    """Every sync of a file takes two seconds from now on, in the writers too: they are forked later."""
    fsync = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(2.0)
        fsync(descriptor)

    os.fsync = slow  # type: ignore[assignment]


def wrong_clock() -> None:
    """The clock of the wall jumps a day forward and back again, each second."""
    now = time.time
    time.time = lambda: now() + DAY_S * (int(now()) % 2)


def no_memory() -> None:
    """This process gets no more memory."""
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used, used))


def full_disk() -> None:
    """The file system of the output directory takes no more byte."""
    output_dir = Path(next(a.partition("=")[2] for a in sys.argv if a.startswith("trainer.output_dir=")))
    with (output_dir / "filler").open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(1 << 12))
            except OSError:
                return


ACTS: dict[str, Callable[[], None]] = {
    "slow_storage": slow_storage,
    "wrong_clock": wrong_clock,
    "no_memory": no_memory,
    "full_disk": full_disk,
}


def at_start(act: str) -> None:
    actor = trainer.actor

    def struck(*arguments: object) -> object:
        strike(act)
        return actor(*arguments)  # type: ignore[arg-type]

    trainer.actor = struck  # type: ignore[assignment]


def at_phase(place: str, step: int, act: str) -> None:
    """What is done to processes is done a little later than the phase begins, everything else just before it."""
    phase, steps = Timers.__call__, 0
    is_done = False

    @contextmanager
    def watched(self: Timers, name: str) -> Iterator[None]:
        nonlocal steps, is_done
        steps += name == "step"
        if name == place and steps == step and not is_done:
            is_done = True
            if act.startswith(("kill", "stop")):
                threading.Timer(INTO_PHASE_S, strike, (act,)).start()
            else:
                strike(act)
        with phase(self, name):
            yield

    Timers.__call__ = watched  # type: ignore[method-assign, assignment]


def in_writer(step: int, act: str) -> None:
    """Happens to the first process that a rank forks to write the checkpoint of the step."""
    inside = [0, 0]  # the step, and whether it is being saved
    phase = Timers.__call__

    @contextmanager
    def watched(self: Timers, name: str) -> Iterator[None]:
        inside[0] += name == "step"
        inside[1] += name == "save" and inside[0] == step
        with phase(self, name):
            yield

    def forked() -> None:
        if inside[1]:
            strike(act)

    Timers.__call__ = watched  # type: ignore[method-assign, assignment]
    os.register_at_fork(after_in_child=forked)


if __name__ == "__main__":
    place, number, act, *arguments = sys.argv[1:]
    tempfile.tempdir = None  # a copy of another process goes by its own variables
    if place == "start":
        at_start(act)
    elif place == "writer":
        in_writer(int(number), act)
    else:
        at_phase(place, int(number), act)
    train.end_with_torchrun()
    try:
        train.main(arguments)
    except Exception as error:  # noqa: BLE001 - as tools/train.py has it
        train.fail(error)
