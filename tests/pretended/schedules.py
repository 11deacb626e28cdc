"""A run whose engines, messages and trainer do everything that can happen, in any order, at no cost.

Weights are numbers: those of version v + 1 are a hash of those of version v and of all that step v learned from. So two
runs have the same last weights only if they consumed the same tokens in the same order.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from mega_rl.errors import InputError
from mega_rl.fleet import events, membership
from mega_rl.fleet.engines import EngineLimits
from mega_rl.fleet.events import Decision, Event
from mega_rl.fleet.scheduler import FleetScheduler
from mega_rl.fleet.tickets import Key, Rules, held_out
from tests.pretended.tokens import number

FIRST_WEIGHTS = 1
VALIDATION = 3, 2  # prompts, and responses to each


@dataclass(frozen=True)
class Chances:
    """How likely each thing is, of 1,000 turns."""

    death: int = 0
    silence: int = 0  # an engine stops, and says nothing
    double: int = 0  # a message comes twice
    late: int = 0  # a message is kept back, for as long as there are others
    crash: int = 0  # of everything but the checkpoints
    join: int = 0
    leave: int = 0
    validation: int = 0  # of 1,000 steps, after them
    patience: int = 0  # of 1,000 validations: the trainer waits for them


def length(key: Key, sample: int) -> int:
    return 1 + number("length", key, sample) % 5


def token(rules: Rules, weights: int, key: Key, sample: int, index: int) -> int:
    """What the weights sample; unpinned tokens come of any version, so that their content is told by their place."""
    if key.step < 0:
        return number(weights, key, sample, index)
    return number(weights if rules.is_pinned else 0, rules.place(key), sample, index)


def exact(weights: int) -> int:
    """The weights that validation has where these are trained."""
    return number("exact", weights)


def validation(rules: Rules, weights: int, version: int) -> tuple[tuple[Key, Any], ...]:
    """What the validation of a version with these weights must find."""
    name, (num_groups, size) = held_out(version), VALIDATION
    keys = [Key(name, ticket) for ticket in range(num_groups)]
    return tuple(
        (k, tuple([[token(rules, weights, k, s, i), name] for i in range(length(k, s))] for s in range(size)))
        for k in keys
    )


def is_kept(results: Iterable[list[list[int]]], drops: int) -> bool:
    return number([[t for t, _ in result] for result in results]) % 10 >= drops


@dataclass
class PretendedEngine:
    life: int
    is_silent: bool = False
    version: int = -1
    loading: int | None = None
    tokens: dict[tuple[int, int], list[list[int]]] = field(
        default_factory=dict
    )  # (attempt, sample) -> (token, version)
    todo: list[tuple[events.Issue, int]] = field(default_factory=list)
    num_steps: int = 0


class World:
    """One run from its beginning, or from a checkpoint, to its end or to a crash."""

    def __init__(
        self, rules: Rules, limits: EngineLimits, chances: Chances, engines: int, seed: int, drops: int
    ) -> None:
        self.rules, self.limits, self.chances, self.num_engines, self.drops = rules, limits, chances, engines, drops
        self.random = random.Random(seed)
        self.trained: list[list[tuple[Key, Any]]] = []  # by step, what it learned from
        self.checkpoint: tuple[int, int, str | None] = (0, FIRST_WEIGHTS, None)
        self.end: events.Finish | None = None
        self.num_crashes = self.num_validations = self.num_joined = self.num_left = 0
        self.boot()

    def boot(self) -> None:
        version, weights, state = self.checkpoint
        self.now = 0.0
        del self.trained[version:]
        self.weights = {version: weights}
        self.saved: dict[int, int] = {}
        self.validating: int | None = None  # the version
        self.is_patient = False
        self.batches: list[events.Deliver] = []
        self.messages: list[Event] = []
        self.engines: dict[int, PretendedEngine] = {}
        self.places = set(range(self.num_engines))  # of engines, which are given back once
        self.scheduler = FleetScheduler(
            self.rules, self.limits, range(self.num_engines), None if state is None else json.loads(state)
        )
        self.carry_out(self.scheduler.begin(self.now))

    @property
    def newest(self) -> int:
        return len(self.trained)

    def carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            assert self.end is None, f"{decision} after the end"
            getattr(self, f"do_{type(decision).__name__.lower()}")(decision)

    def do_start(self, decision: events.Start) -> None:
        assert decision.engine not in self.engines, "started while its last life goes on"
        assert decision.engine in self.places, "started without a place"
        self.engines[decision.engine] = PretendedEngine(decision.life)
        self.messages.append(events.Started(decision.engine, decision.life))

    def do_kill(self, decision: events.Kill) -> None:
        assert not re.search(r"-\d", decision.why), f"a number that says nothing to people: {decision.why}"
        engine = self.engines.get(decision.engine)
        if engine is not None and engine.life == decision.life:
            del self.engines[decision.engine]

    def do_release(self, decision: events.Release) -> None:
        assert decision.engine not in self.engines, "its place is taken"
        self.places.remove(decision.engine)

    def do_load(self, decision: events.Load) -> None:
        assert decision.version in self.weights, f"version {decision.version} is no longer there"
        if engine := self.engine(decision.engine, decision.life):
            assert engine.loading is None, "told to load twice"
            pinned = [issue for issue, _ in engine.todo if self.rules.is_pinned_step(issue.key.step)]
            assert not pinned, "weights change under a pinned ticket"
            assert decision.version >= 0 or not engine.todo, "training goes on with the weights of validation"
            engine.loading = decision.version

    def do_issue(self, decision: events.Issue) -> None:
        if engine := self.engine(decision.engine, decision.life):
            oldest = self.rules.oldest_version(decision.key.step)
            assert engine.version == oldest or (
                engine.version > oldest and not self.rules.is_pinned_step(decision.key.step)
            )
            for sample, prefix in zip(decision.samples, decision.prefixes, strict=True):
                engine.tokens[decision.attempt, sample] = [list(pair) for pair in prefix or []]
                engine.todo.append((decision, sample))
            assert len(engine.todo) <= max(self.limits.slots, len(decision.samples))

    def do_scoregroup(self, decision: events.ScoreGroup) -> None:
        kept = decision.key.step < 0 or is_kept(decision.results, self.drops)
        self.messages.append(events.Scored(decision.key, kept))

    def do_deliver(self, decision: events.Deliver) -> None:
        self.batches.append(decision)

    def do_validated(self, decision: events.Validated) -> None:
        assert decision.version == self.validating, "a validation ends once"
        weights = self.weights.pop(held_out(decision.version))
        assert decision.groups == validation(self.rules, weights, decision.version)
        self.validating = None
        self.num_validations += 1

    def do_forget(self, decision: events.Forget) -> None:
        for version in [v for v in self.weights if 0 <= v < decision.oldest_version]:
            del self.weights[version]
        assert sum(version >= 0 for version in self.weights) <= self.rules.eta + 1

    def do_commit(self, decision: events.Commit) -> None:
        self.checkpoint = (decision.version, self.saved[decision.version], json.dumps(decision.state))

    def do_finish(self, decision: events.Finish) -> None:
        assert self.validating is None or decision.is_failure, "a validation is lost"
        self.end = decision

    def engine(self, name: int, life: int) -> PretendedEngine | None:
        engine = self.engines.get(name)
        return engine if engine is not None and engine.life == life else None

    def run(self, max_turns: int = 30_000) -> World:
        for _ in range(max_turns):
            if self.end is not None:
                return self
            self.turn()
        raise AssertionError(f"no end after {max_turns} turns: {self.scheduler.window.state_dict()}")

    def turn(self) -> None:
        draw, chances = self.random.randrange(1000), self.chances
        for name in ("death", "silence", "crash", "join", "leave"):
            if draw < getattr(chances, name):
                getattr(self, name)()
                return
            draw -= getattr(chances, name)
        choices = [self.step_engine] * bool(self.engines) + [self.tell] * (2 * bool(self.messages))
        choices += [self.train] * (bool(self.batches) and not (self.is_patient and self.validating is not None))
        self.random.choice(choices or [self.tick])()
        if self.random.random() < 0.02:
            self.tick()

    def handle(self, event: Event) -> None:
        self.carry_out(self.scheduler.handle(event, self.now))

    def tick(self) -> None:
        self.now += self.random.random() * 0.5 * self.limits.progress_s
        for name, engine in self.engines.items():
            if not engine.is_silent:
                engine.num_steps += 1
                self.messages.insert(0, events.Pulsed(name, engine.life, engine.num_steps))
        while self.messages and isinstance(self.messages[0], events.Pulsed):
            self.handle(self.messages.pop(0))
        self.handle(events.Ticked())

    def tell(self) -> None:
        index = self.random.randrange(len(self.messages))
        if self.random.randrange(1000) < self.chances.late:
            return
        event = self.messages.pop(index)
        if self.random.randrange(1000) < self.chances.double:
            self.messages.append(event)
        self.handle(event)

    def step_engine(self) -> None:
        name = self.random.choice(sorted(self.engines))
        engine = self.engines[name]
        if engine.is_silent:
            return
        if engine.loading is not None and engine.loading not in self.weights:
            self.messages.append(events.Missed(name, engine.life, engine.loading))
            engine.loading = None
            return
        if engine.loading is not None and (not engine.todo or self.random.random() < 0.5):
            engine.version, engine.loading = engine.loading, None
            self.messages.append(events.Loaded(name, engine.life, engine.version))
            return
        if not engine.todo:
            return
        place = self.random.randrange(len(engine.todo))
        issue, sample = engine.todo[place]
        tokens = engine.tokens[issue.attempt, sample]
        if len(tokens) < length(issue.key, sample):
            value = token(self.rules, self.weights.get(engine.version, 0), issue.key, sample, len(tokens))
            tokens.append([value, engine.version])
            if not self.rules.is_pinned and self.random.random() < 0.5:
                copied = [list(pair) for pair in tokens]
                self.messages.append(events.Advanced(name, engine.life, issue.attempt, sample, copied))
        else:
            del engine.todo[place]
            oldest = min(version for _, version in tokens)
            self.messages.append(events.Answered(name, engine.life, issue.attempt, sample, oldest, tokens))

    def train(self) -> None:
        batch = self.batches.pop(0)
        assert batch.step == self.newest, "batches come in the order of their steps, once"
        assert len({key for key, _ in batch.groups}) == len(batch.groups)
        self.trained.append([(key, results) for key, results in batch.groups])
        content = [(key, results) for key, results in batch.groups]
        self.weights[self.newest] = number(self.weights[self.newest - 1], content)
        is_early = self.random.random() < 0.5
        if is_early:
            self.validate()
        self.handle(events.Published(self.newest))
        if not is_early and self.end is None:
            self.validate()
        if self.end is None and self.random.random() < 0.7:
            self.saved[self.newest] = self.weights[self.newest]
            self.handle(events.Saved(self.newest))

    def validate(self) -> None:
        if self.validating is not None or self.random.randrange(1000) >= self.chances.validation:
            return
        self.validating, self.is_patient = self.newest, self.random.randrange(1000) < self.chances.patience
        self.weights[held_out(self.newest)] = exact(self.weights[self.newest])
        self.handle(events.Validate(self.newest, *VALIDATION))

    def death(self) -> None:
        if self.engines:
            name = self.random.choice(sorted(self.engines))
            life = self.engines.pop(name).life
            self.messages.append(events.Died(name, life, "it was killed"))

    def silence(self) -> None:
        if self.engines:
            self.engines[self.random.choice(sorted(self.engines))].is_silent = True

    def crash(self) -> None:
        self.num_crashes += 1
        self.boot()

    def join(self) -> None:
        for engine in membership.joining(self.scheduler.engines, [], self.random.randint(1, 3)):
            assert engine not in self.places
            self.places.add(engine)
            self.num_joined += 1
            self.handle(events.Joined(engine))

    def leave(self) -> None:
        """Engines that are named or not, whatever they do; never the last one."""
        found = membership.in_use(self.scheduler.engines)
        count = self.random.randint(1, len(found))
        named = self.random.sample(found, count) if self.random.random() < 0.5 else []
        try:
            chosen = membership.leaving(self.scheduler.engines, named, count)
        except InputError as error:
            assert count == len(found) and "at least one must go on" in str(error)
            return
        assert len(chosen) == count < len(found)
        for engine in chosen:
            self.num_left += 1
            self.handle(events.Left(engine))


def reference(rules: Rules, drops: int) -> tuple[list[list[tuple[Key, Any]]], int]:
    """What every step of a pinned run learns from, and the last weights, without any fleet."""
    weights, trained = [FIRST_WEIGHTS], []
    for step in range(rules.total_steps):
        version = max(0, step - rules.eta)
        kept, ticket, num_wanted = [], 0, rules.num_groups
        while ticket < num_wanted:
            key = Key(step, ticket)
            results = tuple(
                [[token(rules, weights[version], key, s, i), version] for i in range(length(key, s))]
                for s in range(rules.group_size)
            )
            if is_kept(results, drops):
                kept.append((key, results))
            elif rules.budget is not None and num_wanted < rules.budget:
                num_wanted += 1
            ticket += 1
        trained.append(kept)
        weights.append(number(weights[-1], kept))
    return trained, weights[-1]
