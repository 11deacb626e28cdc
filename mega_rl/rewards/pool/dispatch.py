"""Which worker gets which samples: every call, answer, deadline and replacement of a pool's workers, in one thread."""

from __future__ import annotations

import os
import queue
import selectors
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from mega_rl.observe.heartbeat import HEART
from mega_rl.rewards.functions.registry import IMAGES
from mega_rl.rewards.pool.answers import garbled, read_answers, read_kinds, read_refusal
from mega_rl.rewards.pool.process import WorkerFailure, WorkerProcess
from mega_rl.rewards.pool.worker import (
    ASYNC,
    GARBLED,
    OUT_OF_MEMORY,
    SAMPLE,
    TIMED_OUT,
    Answer,
    WorkerCall,
    WorkerSetup,
)

START_TIMEOUT_S = 120.0  # a reward's imports may be large
MAX_FRUITLESS = 3  # workers in a row, in one place, that end before they have told anything about a sample
NUM_TOGETHER = 16  # samples per call at most, to send fewer messages
CALL_S = 0.02  # samples are put into one call as long as all of them together take no more, going by earlier ones
FIRST_PACE_S = 0.02  # what a sample is taken to need before one has been seen
ASYNC_MARGIN_S = 1.0  # a worker times its coroutines itself; past this, one of them blocks the others
WATCH_S = 0.25  # from one look at the memory of a worker to the next


class PoolError(ValueError):
    """The rewards cannot be run: one sentence with the fix."""


@dataclass
class SubmittedWork:
    """Samples that were submitted together."""

    number: int  # counts submissions
    samples: Sequence[bytes]  # pickled, see `worker.WorkerCall`
    rewards: Sequence[int] | None = None  # that score them, in the order of the answers; None: all
    answers: dict[int, list[Answer | None]] = field(default_factory=dict)  # reward -> [sample]
    num_missing: int = 0
    result: Future[list[list[Answer]]] = field(default_factory=Future)

    def take(self, reward: int, sample: int, answer: Answer) -> None:
        self.answers[reward][sample] = answer
        self.num_missing -= 1
        if not self.num_missing:
            self.result.set_result([[_known(value) for value in of_reward] for of_reward in self.answers.values()])


Entry = tuple[SubmittedWork, int]  # a sample of a submission


@dataclass(frozen=True)
class _Job:
    reward: int
    entries: tuple[Entry, ...]
    needs_fresh: bool = False  # only for a worker that served no call yet: nothing of another call interferes


@dataclass
class Slot:
    """One place of the pool: its present worker, the worker's present call, and until when that may take."""

    worker: WorkerProcess
    start_deadline: float  # monotonic seconds
    is_ready: bool = False
    is_fresh: bool = True  # served no call yet
    watched_at: float = 0.0  # monotonic seconds
    job: _Job | None = None
    sent_at: float = 0.0  # monotonic seconds
    number: int = 0  # of the latest call
    num_fruitless: int = 0

    @property
    def is_idle(self) -> bool:
        return self.is_ready and self.job is None


class RewardDispatcher:
    """Workers that load all rewards once, and what waits for them. All methods but `put` belong to one thread."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._kinds: list[str] = []  # of every reward: sample | async | batch
        self.takes_images = False  # whether one of them does
        self.slots: list[Slot] = []
        self._given: queue.SimpleQueue[SubmittedWork] = queue.SimpleQueue()
        self._is_given = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # readable if something is
        self._open: dict[int, SubmittedWork] = {}  # submissions with samples whose answers are missing
        self._again: deque[_Job] = deque()  # calls that failed, to be tried before anything else
        self._waiting: list[deque[Entry]] = []  # of every reward: samples that no worker has got yet
        self._pace_s: list[float] = []  # of every reward: about how long a sample takes, the latest ones counting most
        self._is_starting = True
        self._is_closing = False
        self._lock = threading.Lock()
        self._error: Exception | None = None  # why nothing is taken in any more

    def put(self, work: SubmittedWork) -> None:
        """Hand work over, from any thread."""
        work.result.set_running_or_notify_cancel()
        with self._lock:
            if self._error is None:
                self._given.put(work)
                os.eventfd_write(self._is_given, 1)
                return
        work.result.set_exception(self._error)

    def close(self) -> None:
        """Have `start` or `serve` return soon; from any thread."""
        with self._lock:
            if self._error is None:
                self._is_closing = True
                os.eventfd_write(self._is_given, 1)

    def start(self, num_workers: int) -> None:
        """Start the workers and wait until all have loaded the rewards.

        Raises:
            PoolError: a reward is refused, or its import ends or hangs the worker.
        """
        for _ in range(num_workers):
            self.slots.append(self._started())
        while not self._is_closing and not all(slot.is_ready for slot in self.slots):
            self._advance()
        self._is_starting = False
        self._waiting = [deque() for _ in self._kinds]
        self._pace_s = [FIRST_PACE_S] * len(self._kinds)

    def serve(self) -> None:
        """Work until `close`.

        Raises:
            PoolError: workers cannot be replaced.
        """
        while not self._is_closing:
            self._accept()
            for slot in self.slots:
                if slot.is_idle and (self._again or any(self._waiting)):
                    self._give(slot)
            self._advance()

    def end(self, error: Exception) -> None:
        """Kill the workers; what is still without an answer, or comes later, fails with the error."""
        with self._lock:
            self._error = error
            os.close(self._is_given)
        for slot in self.slots:
            slot.worker.kill()
        self.slots.clear()
        given = [self._given.get() for _ in range(self._given.qsize())]
        for work in (*self._open.values(), *given):
            work.result.set_exception(error)
        self._open.clear()

    def _accept(self) -> None:
        """Take in what was put."""
        while not self._given.empty():
            work = self._given.get()
            rewards = range(len(self._kinds)) if work.rewards is None else work.rewards
            work.answers = {reward: [None] * len(work.samples) for reward in rewards}
            work.num_missing = len(work.answers) * len(work.samples)
            if not work.num_missing:
                work.result.set_result([[] for _ in work.answers])
                continue
            self._open[work.number] = work
            for reward in work.answers:
                self._waiting[reward].extend((work, index) for index in range(len(work.samples)))

    def _next_job(self) -> _Job:
        """The oldest samples first."""
        if self._again:
            return self._again.popleft()
        reward = min(
            (reward for reward, waiting in enumerate(self._waiting) if waiting),
            key=lambda reward: self._waiting[reward][0][0].number,
        )
        waiting = self._waiting[reward]
        num_together = NUM_TOGETHER
        if self._kinds[reward] == SAMPLE:  # one after another in the worker: the later ones wait for the earlier ones
            share = len(waiting) // (4 * len(self.slots))  # towards the end the workers end together
            num_together = max(1, min(NUM_TOGETHER, share, int(CALL_S / max(self._pace_s[reward], 1e-6))))
        return _Job(reward, tuple(waiting.popleft() for _ in range(min(num_together, len(waiting)))))

    def _give(self, slot: Slot) -> None:
        if slot.worker.has_ended():  # while idle, so no sample is to blame
            self._count_fruitless(slot, slot.worker.failure())
            self._replace(slot)
            return
        job = self._next_job()
        if job.needs_fresh and not slot.is_fresh:
            self._again.appendleft(job)
            self._replace(slot)
            return
        slot.job = job
        slot.number += 1
        slot.sent_at = time.monotonic()
        slot.worker.progress.begin(0)
        try:
            slot.worker.send(WorkerCall(slot.number, job.reward, [work.samples[index] for work, index in job.entries]))
        except WorkerFailure as failure:
            if slot.is_fresh:
                self._fail(slot, failure)
            else:  # an earlier call may have harmed the worker
                self._again.appendleft(job)
                slot.job = None
                self._replace(slot)

    def _advance(self) -> None:
        """Wait for the next message, deadline or work, and act on it."""
        busy = [slot for slot in self.slots if not slot.is_idle]
        if busy:
            HEART.mark()  # every call ends within its own limit
        ended = [slot for slot in busy if slot.worker.has_ended()]  # asked first: what it had sent is ready then
        with selectors.DefaultSelector() as selector:
            selector.register(self._is_given, selectors.EVENT_READ, None)
            for slot in busy:
                selector.register(slot.worker, selectors.EVENT_READ, slot)
            next_s = min((self._deadline(slot) - time.monotonic() for slot in busy), default=WATCH_S)
            found = selector.select(min(max(0.0, next_s), WATCH_S) if busy else None)
        ready = [key.data for key, _ in found if key.data is not None]
        if len(ready) < len(found):
            os.eventfd_read(self._is_given)
        for slot in ready:
            try:
                message = slot.worker.receive()
                if message is not None:
                    self._take(slot, message)
            except WorkerFailure as failure:
                self._fail(slot, failure)
        for slot in busy:
            if slot.is_idle:
                continue
            if slot in ended and slot not in ready:  # something else holds its end of the channel
                self._fail(slot, slot.worker.failure())
            elif time.monotonic() >= self._deadline(slot):  # bytes that came in are no message yet
                limit_s = START_TIMEOUT_S if slot.job is None else self._setup.timeout_s
                detail = f"gave no {'sign' if slot.job is None else 'value'} within {limit_s:g} s"
                self._fail(slot, WorkerFailure(TIMED_OUT, detail))
            elif time.monotonic() >= slot.watched_at + WATCH_S:
                slot.watched_at = time.monotonic()
                if slot.worker.exceeds(self._setup.memory_bytes):
                    self._fail(slot, WorkerFailure(OUT_OF_MEMORY, "ran out of memory"))

    def _deadline(self, slot: Slot) -> float:
        """Monotonic seconds until which this busy worker may take; moves from sample to sample, up to its bound."""
        if slot.job is None:
            return slot.start_deadline
        bound = self._bound(slot, slot.job)
        if self._kinds[slot.job.reward] != SAMPLE:
            return bound
        since = max(slot.sent_at, slot.worker.progress.read()[1])  # a reward may have written anything there
        return min(bound, since + self._setup.timeout_s)

    def _bound(self, slot: Slot, job: _Job) -> float:
        """Monotonic seconds until which the call may take, whatever its progress: its samples share their time."""
        if self._kinds[job.reward] == ASYNC:
            return slot.sent_at + self._setup.timeout_s + ASYNC_MARGIN_S  # they run together
        return slot.sent_at + len(job.entries) * self._setup.timeout_s

    def _take(self, slot: Slot, message: dict[str, Any]) -> None:
        if not slot.is_ready:
            if (refusal := read_refusal(message)) is not None:
                raise PoolError(refusal)
            kinds = read_kinds(message, len(self._setup.rewards))
            if self._kinds and kinds != self._kinds:  # the same rewards as in every other worker
                raise garbled()
            self._kinds, self.takes_images = kinds, IMAGES in message
            slot.is_ready = True
            return
        job = slot.job
        assert job is not None, "only workers with a call are listened to"
        answers = read_answers(message, slot.number, len(job.entries))
        for (work, index), answer in zip(job.entries, answers, strict=True):
            self._answer(slot, job.reward, work, index, answer)
        self._note_pace(slot, job)
        slot.job, slot.is_fresh = None, False

    def _answer(self, slot: Slot, reward: int, work: SubmittedWork, index: int, answer: Answer) -> None:
        slot.num_fruitless = 0
        work.take(reward, index, answer)
        if not work.num_missing:
            del self._open[work.number]

    def _note_pace(self, slot: Slot, job: _Job) -> None:
        latest = (time.monotonic() - slot.sent_at) / len(job.entries)
        self._pace_s[job.reward] = (self._pace_s[job.reward] + latest) / 2

    def _fail(self, slot: Slot, failure: WorkerFailure) -> None:
        """Replace the worker, at the cost of its sample."""
        job, slot.job = slot.job, None
        if job is None:
            self._count_fruitless(slot, failure)
            self._replace(slot)
            return
        self._note_pace(slot, job)
        was_fresh, position = slot.is_fresh, slot.worker.progress.read()[0]
        self._replace(slot)  # first: nothing that a sample started outlives its answer
        self._blame(slot, job, was_fresh, position, failure)

    def _count_fruitless(self, slot: Slot, failure: WorkerFailure) -> None:
        """Count a worker that ended before its first call, or idle; raises PoolError if they do nothing else."""
        slot.num_fruitless += 1
        if self._is_starting or slot.num_fruitless >= MAX_FRUITLESS:
            names = ", ".join(name for name, _ in self._setup.rewards)
            when = f"soon after it had loaded {names}" if slot.is_ready else f"while it loaded {names}"
            times = "" if self._is_starting else f" {MAX_FRUITLESS} times in a row"
            raise PoolError(
                f"rewards: a worker process {failure.args[1]} {when}{times}; fix what the import of the reward does, "
                "or raise reward_workers.memory_bytes"
            )

    def _blame(self, slot: Slot, job: _Job, was_fresh: bool, position: int, failure: WorkerFailure) -> None:
        """The sample that was being worked on is unknown; the others of its call are tried again."""
        cause, detail = failure.args
        is_garbled = cause == GARBLED  # perhaps by something that an earlier sample left running
        is_plausible = self._kinds[job.reward] == SAMPLE and 0 <= position < len(job.entries)
        if len(job.entries) == 1 and (was_fresh or not is_garbled):
            self._answer(slot, job.reward, *job.entries[0], (cause, detail))
        elif is_plausible and not is_garbled and time.monotonic() < self._bound(slot, job):
            self._answer(slot, job.reward, *job.entries[position], (cause, detail))
            self._again.appendleft(_Job(job.reward, job.entries[:position] + job.entries[position + 1 :]))
        else:  # a batch reward, or one that overwrote its position: a call per sample will tell
            self._again.extendleft(_Job(job.reward, (entry,), is_garbled) for entry in reversed(job.entries))

    def _replace(self, slot: Slot) -> None:
        slot.worker.kill()
        new = self._started()
        slot.worker, slot.start_deadline, slot.is_ready, slot.is_fresh = new.worker, new.start_deadline, False, True

    def _started(self) -> Slot:
        worker = WorkerProcess()
        slot = Slot(worker, time.monotonic() + START_TIMEOUT_S)
        try:
            worker.send(self._setup)
        except WorkerFailure as failure:
            worker.kill()
            raise PoolError(f"rewards: a worker process {failure.args[1]} as it started") from failure
        return slot


def _known(value: Answer | None) -> Answer:
    assert value is not None, "every sample is answered or blamed"
    return value
