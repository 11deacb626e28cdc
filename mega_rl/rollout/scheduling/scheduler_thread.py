"""The thread of rank 0 that runs a scheduler: it hears engines, scorers and the loop, and enters no collective.

The loop tells it what has been trained and takes whole steps from it; whatever ends the thread is raised in the loop.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from mega_rl.errors import InputError
from mega_rl.fleet import events
from mega_rl.fleet.engines import Condition
from mega_rl.fleet.events import Decision, Event
from mega_rl.fleet.executor import FleetExecutor
from mega_rl.fleet.scheduler import FleetScheduler
from mega_rl.fleet.tickets import Key
from mega_rl.observe.heartbeat import HEART
from mega_rl.rollout.collect.collect import FleetGroup
from mega_rl.rollout.scheduling.control_requests import ControlRequests
from mega_rl.rollout.scheduling.fleet_record import FleetRecord
from mega_rl.rollout.scheduling.fleet_requests import DIRECTORY, Mailbox
from mega_rl.types import Response, Score

POLL_S = 0.02  # an engine is waited for so long before scores and the loop are heard again
TICK_S = 1.0  # between two looks at the limits of engines
AWAKE_S = 1.0  # what counts at most, for the limits of engines, of the time between two turns of the thread
ATTEND_S = 0.5  # between two looks for questions
CLOSE_S = 60.0


@dataclass(frozen=True)
class Delivered:
    """All that was sampled for one step, in the order of the tickets."""

    kept: dict[Key, FleetGroup]
    dropped: dict[Key, FleetGroup]


class WakingTime:
    """Seconds in which the thread that asks for them has had its turns.

    A thread that does not get the processor, or waits in a call, hears late of what engines have done meanwhile. That
    is not the engines' fault, so it does not count for their limits.
    """

    def __init__(self) -> None:
        self.turned_at, self.total_s = time.monotonic(), 0.0  # the last turn, and the time as of it: any thread reads

    def now(self) -> float:
        now = time.monotonic()
        self.total_s += min(now - self.turned_at, AWAKE_S)
        self.turned_at = now
        return self.total_s


class SchedulerThread:
    """Runs a scheduler beside the loop. Its methods are called by the loop's thread.

    Args:
        scheduler: that nobody has begun with.
        executor: the engines; closed by the thread when it ends.
        score: starts the scoring of a trajectory of a ticket; called in this thread, and reads nothing that the loop
            changes.
        is_kept: whether a step learns from a group.
        scores: of groups that are already decided in what the scheduler goes on from.
        limit_s: how long nothing at all may come while a step is waited for, no step of an engine either, in
            ``WakingTime`` as the scheduler's own limits, which are below it; also how long the thread may be without a
            turn.
        output_dir: of the run, where it is asked about its engines and writes what they did; None: neither.

    Raises:
        InputError: there it cannot write.
    """

    def __init__(
        self,
        scheduler: FleetScheduler,
        executor: FleetExecutor,
        score: Callable[[Key, Response], Future[Score]],
        is_kept: Callable[[FleetGroup], bool],
        scores: Mapping[Key, tuple[Score, ...]],
        limit_s: float,
        output_dir: Path | None = None,
    ) -> None:
        self._scheduler, self._executor, self._score, self._is_kept = scheduler, executor, score, is_kept
        self._clock = WakingTime()  # of the scheduler
        self._limit_s = limit_s
        self._scores, self._oldest_kept = dict(scores), scheduler.oldest_kept
        self._scoring: dict[Key, tuple[tuple[Response, ...], list[Future[Score]]]] = {}
        self._told: SimpleQueue[Event | Key] = SimpleQueue()  # by the loop; a key: of a group that is scored
        self._changed = threading.Condition()  # guards what follows
        self._delivered: dict[int, Delivered] = {}
        self._validated: dict[int, dict[Key, FleetGroup]] = {}
        self._committed: dict[int, tuple[dict[str, Any], dict[Key, tuple[Score, ...]]]] = {}
        self._failure: Exception | None = None
        self._heard_at = self._clock.total_s
        self._awaited = ""  # by the loop, in words
        self._is_closing = threading.Event()
        mailbox, self.record = _opened(scheduler, output_dir)
        self._control = ControlRequests(mailbox, scheduler, executor, self.record, self._handle) if mailbox else None
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._thread.start()

    # What the loop asks and tells.

    def take(self, step: int) -> Delivered:
        """What was sampled for a step, as soon as it is whole; each step is taken once.

        Raises:
            InputError: no engine is left, or a reward cannot be computed any more.
            RuntimeError: nothing came for ``limit_s`` from anybody.
        """
        with self._changed:
            self._wait_for(lambda: step in self._delivered, f"the samples of step {step + 1}")
            return self._delivered.pop(step)

    def published(self, version: int) -> None:
        """The weights of this version can be fetched: the step before it has been learned from."""
        self._told.put(events.Published(version))

    def validate(self, version: int, num_prompts: int, num_samples: int) -> None:
        """Have prompts answered with the weights of the version's validation, beside the steps that are in the air.

        Those can be fetched until ``validated`` has returned. ``Requests`` are asked for under the keys
        ``(held_out(version), number of the prompt)``.
        """
        self._told.put(events.Validate(version, num_prompts, num_samples))

    def validated(self, version: int) -> dict[Key, FleetGroup]:
        """The answers to a validation's prompts, in their order, as soon as all are scored; once.

        Raises: as ``take``.
        """
        with self._changed:
            self._wait_for(lambda: version in self._validated, f"the validation after step {version}")
            return self._validated.pop(version)

    def saved(self, version: int) -> None:
        """The trainer's part of a checkpoint of this version is written; ``committed`` gives the rest."""
        self._told.put(events.Saved(version))

    def committed(self, version: int, wait_s: float) -> tuple[dict[str, Any], dict[Key, tuple[Score, ...]]] | None:
        """The scheduler's state for the checkpoint of a version, and the scores of its decided groups, once.

        Args:
            wait_s: for so long, seconds; None if it is not there then. Calls that follow each other are one wait.

        Raises: as ``take``.
        """
        with self._changed:
            if wait_s or self._failure is not None:
                what = f"what the checkpoint of step {version} has to hold"
                self._wait_for(lambda: version in self._committed, what, wait_s)
            return self._committed.pop(version, None)

    def close(self) -> None:
        """End the engines and the thread."""
        self._is_closing.set()
        with HEART.waiting("the rollout engines to end", is_for_ranks=False):
            self._thread.join(CLOSE_S)

    def _wait_for(self, is_there: Callable[[], bool], what: str, wait_s: float = math.inf) -> None:
        begin = time.monotonic()
        if what != self._awaited:
            self._awaited, self._heard_at = what, self._clock.total_s
        with HEART.waiting(f"{what}, from the rollout engines", is_for_ranks=False):
            while not is_there():
                if self._failure is not None:
                    raise self._failure
                no_turn_s = time.monotonic() - self._clock.turned_at
                if max(self._clock.total_s - self._heard_at, no_turn_s) > self._limit_s:
                    who = f"nothing came for {self._limit_s:g} s from {self._who()}"
                    raise RuntimeError(f"{what} cannot be waited for any longer: {who}")
                left_s = begin + wait_s - time.monotonic()
                if left_s <= 0:
                    return
                HEART.mark()  # this wait has a limit of its own
                self._changed.wait(min(TICK_S, left_s))
        self._awaited = ""

    def _who(self) -> str:
        """Who could still say something, in words."""
        engines = [e for e in list(self._scheduler.engines.values()) if e.condition is not Condition.GONE]
        busy = [f"engine {e.number} ({e.condition.value}, {e.load} responses under way)" for e in engines]
        scoring = [f"the scores of {len(self._scoring)} groups"] if self._scoring else []
        return ", ".join([*busy, *scoring]) or "anybody"

    # What the thread does.

    def _run(self) -> None:
        try:
            decisions = self._scheduler.begin(self._clock.now())
            self.record.hear(None, decisions)
            self._carry_out(decisions)
            ticked_at = attended_at = time.monotonic()
            while not self._is_closing.is_set() and not self._scheduler.has_ended:
                self._clock.now()  # a turn, also if nothing has happened
                num_told = self._hear_loop()
                for event in self._executor.events(0.0 if num_told else POLL_S):
                    self._hear_engine(event)
                if time.monotonic() - ticked_at > TICK_S:
                    ticked_at = time.monotonic()
                    self._handle(events.Ticked())
                    self.record.flush()
                if self._control is not None and time.monotonic() - attended_at > ATTEND_S:
                    attended_at = time.monotonic()
                    self._control.attend()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is raised where the loop waits
            self._fail(error)
        finally:
            with ExitStack() as closing:  # each, also if another fails
                closing.callback(self._executor.close)
                closing.callback(self.record.close)
                if self._control is not None:
                    closing.callback(self._control.close)

    def _hear_loop(self) -> int:
        """Take in what the loop told and which groups have been scored; returns how much that was."""
        number = 0
        while not self._is_closing.is_set():
            try:
                told = self._told.get_nowait()
            except Empty:
                break
            number += 1
            if isinstance(told, Key):
                self._end_scoring(told)
            else:
                self._handle(told)
        return number

    def _hear_engine(self, event: Event) -> None:
        before = self._num_steps(event)
        self._handle(event)
        if not isinstance(event, events.Pulsed) or self._num_steps(event) > before:  # a step is news, a pulse is not
            self._heard_at = self._clock.total_s
            HEART.mark()

    def _num_steps(self, event: Event) -> int:
        """Of the engine that is alive, if this is how far it is."""
        engine = self._scheduler.engines.get(event.engine) if isinstance(event, events.Pulsed) else None
        return engine.num_steps if engine is not None else 0

    def _handle(self, event: Event) -> None:
        decisions = self._scheduler.handle(event, self._clock.now())
        self.record.hear(event, decisions)
        self._carry_out(decisions)

    def _carry_out(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, events.Start | events.Kill | events.Release | events.Load | events.Issue):
                self._executor.carry(decision)
            elif isinstance(decision, events.ScoreGroup):
                self._begin_scoring(decision)
            elif isinstance(decision, events.Deliver):
                self._deliver(decision)
            elif isinstance(decision, events.Validated):
                self._end_validation(decision)
            elif isinstance(decision, events.Commit):
                self._commit(decision)
            elif isinstance(decision, events.Finish) and decision.is_failure:
                self._fail(InputError(decision.sentence))
            # ``Forget`` needs nothing: a store of weights keeps the newest ones that the rules can ask for
        if (oldest := self._scheduler.oldest_kept) != self._oldest_kept:
            self._oldest_kept = oldest
            self._scores = {key: found for key, found in self._scores.items() if key.step >= oldest or key.step < 0}

    def _begin_scoring(self, decision: events.ScoreGroup) -> None:
        found = [self._score(decision.key, trajectory) for trajectory in decision.results]
        self._scoring[decision.key] = decision.results, found
        left = _Countdown(len(found), partial(self._told.put, decision.key))
        for score in found:
            score.add_done_callback(left.one)

    def _end_scoring(self, key: Key) -> None:
        self._heard_at = self._clock.total_s
        trajectories, found = self._scoring.pop(key)
        scores = self._scores[key] = tuple(score.result() for score in found)
        self._handle(events.Scored(key, key.step < 0 or self._is_kept(FleetGroup(trajectories, scores))))

    def _deliver(self, decision: events.Deliver) -> None:
        kept = {key: FleetGroup(results, self._scores[key]) for key, results in decision.groups}
        dropped = {}
        for row in self._scheduler.window.step_state(decision.step):
            key = Key(decision.step, row["ticket"])
            if key not in kept:
                dropped[key] = FleetGroup(tuple(row["results"].values()), self._scores[key])
        with self._changed:
            self._delivered[decision.step] = Delivered(kept, dropped)
            self._changed.notify_all()

    def _end_validation(self, decision: events.Validated) -> None:
        groups = {key: FleetGroup(results, self._scores.pop(key)) for key, results in decision.groups}
        with self._changed:
            self._validated[decision.version] = groups
            self._changed.notify_all()

    def _commit(self, decision: events.Commit) -> None:
        scores = {key: found for key, found in self._scores.items() if key.step >= decision.version}
        with self._changed:
            self._committed[decision.version] = decision.state, scores
            self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()


def _opened(scheduler: FleetScheduler, output_dir: Path | None) -> tuple[Mailbox | None, FleetRecord]:
    """
    Raises:
        InputError: the directory cannot be written.
    """
    if output_dir is None:
        return None, FleetRecord(scheduler)
    try:
        with ExitStack() as failed:
            mailbox = Mailbox(output_dir)
            failed.callback(mailbox.close)
            record = FleetRecord(scheduler, output_dir / DIRECTORY)
            failed.pop_all()
    except OSError as error:
        why = f"{output_dir / DIRECTORY} cannot be written ({error.strerror})"
        raise InputError(f"{why}: make it a directory of your own, or set another trainer.output_dir") from error
    return mailbox, record


class _Countdown:
    """Calls a function when so many futures are done, in whatever thread the last of them is."""

    def __init__(self, number: int, call: Callable[[], None]) -> None:
        self._left, self._call, self._lock = number, call, threading.Lock()

    def one(self, _: Future[Score]) -> None:
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            self._call()
