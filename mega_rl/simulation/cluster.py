"""One simulated run: the scheduler under a virtual clock, with engines and a trainer that only take time.

An engine makes a token of every response that it samples in ``fixed_s + per_response_s * responses`` seconds, so that
its responses share it. Nothing happens between the end of one response and the next: a simulated second costs nothing.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mega_rl.errors import InputError
from mega_rl.fleet import events
from mega_rl.fleet.engines import EngineLimits
from mega_rl.fleet.events import Decision, Event
from mega_rl.fleet.scheduler import FleetScheduler
from mega_rl.fleet.tickets import Rules
from mega_rl.observe.timeline import Activity
from mega_rl.simulation.lengths import Lengths

NEVER = float("inf")
TELL_S = 10.0  # between two words of an engine on what it has of its responses
MOST_DEATHS = 100  # of an engine, on average, before the next step is trained


@dataclass(frozen=True)
class Cluster:
    """What there is, and how fast it is."""

    engines: int
    slots: int  # responses that an engine samples at a time
    fixed_s: float  # seconds of one decoding step, whatever the number of responses: its weights are read
    per_response_s: float  # seconds of one decoding step for each response: its keys and values are read
    train_s: float  # seconds of a step in the trainer
    load_s: float = 0.0  # seconds for which an engine is held up by new weights
    train_token_s: float = 0.0  # and for each sampled token of the step
    prefill_tokens_per_s: float = 20_000.0  # how fast an engine recomputes the keys and values of a response under way
    hours_between_deaths: float = NEVER  # of one engine, on average
    restart_s: float = 120.0


@dataclass(frozen=True)
class SimulatedRun:
    """A simulated run after the time in which its pipeline filled."""

    step_s: float
    trainer_idle: float  # share of the time in which the trainer waits for a batch
    engine_busy: float  # share of the time in which an engine samples
    mean_staleness: float  # of a token
    max_staleness: int
    tokens_per_s: float
    num_deaths: int
    activities: tuple[Activity, ...] = ()


class _Prefix(NamedTuple):
    """What engines that died have told of a response."""

    tokens: int
    oldest_version: int  # of those that sampled them


@dataclass
class _Machine:
    """One engine. Its progress counts the tokens that a response would have that had always been under way."""

    alive: int = 0  # life
    progress: float = 0.0
    at_s: float = 0.0  # the time of ``progress``
    held_until_s: float = 0.0
    version: int = -1
    under_way: list[tuple[float, int, int, float]] = field(default_factory=list)  # heap: end, attempt, sample, begin
    given: dict[tuple[int, int], _Prefix] = field(default_factory=dict)  # what others had sampled, by attempt, sample
    changes: list[tuple[float, int]] = field(default_factory=list)  # (progress, version) from then on
    turn: int = 0  # of its newest planned event: older ones have no effect
    busy_s: float = 0.0
    begun_s: float = 0.0  # of what it is doing now, for the timeline


class Simulation:
    """``run`` it once."""

    def __init__(
        self, cluster: Cluster, rules: Rules, lengths: Lengths, num_steps: int, *, seed: int = 0, records: bool = False
    ) -> None:
        """``rules.total_steps`` is above ``num_steps``, so that the last steps have others in the air beside them."""
        self.cluster, self.rules, self.lengths, self.num_steps = cluster, rules, lengths, num_steps
        self.records = records
        self.now = 0.0
        self.random = random.Random(seed)
        limits = EngineLimits(cluster.slots, NEVER, NEVER, NEVER, restarts=1_000_000)
        self.scheduler = FleetScheduler(rules, limits, range(cluster.engines))
        self.machines = [_Machine() for _ in range(cluster.engines)]
        self.activities: list[Activity] = []
        self.num_deaths = 0
        self._num_deaths_before = 0  # the newest trained step
        self.ends_s: list[float] = []  # of trained steps
        self._idle_s: list[float] = []  # of the trainer before each step
        self._waits_since_s = 0.0
        self._batches: deque[events.Deliver] = deque()
        self._is_training = False
        self._tokens_at: Counter[tuple[int, int]] = Counter()  # (step, version) -> tokens
        self._step_lengths: dict[int, list[list[int]]] = {}
        self._heap: list[tuple[float, int, int, int, Any]] = []  # time, order, engine (-1: none), turn, event
        self._order = itertools.count()
        self._told: deque[Event] = deque()
        self._changed: set[int] = set()  # engines whose next end is to be planned anew

    def run(self) -> SimulatedRun:
        self._carry_out(self.scheduler.begin(0.0))
        while len(self.ends_s) < self.num_steps:
            self.now, _, engine, turn, event = heapq.heappop(self._heap)
            if event is None:
                if self.machines[engine].turn == turn:
                    self._end_responses(engine)
            elif isinstance(event, events.Published):
                self._end_training(event)
            elif isinstance(event, events.Died):
                self._die(event)
            else:
                if isinstance(event, events.Loaded):
                    self._take_version(event)
                self._tell(event)
            for changed in sorted(self._changed):
                self._plan(changed)
            self._changed.clear()
        return self._outcome()

    def _at(self, time: float, event: Event | None, engine: int = -1, turn: int = 0) -> None:
        heapq.heappush(self._heap, (time, next(self._order), engine, turn, event))

    def _tell(self, event: Event) -> None:
        self._told.append(event)
        while self._told:
            self._carry_out(self.scheduler.handle(self._told.popleft(), self.now))

    def _carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case events.Issue():
                    self._issue(decision)
                case events.ScoreGroup():
                    self._told.append(events.Scored(decision.key, True))
                case events.Load():
                    self._load(decision)
                case events.Deliver():
                    self._batches.append(decision)
                    self._train()
                case events.Start():
                    self._start(decision)
                case events.Kill():
                    self._kill(decision)

    # Engines.

    def _start(self, decision: events.Start) -> None:
        wait = self.cluster.restart_s if decision.life else 0.0
        self.machines[decision.engine].alive = decision.life
        self._at(self.now + wait, events.Started(decision.engine, decision.life))
        if self.cluster.hours_between_deaths < NEVER:
            lives_s = wait + self.random.expovariate(1 / (3600 * self.cluster.hours_between_deaths))
            self._at(self.now + lives_s, events.Died(decision.engine, decision.life, "it was to die"))

    def _die(self, event: events.Died) -> None:
        if self.machines[event.engine].alive == event.life:
            self.num_deaths += 1
            if self.num_deaths - self._num_deaths_before > MOST_DEATHS * self.cluster.engines:
                raise InputError(
                    f"engines that die every {self.cluster.hours_between_deaths:g} hours do so more than {MOST_DEATHS} "
                    "times each before a step is trained: simulate more hours between deaths"
                )
            self._tell_prefixes(event)
            self._tell(event)

    def _tell_prefixes(self, event: events.Died) -> None:
        """What another engine may go on with: all but what the dying one has sampled since its last word."""
        if self.rules.is_pinned:
            return
        self._catch_up(event.engine)
        machine = self.machines[event.engine]
        if not machine.under_way:
            return
        told = machine.progress - self.random.random() * TELL_S / self._step_s(machine)
        for _, attempt, sample, begin in machine.under_way:
            tokens, before = int(told - begin), machine.given.get((attempt, sample))
            if tokens <= 0 and before is None:
                continue
            oldest = self._count(machine, attempt, begin, begin + tokens) if tokens > 0 else -1
            if before is not None:
                tokens, oldest = max(0, tokens) + before.tokens, before.oldest_version
            self._tell(events.Advanced(event.engine, event.life, attempt, sample, _Prefix(tokens, oldest)))

    def _kill(self, decision: events.Kill) -> None:
        machine = self.machines[decision.engine]
        self._catch_up(decision.engine)
        if machine.under_way:
            self._note(decision.engine, "sampling")
        machine.under_way.clear()
        machine.given.clear()
        machine.changes.clear()
        machine.held_until_s, machine.version = 0.0, -1
        machine.turn += 1

    def _step_s(self, machine: _Machine) -> float:
        return self.cluster.fixed_s + self.cluster.per_response_s * len(machine.under_way)

    def _catch_up(self, engine: int) -> None:
        """Bring an engine's progress to the present."""
        machine = self.machines[engine]
        begin = max(machine.at_s, machine.held_until_s)
        if machine.under_way and self.now > begin:
            machine.progress += (self.now - begin) / self._step_s(machine)
            machine.busy_s += self.now - begin
        machine.at_s = self.now

    def _plan(self, engine: int) -> None:
        """Plan the end of the response that ends next."""
        machine = self.machines[engine]
        machine.turn += 1
        if machine.under_way:
            begin = max(self.now, machine.held_until_s)
            left = max(0.0, machine.under_way[0][0] - machine.progress)
            self._at(begin + left * self._step_s(machine), None, engine, machine.turn)

    def _issue(self, decision: events.Issue) -> None:
        engine, (step, ticket) = decision.engine, decision.key
        self._catch_up(engine)
        machine = self.machines[engine]
        if not machine.under_way:
            machine.begun_s = self.now
        if not machine.changes:
            machine.changes.append((machine.progress, machine.version))
        of_step = self._step_lengths.get(step)
        if of_step is None:
            of_step = self.lengths(step, self.rules.num_groups, self.rules.group_size).tolist()
            self._step_lengths[step] = of_step
        for sample, prefix in zip(decision.samples, decision.prefixes, strict=True):
            end = machine.progress + of_step[ticket][sample]
            if prefix is not None:
                machine.given[decision.attempt, sample] = prefix
                end -= prefix.tokens
                prefill_s = prefix.tokens / self.cluster.prefill_tokens_per_s
                machine.held_until_s = max(self.now, machine.held_until_s) + prefill_s
            heapq.heappush(machine.under_way, (end, decision.attempt, sample, machine.progress))
        self._changed.add(engine)

    def _end_responses(self, engine: int) -> None:
        machine = self.machines[engine]
        self._catch_up(engine)
        life = machine.alive
        # The one that was planned has ended, also where its time is lost in rounding the clock's.
        machine.progress = max(machine.progress, machine.under_way[0][0] - 1e-6)
        while machine.under_way and machine.under_way[0][0] <= machine.progress + 1e-6:
            end, attempt, sample, begin = heapq.heappop(machine.under_way)
            if not machine.under_way:
                self._note(engine, "sampling")
            oldest, tokens = self._count(machine, attempt, begin, end), int(end - begin + 0.5)
            if (prefix := machine.given.pop((attempt, sample), None)) is not None:
                oldest, tokens = prefix.oldest_version, tokens + prefix.tokens
            self._tell(events.Answered(engine, life, attempt, sample, oldest, tokens))
        if not machine.under_way:
            machine.changes.clear()
        self._changed.add(engine)

    def _count(self, machine: _Machine, attempt: int, begin: float, end: float) -> int:
        """Count a response's tokens by the version that sampled them; returns the oldest."""
        step = self.scheduler.window.step_of(attempt)
        for since, version in reversed(machine.changes):
            self._tokens_at[step, version] += int(max(0.0, end - max(since, begin)))
            end = min(end, since)
            if since <= begin:
                break
        return version

    def _load(self, decision: events.Load) -> None:
        engine, machine = decision.engine, self.machines[decision.engine]
        self._catch_up(engine)
        wait = self.cluster.load_s
        if machine.under_way:
            self._note(engine, "sampling")
            tokens = sum(machine.progress - begin for _, _, _, begin in machine.under_way)
            wait += tokens / self.cluster.prefill_tokens_per_s
        machine.begun_s, machine.held_until_s = self.now, self.now + wait
        self._at(self.now + wait, events.Loaded(engine, decision.life, decision.version))
        self._changed.add(engine)

    def _take_version(self, event: events.Loaded) -> None:
        machine = self.machines[event.engine]
        if machine.alive == event.life:
            self._note(event.engine, "loading weights")
            self._catch_up(event.engine)
            machine.version = event.version
            if machine.under_way:
                machine.changes.append((machine.progress, event.version))
            else:
                machine.changes.clear()

    def _note(self, engine: int, name: str) -> None:
        """The engine ends what it has been doing since it began it."""
        machine = self.machines[engine]
        if self.records and self.now > machine.begun_s:
            details = {"version": machine.version} if name == "sampling" else {}
            self.activities.append(Activity(f"engine {engine}", name, machine.begun_s, self.now, details))
        machine.begun_s = self.now

    # The trainer.

    def _train(self) -> None:
        if self._is_training or not self._batches:
            return
        batch = self._batches.popleft()
        self._is_training = True
        self._idle_s.append(self.now - self._waits_since_s)
        tokens = sum(sum(results) for _, results in batch.groups) if self.cluster.train_token_s else 0
        seconds = self.cluster.train_s + self.cluster.train_token_s * tokens
        if self.records:
            waited = Activity("trainer", "waiting", self._waits_since_s, self.now, {"step": batch.step})
            training = Activity("trainer", "training", self.now, self.now + seconds, {"step": batch.step})
            self.activities += [waited] * (self.now > self._waits_since_s) + [training]
        self._at(self.now + seconds, events.Published(batch.step + 1))

    def _end_training(self, event: events.Published) -> None:
        self.ends_s.append(self.now)
        self._num_deaths_before = self.num_deaths
        self._step_lengths.pop(event.version - 1, None)
        self._is_training, self._waits_since_s = False, self.now
        self._tell(event)
        self._train()

    def _outcome(self) -> SimulatedRun:
        warm = self.num_steps // 2
        begin, end = self.ends_s[warm - 1] if warm else 0.0, self.ends_s[-1]
        ages = Counter[int]()
        for (step, version), tokens in self._tokens_at.items():
            if warm <= step < self.num_steps:
                ages[max(0, step - version)] += tokens
        num_tokens = sum(ages.values())
        busy_s = sum(machine.busy_s for machine in self.machines)
        return SimulatedRun(
            step_s=(end - begin) / (self.num_steps - warm),
            trainer_idle=sum(self._idle_s[warm : self.num_steps]) / (end - begin),
            engine_busy=busy_s / (self.cluster.engines * end),
            mean_staleness=sum(age * tokens for age, tokens in ages.items()) / max(1, num_tokens),
            max_staleness=max((age for age, tokens in ages.items() if tokens), default=0),
            tokens_per_s=num_tokens / (end - begin),
            num_deaths=self.num_deaths,
            activities=tuple(self.activities),
        )
