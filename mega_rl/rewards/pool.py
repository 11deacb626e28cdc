"""A pool of reward workers: calls in, answers out, and whatever a reward does to its worker costs its sample only."""

from __future__ import annotations

import selectors
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mega_rl.rewards.answers import garbled, read_answers, read_kinds, read_refusal
from mega_rl.rewards.process import WorkerFailure, WorkerProcess
from mega_rl.rewards.scratch import sweep
from mega_rl.rewards.worker import ASYNC, GARBLED, OUT_OF_MEMORY, SAMPLE, TIMED_OUT, Answer, Call, Sample, Setup

START_TIMEOUT_S = 120.0  # a reward's imports may be large
MAX_FAILED_STARTS = 3  # in a row
NUM_TOGETHER = 16  # samples per call, to send fewer messages; a batch reward gets as many, whatever the pool
ASYNC_MARGIN_S = 1.0  # a worker times its coroutines itself; past this, one of them blocks the others
WATCH_S = 0.25  # from one look at the memory of a worker to the next


class PoolError(ValueError):
    """The rewards cannot be run: one sentence with the fix."""


@dataclass(frozen=True)
class _Job:
    reward: int
    samples: tuple[int, ...]  # indices
    needs_fresh: bool = False  # only for a worker that served no call yet: nothing of another call interferes


@dataclass
class _Slot:
    """One place of the pool: its present worker, the worker's present call, and until when that may take."""

    worker: WorkerProcess
    start_deadline: float  # monotonic seconds
    is_ready: bool = False
    is_fresh: bool = True  # served no call yet
    watched_at: float = 0.0  # monotonic seconds
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
        sweep()
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
            share = max(1, len(samples) // (4 * len(self._slots)))  # with few, slow samples workers end together
            together = min(share, NUM_TOGETHER) if kind == SAMPLE else NUM_TOGETHER
            for start in range(0, len(samples), together):
                work.queue.append(_Job(reward, tuple(range(start, min(start + together, len(samples))))))
        while work.queue or any(slot.job for slot in self._slots):
            for slot in self._slots:
                if slot.is_ready and slot.job is None and work.queue:
                    self._give(slot, work)
            self._advance(work)
        return [[_known(value) for value in of_reward] for of_reward in work.answers]

    def _give(self, slot: _Slot, work: _Work) -> None:
        if slot.worker.has_ended() or (work.queue[0].needs_fresh and not slot.is_fresh):
            self._replace(slot)  # it ended while idle, so no sample is to blame
            return
        slot.job = work.queue.popleft()
        slot.number += 1
        slot.sent_at = time.monotonic()
        slot.worker.progress.begin(0)
        try:
            slot.worker.send(Call(slot.number, slot.job.reward, [work.samples[i] for i in slot.job.samples]))
        except WorkerFailure as failure:
            if slot.is_fresh:
                self._fail(slot, work, failure)
            else:  # an earlier call may have harmed the worker
                work.queue.appendleft(slot.job)
                slot.job = None
                self._replace(slot)

    def _advance(self, work: _Work | None) -> None:
        """Wait for the next message or deadline, and act on it."""
        waiting = [slot for slot in self._slots if not slot.is_idle]
        if not waiting:
            return
        ended = [slot for slot in waiting if slot.worker.has_ended()]  # asked first: what it had sent is ready then
        with selectors.DefaultSelector() as selector:
            for slot in waiting:
                selector.register(slot.worker, selectors.EVENT_READ, slot)
            timeout_s = max(0.0, min(map(self._deadline, waiting)) - time.monotonic())
            ready = [key.data for key, _ in selector.select(min(timeout_s, WATCH_S))]
        for slot in ready:
            try:
                message = slot.worker.receive()
                if message is not None:
                    self._take(slot, work, message)
            except WorkerFailure as failure:
                self._fail(slot, work, failure)
        for slot in waiting:
            if slot.is_idle:
                continue
            if slot in ended and slot not in ready:  # something else holds its end of the channel
                self._fail(slot, work, slot.worker.failure())
            elif time.monotonic() >= self._deadline(slot):  # bytes that came in are no message yet
                detail = f"gave no value within {self._setup.timeout_s:g} s"
                self._fail(slot, work, WorkerFailure(TIMED_OUT, detail))
            elif time.monotonic() >= slot.watched_at + WATCH_S:
                slot.watched_at = time.monotonic()
                if slot.worker.exceeds(self._setup.memory_bytes):
                    self._fail(slot, work, WorkerFailure(OUT_OF_MEMORY, "ran out of memory"))

    def _deadline(self, slot: _Slot) -> float:
        """Monotonic seconds until which this busy worker may take; moves from sample to sample, up to its bound."""
        if slot.job is None:
            return slot.start_deadline
        bound = self._bound(slot, slot.job)
        if self._kinds[slot.job.reward] != SAMPLE:
            return bound
        since = max(slot.sent_at, slot.worker.progress.read()[1])  # a reward may have written anything there
        return min(bound, since + self._setup.timeout_s)

    def _bound(self, slot: _Slot, job: _Job) -> float:
        """Monotonic seconds until which the call may take, whatever its progress: its samples share their time."""
        if self._kinds[job.reward] == ASYNC:
            return slot.sent_at + self._setup.timeout_s + ASYNC_MARGIN_S  # they run together
        return slot.sent_at + len(job.samples) * self._setup.timeout_s

    def _take(self, slot: _Slot, work: _Work | None, message: dict[str, Any]) -> None:
        if not slot.is_ready:
            if (refusal := read_refusal(message)) is not None:
                raise PoolError(refusal)
            kinds = read_kinds(message, len(self._setup.rewards))
            if self._kinds and kinds != self._kinds:  # the same rewards as in every other worker
                raise garbled()
            self._kinds = kinds
            slot.is_ready, slot.failed_starts = True, 0
            return
        assert slot.job is not None and work is not None, "only workers with a call are listened to"
        answers = read_answers(message, slot.number, len(slot.job.samples))
        for index, answer in zip(slot.job.samples, answers, strict=True):
            work.answers[slot.job.reward][index] = answer
        slot.job, slot.is_fresh = None, False

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
            self._blame(slot, job, work, failure)
        self._replace(slot)

    def _blame(self, slot: _Slot, job: _Job, work: _Work, failure: WorkerFailure) -> None:
        """The sample that was being worked on is unknown; the others of its call are tried again."""
        cause, detail = failure.args
        is_garbled = cause == GARBLED  # perhaps by something that an earlier sample left running
        position = slot.worker.progress.read()[0]
        is_plausible = self._kinds[job.reward] == SAMPLE and 0 <= position < len(job.samples)
        if len(job.samples) == 1 and (slot.is_fresh or not is_garbled):
            work.answers[job.reward][job.samples[0]] = cause, detail
        elif is_plausible and not is_garbled and time.monotonic() < self._bound(slot, job):
            work.answers[job.reward][job.samples[position]] = cause, detail
            work.queue.appendleft(_Job(job.reward, job.samples[:position] + job.samples[position + 1 :]))
        else:  # a batch reward, or one that overwrote its position: a call per sample will tell
            work.queue.extendleft(_Job(job.reward, (index,), is_garbled) for index in reversed(job.samples))

    def _replace(self, slot: _Slot) -> None:
        slot.worker.kill()
        new = self._started()
        slot.worker, slot.start_deadline, slot.is_ready, slot.is_fresh = new.worker, new.start_deadline, False, True

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
