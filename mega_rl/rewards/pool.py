"""A pool of reward workers: calls in, answers out, and whatever a reward does to its worker costs its sample only."""

from __future__ import annotations

import selectors
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mega_rl.rewards.process import WorkerFailure, WorkerProcess
from mega_rl.rewards.worker import GARBLED, TIMED_OUT, Answer, Call, Sample, Setup

START_TIMEOUT_S = 120.0  # a reward's imports may be large
MAX_FAILED_STARTS = 3  # in a row
NUM_TOGETHER = 16  # samples of one call: fewer, longer messages; and what a reward of several gets, whatever the pool
ASYNC_MARGIN_S = 1.0  # a worker times its coroutines itself; past this, one of them blocks the others


class PoolError(ValueError):
    """The rewards cannot be run: one sentence with the fix."""


@dataclass(frozen=True)
class _Job:
    reward: int
    samples: tuple[int, ...]  # indices


@dataclass
class _Slot:
    """One place of the pool: its present worker, and what that is doing until when."""

    worker: WorkerProcess
    start_deadline: float  # monotonic seconds
    is_ready: bool = False
    job: _Job | None = None
    sent_at: float = 0.0  # monotonic seconds
    number: int = 0  # of the latest call
    failed_starts: int = 0

    @property
    def is_idle(self) -> bool:
        return self.is_ready and self.job is None


@dataclass
class _Work:
    """The calls of one `WorkerPool.run`."""

    samples: Sequence[Sample]
    answers: list[list[Answer | None]]  # [reward][sample]
    queue: deque[_Job] = field(default_factory=deque)


class WorkerPool:
    """Workers that load all rewards once and live until `close`, garbage collection or the end of this process."""

    def __init__(self, setup: Setup, num_workers: int) -> None:
        """Start the workers and wait until all have loaded the rewards.

        Raises:
            PoolError: a reward is refused, or its import ends or hangs the worker.
        """
        self._setup = setup
        self._kinds: list[str] = []  # of every reward: sample | async | batch
        self._slots: list[_Slot] = []
        self.close = weakref.finalize(self, _kill_all, self._slots)
        try:
            for _ in range(num_workers):
                self._slots.append(self._started())
            while not all(slot.is_ready for slot in self._slots):
                self._advance(None)
        except BaseException:
            self.close()
            raise

    def worker_pids(self) -> list[int]:
        return [slot.worker.pid for slot in self._slots]

    def run(self, samples: Sequence[Sample]) -> list[list[Answer]]:
        """The answer of every reward to every sample, ``[reward][sample]``.

        Raises:
            PoolError: workers cannot be replaced.
        """
        work = _Work(samples, [[None] * len(samples) for _ in self._kinds])
        for reward, kind in enumerate(self._kinds):
            share = max(1, len(samples) // (4 * len(self._slots)))  # few slow samples: workers end at about one time
            together = min(share, NUM_TOGETHER) if kind == "sample" else NUM_TOGETHER
            for start in range(0, len(samples), together):
                work.queue.append(_Job(reward, tuple(range(start, min(start + together, len(samples))))))
        while work.queue or any(slot.job for slot in self._slots):
            for slot in self._slots:
                if slot.is_ready and slot.job is None and work.queue:
                    self._give(slot, work)
            self._advance(work)
        return [[_known(value) for value in of_reward] for of_reward in work.answers]

    def _give(self, slot: _Slot, work: _Work) -> None:
        if slot.worker.has_ended():  # while idle, so no sample is to blame
            self._replace(slot)
            return
        slot.job = work.queue.popleft()
        slot.number += 1
        slot.sent_at = time.monotonic()
        slot.worker.progress.begin(0)
        try:
            slot.worker.send(Call(slot.number, slot.job.reward, [work.samples[i] for i in slot.job.samples]))
        except WorkerFailure as failure:
            self._fail(slot, work, failure)

    def _advance(self, work: _Work | None) -> None:
        """Wait for the next message or deadline, and act on it."""
        waiting = [slot for slot in self._slots if not slot.is_idle]
        if not waiting:
            return
        with selectors.DefaultSelector() as selector:
            for slot in waiting:
                selector.register(slot.worker, selectors.EVENT_READ, slot)
            timeout_s = max(0.0, min(map(self._deadline, waiting)) - time.monotonic())
            ready = [key.data for key, _ in selector.select(timeout_s)]
        for slot in ready:
            try:
                message = slot.worker.receive()
                if message is not None:
                    self._take(slot, work, message)
            except WorkerFailure as failure:
                self._fail(slot, work, failure)
        for slot in waiting:
            if slot not in ready and time.monotonic() >= self._deadline(slot):
                detail = f"gave no value within {self._setup.timeout_s:g} s"
                self._fail(slot, work, WorkerFailure(TIMED_OUT, detail))

    def _deadline(self, slot: _Slot) -> float:
        """Monotonic seconds until which this busy worker may take; moves from sample to sample."""
        if slot.job is None:
            return slot.start_deadline
        # Within what is possible, whatever a reward may have written there.
        since = max(slot.sent_at, min(slot.worker.progress.read()[1], time.monotonic()))
        kind = self._kinds[slot.job.reward]
        # A batch is one call, so its samples share their time.
        count = len(slot.job.samples) if kind == "batch" else 1
        return since + count * self._setup.timeout_s + (ASYNC_MARGIN_S if kind == "async" else 0.0)

    def _take(self, slot: _Slot, work: _Work | None, message: dict[str, Any]) -> None:
        if not slot.is_ready:
            if "refused" in message:
                raise PoolError(message["refused"])
            self._kinds = message["ready"]
            slot.is_ready, slot.failed_starts = True, 0
            return
        assert slot.job is not None and work is not None, "a ready worker speaks only when it is asked"
        if message.get("number") != slot.number:
            raise WorkerFailure(GARBLED, "wrote to the channel between worker and trainer")
        if "unfit" in message:
            raise WorkerFailure(*message["unfit"])
        for index, value in zip(slot.job.samples, message["answers"], strict=True):
            work.answers[slot.job.reward][index] = value if isinstance(value, float) else (value[0], value[1])
        slot.job = None

    def _fail(self, slot: _Slot, work: _Work | None, failure: WorkerFailure) -> None:
        """Replace the worker, at the cost of its sample."""
        job, slot.job = slot.job, None
        if not slot.is_ready:
            slot.failed_starts += 1
            if work is None or slot.failed_starts >= MAX_FAILED_STARTS:
                names = ", ".join(name for name, _ in self._setup.rewards)
                raise PoolError(
                    f"rewards: a worker process {failure.args[1]} while it loaded {names}; fix what the import of the "
                    "reward does, or raise reward_workers.memory_bytes"
                )
        if job is not None and work is not None:
            self._blame(job, slot.worker.progress.read()[0], work, failure)
        self._replace(slot)

    def _blame(self, job: _Job, position: int, work: _Work, failure: WorkerFailure) -> None:
        """The sample that was being worked on is unknown; the others of its call are tried again."""
        if len(job.samples) == 1:
            work.answers[job.reward][job.samples[0]] = (failure.args[0], failure.args[1])
        elif self._kinds[job.reward] == "sample" and 0 <= position < len(job.samples):
            work.answers[job.reward][job.samples[position]] = (failure.args[0], failure.args[1])
            work.queue.appendleft(_Job(job.reward, job.samples[:position] + job.samples[position + 1 :]))
        else:  # one call for all, or a reward that wrote over its position: one call each will tell
            work.queue.extendleft(_Job(job.reward, (index,)) for index in reversed(job.samples))

    def _replace(self, slot: _Slot) -> None:
        slot.worker.kill()
        new = self._started()
        slot.worker, slot.start_deadline, slot.is_ready = new.worker, new.start_deadline, False

    def _started(self) -> _Slot:
        worker = WorkerProcess()
        slot = _Slot(worker, time.monotonic() + START_TIMEOUT_S)
        try:
            worker.send(self._setup)
        except WorkerFailure as failure:
            worker.kill()
            raise PoolError(f"rewards: a worker process {failure.args[1]} as it started") from failure
        return slot


def _kill_all(slots: list[_Slot]) -> None:
    for slot in slots:
        slot.worker.kill()
    slots.clear()


def _known(value: Answer | None) -> Answer:
    assert value is not None, "every sample is answered or blamed"
    return value
