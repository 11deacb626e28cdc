"""Deals tickets to engines, and decides what becomes of late answers and dead engines: events in, decisions out.

``handle`` must be called by one thread, in the order of the events, with a clock that never goes back. It neither waits
nor calls anything: whoever calls it carries its decisions out and tells what came of them as new events.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from mega_rl.fleet import events
from mega_rl.fleet.engines import Condition, Engine, EngineLimits
from mega_rl.fleet.events import Decision, Event
from mega_rl.fleet.serving import EngineKind, ServingEngines
from mega_rl.fleet.step_window import STATE_VERSION, StepWindow
from mega_rl.fleet.tickets import Rules, held_out, named


class FleetScheduler:
    """The fleet of one run."""

    def __init__(
        self, rules: Rules, limits: EngineLimits, engines: Iterable[int], state: Mapping[str, Any] | None = None
    ) -> None:
        """``state``: of a ``Commit``, to go on from."""
        self.rules, self.limits = rules, limits
        self.engines = {number: Engine(number) for number in engines}
        self.window = StepWindow(rules)
        if state is not None:
            self.window.load_state_dict(state)
        self.delivered = self.window.trained  # steps
        self.has_ended = False
        self._saved: dict[int, dict[int, Any]] = {}  # version -> its steps so far, until ``Commit``
        self._num_alive = len(self.engines)
        self._num_loading: Counter[int] = Counter()  # engines on their way to a version
        self._serving = ServingEngines()
        self._part_size = max(map(len, rules.parts()))
        self._last_death = "there never was one"
        self._out: list[Decision] = []
        self._of: dict[type, Callable[[Any, float], None]] = {
            events.Started: self._started,
            events.Loaded: self._loaded,
            events.Arriving: self._arriving,
            events.Missed: self._missed,
            events.Answered: self._answered,
            events.Advanced: self._advanced,
            events.Pulsed: self._pulsed,
            events.Died: self._died,
            events.Scored: self._scored,
            events.Published: self._published,
            events.Validate: self._validate,
            events.Saved: self._save,
            events.Joined: self._joined,
            events.Left: self._left,
            events.Ticked: self._ticked,
        }

    def begin(self, now: float) -> list[Decision]:
        """The first decisions: engines are started, and what came with the state is scored and delivered."""
        self.window.begin_steps()
        for engine in self.engines.values():
            engine.since_s = now
            self._out.append(events.Start(engine.number, engine.life))
        self._out += [events.ScoreGroup(key, results) for key, results in self.window.undecided()]
        self._deliver()
        self._end_if_done()
        return self._flush()

    def handle(self, event: Event, now: float) -> list[Decision]:
        """What follows from an event; nothing after ``Finish``."""
        if not self.has_ended:
            self._of[type(event)](event, now)
        return self._flush()

    def _flush(self) -> list[Decision]:
        out, self._out = self._out, []
        return out

    # What engines say.

    def _known(self, number: int, life: int) -> Engine | None:
        """The engine, if this is its present life."""
        engine = self.engines.get(number)
        return None if engine is None or engine.life != life or engine.condition is Condition.GONE else engine

    def _started(self, event: events.Started, now: float) -> None:
        engine = self._known(event.engine, event.life)
        if engine is not None and engine.condition is Condition.STARTING:
            engine.condition, engine.since_s = Condition.EMPTY, now
            engine.slots = event.slots or self.limits.slots
            self._feed(engine, now)

    def _loaded(self, event: events.Loaded, now: float) -> None:
        engine = self._known(event.engine, event.life)
        if engine is None or engine.loading != event.version:
            return
        self._stop_loading(engine)
        engine.condition, engine.version, engine.since_s = Condition.SERVING, event.version, now
        self._serving.note(engine)
        if not self.rules.is_pinned_step(event.version) and event.version < self.window.trained:
            self._load(engine, self.window.trained, now)
        if self.window.is_validating:
            self._bind()
        self._feed(engine, now)

    def _arriving(self, event: events.Arriving, now: float) -> None:
        engine = self._known(event.engine, event.life)
        if engine is not None and engine.loading == event.version:
            engine.load_since_s = now

    def _missed(self, event: events.Missed, now: float) -> None:
        engine = self._known(event.engine, event.life)
        if engine is None or engine.loading != event.version:
            return
        self._stop_loading(engine)
        if engine.condition is Condition.LOADING or event.is_torn:
            engine.condition, engine.version = Condition.EMPTY, -1
        self._serving.note(engine)
        if not self.rules.is_pinned:
            self._load(engine, self.window.trained, now)
        self._feed(engine, now)

    def _answered(self, event: events.Answered, now: float) -> None:
        engine = self._known(event.engine, event.life)
        attempt = self.window.attempt(event.attempt, event.sample)
        if attempt is None or engine is None:
            return
        step, oldest = attempt.key.step, self.rules.oldest_version(attempt.key.step)
        if event.oldest_version < oldest or (self.rules.is_pinned_step(step) and event.oldest_version != oldest):
            what = f"step {step}" if step >= 0 else f"the validation after step {held_out(step)}"
            why = f"it sampled {what} with {named(event.oldest_version)} instead of {named(oldest)}"
            self._replace(engine, why, now)
            return
        engine.load -= 1
        self._serving.note(engine)
        engine.since_s = now
        results = self.window.end_sample(event.attempt, event.sample, event.result)
        if results is not None:
            self._out.append(events.ScoreGroup(attempt.key, results))
        if self.window.num_waiting:
            self._feed(engine, now)

    def _advanced(self, event: events.Advanced, now: float) -> None:
        engine, attempt = self._known(event.engine, event.life), self.window.attempt(event.attempt, event.sample)
        if engine is not None and attempt is not None:
            engine.since_s = now
            if not self.rules.is_pinned_step(attempt.key.step):  # those have the tokens of one undisturbed engine
                self.window.advance(attempt, event.sample, event.prefix)

    def _pulsed(self, event: events.Pulsed, now: float) -> None:
        engine = self._known(event.engine, event.life)
        if engine is None:
            return
        engine.heard_s = now
        if event.num_steps > engine.num_steps:
            engine.num_steps, engine.since_s = event.num_steps, now

    def _died(self, event: events.Died, now: float) -> None:
        engine = self._known(event.engine, event.life)
        if engine is not None:
            self._replace(engine, event.why, now)

    def _ticked(self, event: events.Ticked, now: float) -> None:
        for engine in list(self.engines.values()):
            why = None if engine.condition is Condition.GONE else engine.overdue(self.limits, now)
            if why is not None:
                self._replace(engine, why, now)

    def _replace(self, engine: Engine, why: str, now: float) -> None:
        """End this life of an engine; its work waits again, and it is started anew as long as that is allowed."""
        self._remove(engine, why)
        self._last_death = f"engine {engine.number}: {why}"
        if engine.num_restarts < self.limits.restarts:
            engine.num_restarts += 1
            self._start(engine, engine.life + 1, now)
        else:
            self._out.append(events.Release(engine.number))
        self._deal(now)

    def _remove(self, engine: Engine, why: str) -> None:
        self._out.append(events.Kill(engine.number, engine.life, why))
        self.window.give_up(engine.number)
        self._stop_loading(engine)
        engine.condition, engine.load = Condition.GONE, 0
        self._serving.note(engine)
        self._num_alive -= 1

    def _start(self, engine: Engine, life: int, now: float) -> None:
        engine.begin_life(life, now)
        self._num_alive += 1
        self._out.append(events.Start(engine.number, engine.life))

    # What the trainer says.

    def _scored(self, event: events.Scored, now: float) -> None:
        if self.window.decide(event.key, event.is_kept):
            if not event.is_kept:
                self._deal(now)
            if event.key.step < 0:
                self._end_validation(held_out(event.key.step))
            self._deliver()

    def _validate(self, event: events.Validate, now: float) -> None:
        self.window.begin_validation(*event)
        self._deal(now)

    def _end_validation(self, version: int) -> None:
        groups = self.window.end_validation(version)
        if groups is not None:
            self._out.append(events.Validated(version, groups))
            self._end_if_done()

    def _published(self, event: events.Published, now: float) -> None:
        assert event.version <= self.delivered, f"version {event.version} comes of step {event.version - 1}"
        self.window.train(event.version)
        self.window.begin_steps()
        self._out.append(events.Forget(self.rules.oldest_version(event.version)))
        if not self.rules.is_pinned:
            for engine in self.engines.values():
                if engine.serves and not (engine.version < 0 and engine.load):
                    self._load(engine, event.version, now)
        self._end_if_done()
        if not self.has_ended:
            self._deal(now)

    def _save(self, event: events.Saved, now: float) -> None:
        version = event.version
        newest = self.window.trained
        assert version in (newest, newest + 1) and version <= self.delivered, (
            f"version {version} is saved after {newest}"
        )
        if not self.rules.is_pinned:
            self._out.append(events.Commit(version, self.window.state_dict(version)))
            return
        # Later steps are pinned to this version or newer ones, so they can be sampled again.
        self._saved[version] = {step: self.window.step_state(step) for step in range(version, self.delivered)}
        self._commit()

    @property
    def oldest_kept(self) -> int:
        """The oldest step that is needed still: to be trained, or for a saved state that is not closed."""
        return min([self.window.trained, *self._saved])

    def _commit(self) -> None:
        """Close every saved state whose steps that older weights sampled are whole."""
        for version in sorted(self._saved):
            steps = self._saved[version]
            if len(steps) >= min(self.rules.eta, self.rules.total_steps - version):
                kept = {step: steps[step] for step in sorted(steps)[: self.rules.eta]}
                state = {"format": STATE_VERSION, "trained": version, "steps": kept}
                self._out.append(events.Commit(version, state))
                del self._saved[version]

    def _joined(self, event: events.Joined, now: float) -> None:
        known = self.engines.get(event.engine)
        assert known is None or known.condition is Condition.GONE, f"engine {event.engine} is there already"
        engine = self.engines[event.engine] = Engine(event.engine)
        self._start(engine, 0 if known is None else known.life + 1, now)
        self._divide()

    def _left(self, event: events.Left, now: float) -> None:
        engine = self.engines.get(event.engine)
        if engine is not None and engine.condition is not Condition.GONE:
            self._remove(engine, "it is no longer wanted")
            self._out.append(events.Release(engine.number))
            self._last_death = f"engine {engine.number} was taken out of use"
            self._deal(now)

    def _divide(self) -> None:
        """Deal the groups of later tickets in as many parts as give every engine work of one step."""
        num_parts = min(self.rules.group_size, -(-self._num_alive // self.rules.num_groups))
        if num_parts > self.rules.num_parts:
            self.rules = self.window.rules = replace(self.rules, num_parts=num_parts)
            self._part_size = max(map(len, self.rules.parts()))

    # What follows.

    def _deliver(self) -> None:
        while (batch := self.window.batch(self.delivered)) is not None:
            self._out.append(events.Deliver(self.delivered, batch))
            for steps in self._saved.values():
                steps[self.delivered] = self.window.step_state(self.delivered)
            self.delivered += 1
        self._commit()

    def _end_if_done(self) -> None:
        if self.window.trained == self.rules.total_steps and not self.window.is_validating:
            self._end(False, f"all {self.rules.total_steps} steps have been trained")

    def _end(self, is_failure: bool, sentence: str) -> None:
        for engine in self.engines.values():
            if engine.condition is not Condition.GONE:
                self._remove(engine, "the run has ended")
        self.has_ended = True
        self._out.append(events.Finish(is_failure, sentence))

    def _deal(self, now: float) -> None:
        """Look at every engine that can be given something, the one with the least work first."""
        if not self._num_alive:
            self._end(
                True,
                f"no rollout engine is left ({self._last_death}): start the run again and it goes on from its last "
                "checkpoint, with more restarts allowed if the machines are well",
            )
            return
        self._bind()
        for engine in self._serving.each(self._can_take):
            self._feed(self.engines[engine], now)

    def _can_take(self, kind: EngineKind, load: int) -> bool:
        """Whether ``_feed`` changes anything for a serving engine with so many responses under way."""
        if kind.bound is not None:
            return not load or not self.window.num_waiting_for(kind.bound)
        if not load and self._wanted(kind.version, kind.bound) != kind.version:
            return True
        head = self.window.head(kind.version)
        return head is not None and load < self._share() and (not load or load + head[1] <= kind.slots)

    def _bind(self) -> None:
        """See that the oldest version that waits is served by somebody, though all have other work.

        Of a validation, which the trainer waits for, by as many as its part of all that there is to do.
        """
        waiting = self.window.waiting()
        if not waiting or not self.rules.is_pinned_step(waiting[0][0]):
            return
        version, number = waiting[0]
        wanted = 1 if version >= 0 else math.ceil(number / self._share())
        wanted -= self._num_loading[version] + self._serving.num_heading_for(version)
        for number in self._serving.not_heading_for(version, wanted):
            self.engines[number].bound = version
            self._serving.note(self.engines[number])

    def _share(self) -> float:
        """Samples per engine, if all had equally many; at least one part of a group."""
        return max(self._part_size, (self.window.num_waiting + self.window.num_under_way) / self._num_alive)

    def _feed(self, engine: Engine, now: float) -> None:
        """Give an engine what it should do now: work for its weights, or other weights."""
        if engine.bound is not None and not self.window.num_waiting_for(engine.bound):
            engine.bound = None
            self._serving.note(engine)
        if engine.serves and engine.bound is None:
            share = self._share()
            while engine.load < share and (head := self.window.head(engine.version)) is not None:
                if engine.load and engine.load + head[1] > engine.slots:
                    break
                self._issue(engine, now)
        if engine.load == 0 and (engine.serves or engine.condition is Condition.EMPTY):
            version = self._wanted(engine.version, engine.bound)
            if version != engine.version:
                self._load(engine, version, now)

    def _issue(self, engine: Engine, now: float) -> None:
        key, samples, attempt, prefixes = self.window.issue(engine.number, engine.version)
        if not engine.load:
            engine.since_s = now
        engine.load += len(samples)
        self._serving.note(engine)
        self._out.append(events.Issue(engine.number, engine.life, key, samples, attempt, prefixes))

    def _wanted(self, present: int, bound: int | None) -> int:
        """The weights for an engine without work: the oldest that wait and that too few others are on their way to."""
        newest = self.window.trained
        if bound is not None:
            return bound
        share = self._share()
        for version, number in self.window.waiting():
            if self.rules.is_pinned_step(version) and self._num_loading[version] * share < number:
                return version
        return present if present >= 0 and self.rules.is_pinned else newest

    def _load(self, engine: Engine, version: int, now: float) -> None:
        engine.loading, engine.bound = version, None
        engine.load_since_s = engine.since_s = engine.heard_s = now
        self._num_loading[version] += 1
        if engine.condition is Condition.EMPTY:
            engine.condition = Condition.LOADING
        self._serving.note(engine)
        self._out.append(events.Load(engine.number, engine.life, version))

    def _stop_loading(self, engine: Engine) -> None:
        if engine.loading is not None:
            self._num_loading[engine.loading] -= 1
            engine.loading = None
