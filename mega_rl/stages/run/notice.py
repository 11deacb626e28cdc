"""The notice that a run is to end soon: a signal after which it saves at the end of the step and stops.

torchrun passes SIGTERM on to the ranks and kills them 30 s later (``--shutdown-timeout``); schedulers send SIGTERM, or
a signal of the user's choice, some time before they end a job.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from mega_rl.parallel.collectives import gather_objects, smallest
from mega_rl.parallel.watch.watch import machine

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
NUM_SIGNALS = 1 << 8  # more than there are
NOBODY = 1 << 62  # above every rank and signal
_POLL_S = 0.2
_BEHIND_S = 3.0  # how much longer than the first rank of a machine the others wait: rank 0 speaks before it is ended


class Notice:
    """Listens for ``SIGNALS`` while its block runs, on the main thread.

    A rank that is told and does not come to the end of its step within ``grace_s`` ends as the signal would have ended
    it, the first rank of a machine before the others. So does one at once if another rank of this machine has died:
    torchrun then ends the others by the same signal.

    Args:
        grace_s: seconds; 0: the signals do what they do by default.
        say: tells the user.
    """

    def __init__(self, grace_s: float, say: Callable[[str], None]) -> None:
        self._grace_s, self._say = grace_s, say
        self._given: signal.Signals | None = None  # to this rank
        self.answer: signal.Signals | None = None  # what all ranks have agreed on
        self._neighbours: list[int] = []
        self._is_first = True  # of this machine

    def __enter__(self) -> Notice:
        if self._grace_s > 0:
            here = machine()  # hosts may have the same name
            ranks = gather_objects((here, os.getpid()))
            on_this_machine = [pid for of_rank, pid in ranks if of_rank == here]
            self._neighbours = [pid for pid in on_this_machine if pid != os.getpid()]
            self._is_first = on_this_machine[0] == os.getpid()
            self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            os.set_blocking(self._read, True)
            self._before: dict[signal.Signals, Any] = {n: signal.signal(n, lambda *_: None) for n in SIGNALS}
            # The number of a signal is written at once; a handler would wait until the main thread is back in Python.
            self._descriptor_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            threading.Thread(target=self._listen, name="notice", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._grace_s > 0:
            signal.set_wakeup_fd(self._descriptor_before)
            for number, handler in self._before.items():
                signal.signal(number, handler)
            os.write(self._write, b"\0")  # ends the thread
            os.close(self._write)

    def is_given(self) -> bool:
        """Whether any rank has been told, so that all of them save now. All ranks call it, once per step.

        The answer is what the first of these ranks was told.
        """
        if self._grace_s > 0:
            rank = dist.get_rank() if dist.is_initialized() else 0
            told = smallest(NOBODY if self._given is None else rank * NUM_SIGNALS + self._given)
            self.answer = None if told == NOBODY else signal.Signals(told % NUM_SIGNALS)
        return self.answer is not None

    def _listen(self) -> None:
        while (number := os.read(self._read, 1)) not in (b"", b"\0"):
            if number[0] in SIGNALS and self._given is None:
                self._given = signal.Signals(number[0])
                self._say(f"{self._given.name}: this run saves at the end of the step and stops")
                threading.Thread(target=self._wait, args=(self._given,), name="grace", daemon=True).start()
        os.close(self._read)

    def _wait(self, number: signal.Signals) -> None:
        end = time.monotonic() + self._grace_s + (0.0 if self._is_first else _BEHIND_S)
        while self.answer is None:
            if not all(_is_alive(pid) for pid in self._neighbours):
                _leave(number)
            if time.monotonic() >= end:
                self._say(
                    f"error: {number.name}, and no step ended within checkpoint.grace_s={self._grace_s:g} s: this run "
                    "ends without another checkpoint"
                )
                _leave(number)
            time.sleep(_POLL_S)


def _leave(number: signal.Signals) -> None:
    sys.stdout.flush()
    os._exit(128 + number)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
