"""The watch that every rank keeps over all ranks: a run in which nothing moves any more says who holds it up, and ends.

Rank 0 hears all ranks and decides; the others hear rank 0. All of it goes over a store that rank 0 serves, so if rank 0
is the one that is stopped, the others hear nothing and know who it is.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from mega_rl.observe.heartbeat import HEART, Wait
from mega_rl.parallel.collectives import gather_objects
from mega_rl.parallel.watch.copy_server import start_of
from mega_rl.parallel.watch.stall import CHECKS_PER_LIMIT, Beat, StallDetector, Verdict

MAX_PERIOD_S = 2.0
MARGIN = 0.9  # of a collective's own limit, which ends a run without naming anyone
SAY_TIMEOUT_S = 5.0  # a full pipe or a hanging file system must not keep a process from ending

# Where libraries call each other's ranks: a rank that is in there when nothing moves is waiting, and not to blame.
COMMUNICATION = ("/torch/distributed/", "/vllm/distributed/", "/megatron/core/pipeline_parallel/p2p")
INNERMOST_FRAMES = 5


class Watch:
    """This rank's part of the watch: two threads, which end with ``stop``.

    The one that decides never waits for the store, which may be what does not answer.
    """

    def __init__(self, store: dist.Store, rank: int, num_ranks: int, limit_s: float, start_limit_s: float) -> None:
        """
        Args:
            limit_s: see ``StallDetector``, and ``start_limit_s`` too.
        """
        self.stacks: Path | None = None  # directory for the stacks of the ranks; None: they go to stderr
        self._store, self._rank = store, rank
        self._heard_ranks = range(num_ranks) if rank == 0 else range(1)
        self._period_s = min(MAX_PERIOD_S, limit_s / CHECKS_PER_LIMIT)
        self._gauge_s = limit_s / 10
        self._judge = StallDetector(limit_s, start_limit_s, time.monotonic())
        self._machine, self._born, self._host = machine(), start_of(os.getpid()), socket.gethostname()
        self._number = 0
        self._verdict: Verdict | None = None
        self._heard: list[Beat] = []
        self._is_over = False
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"watch{target.__name__}", daemon=True)
            for target in (self._exchange, self._decide)
        ]
        store.set(_key(rank), self._beat().encoded())

    def start(self) -> None:
        """Begin; collective over the default group."""
        self._heard = [beat for beat in gather_objects(self._beat()) if beat.rank in self._heard_ranks]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Leave in good order: the others do not wait for this rank any more."""
        self._is_over = True
        with suppress(RuntimeError):  # rank 0 may have gone
            self._store.set(_key(self._rank), self._beat().encoded())
        self._stopped.set()
        for thread in self._threads:
            thread.join(self._period_s)

    def _beat(self) -> Beat:
        wait = HEART.wait or communication()
        return Beat(
            self._rank,
            self._host,
            self._machine,
            os.getpid(),
            self._born,
            self._number,
            HEART.count,
            HEART.phase,
            HEART.step,
            waits_for="" if wait is None else wait.for_whom,
            is_excused=wait is not None and wait.is_for_ranks,
            is_over=self._is_over,
            verdict=self._verdict,
        )

    def _exchange(self) -> None:
        """Tell and hear, until the store is gone: then its rank is heard no more, like one that is stopped."""
        keys = [_key(rank) for rank in self._heard_ranks]
        with suppress(RuntimeError):
            while not self._stopped.wait(self._period_s):
                self._store.set(_key(self._rank), self._beat().encoded())
                self._heard = [Beat.decoded(text) for text in self._store.multi_get(keys)]

    def _decide(self) -> None:
        measured_at = time.monotonic()
        while not self._stopped.wait(self._period_s):
            now = time.monotonic()
            if now - measured_at >= self._gauge_s:
                HEART.read_gauges()
                measured_at = now
            self._number += 1
            if (found := self._find(self._heard, now)) is not None:
                self._verdict = found
                self._end(found)

    def _find(self, heard: list[Beat], now: float) -> Verdict | None:
        for beat in heard:
            self._judge.hear(beat, now)
        self._judge.look(now)
        if self._rank == 0:
            return self._judge.silent(now) or self._judge.stuck(now)
        decided = next((beat.verdict for beat in heard), None)
        return decided or self._judge.silent(now)

    def _end(self, verdict: Verdict) -> None:
        """End this process, once the others have had the time to hear of it, and the one that is to blame."""
        speaker = threading.Thread(target=self._say, args=(verdict,), daemon=True)
        speaker.start()
        speaker.join(SAY_TIMEOUT_S)
        time.sleep(3 * self._period_s + 1.0)
        if verdict.rank != self._rank and verdict.machine == self._machine and start_of(verdict.pid) == verdict.born:
            with suppress(OSError):
                os.kill(verdict.pid, signal.SIGKILL)  # a stopped process takes no other signal
        os._exit(1)

    def _say(self, verdict: Verdict) -> None:
        where = "" if self.stacks is None else f"; the stacks of the ranks that still run are in {self.stacks}"
        os.write(2, f"error: {verdict.sentence}{where}\n".encode())
        if self.stacks is None:
            faulthandler.dump_traceback(2)
            return
        self.stacks.mkdir(parents=True, exist_ok=True)
        with (self.stacks / f"rank_{self._rank}.txt").open("w") as file:
            file.write(f"{verdict.sentence}\n\n")
            file.flush()
            faulthandler.dump_traceback(file)


@contextmanager
def watched(store: dist.Store, stacks: Path, stall_timeout_s: float, collective_timeout_s: float) -> Iterator[None]:
    """Keep the watch while the block runs; collective over the default group.

    Args:
        stacks: directory for the stacks of the ranks; made if it is needed.
        stall_timeout_s: ``trainer.stall_timeout_s``.
        collective_timeout_s: ``trainer.collective_timeout_s``.
    """
    start_limit_s = MARGIN * collective_timeout_s
    limit_s = min(stall_timeout_s, start_limit_s)
    watch = Watch(store, dist.get_rank(), dist.get_world_size(), limit_s, start_limit_s)
    watch.stacks = stacks
    watch.start()
    try:
        yield
    finally:
        watch.stop()


def communication() -> Wait | None:
    """The call between ranks that this process's main thread is in, as far as its Python frames tell."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    for _ in range(INNERMOST_FRAMES):
        if frame is None:
            break
        if any(place in frame.f_code.co_filename for place in COMMUNICATION):
            return Wait(f"the other ranks in {frame.f_code.co_name}", is_for_ranks=True)
        frame = frame.f_back
    return None


def machine() -> str:
    """What two processes have in common for which a process id means the same process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"unknown, seen by {os.getpid()} on {socket.gethostname()}"


def _key(rank: int) -> str:
    return f"beat/{rank}"
