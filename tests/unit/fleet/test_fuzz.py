"""Random schedules of a fleet: speeds, deaths, late and doubled messages, crashes of the whole run at any point.

``make fuzz`` runs 10,000 schedules of each test.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, strategies as st

from mega_rl.fleet import events
from mega_rl.fleet.engines import Condition, Engine, EngineLimits
from mega_rl.fleet.events import Decision, Event
from mega_rl.fleet.scheduler import FleetScheduler
from mega_rl.fleet.tickets import Rules
from tests.fuzzing import cases
from tests.pretended import schedules
from tests.pretended.schedules import Chances, World, reference


class EveryEngine(FleetScheduler):
    """Looks at all engines whenever one might be given something, as the rules are worded."""

    def _deal(self, now: float) -> None:
        if self._num_alive == 0:
            super()._deal(now)
            return
        self._bind()
        for engine in sorted(self._alive(), key=lambda e: (e.load, e.number)):
            self._feed(engine, now)

    def _bind(self) -> None:
        waiting = self.window.waiting()
        if not waiting or not self.rules.is_pinned_step(waiting[0][0]):
            return
        version, number = waiting[0]
        wanted = 1 if version >= 0 else math.ceil(number / self._share())
        wanted -= sum(engine.next_version == version for engine in self._alive())
        others = [engine for engine in self._alive() if engine.serves and engine.next_version != version]
        for engine in sorted(others, key=lambda e: (e.load, e.number))[: max(0, wanted)]:
            engine.bound = version

    def _alive(self) -> list[Engine]:
        return [engine for engine in self.engines.values() if engine.condition is not Condition.GONE]


class Both:
    """Two schedulers that must decide the same."""

    def __init__(self, rules: Rules, limits: EngineLimits, engines: range, state: Any = None) -> None:
        self._scheduler = FleetScheduler(rules, limits, engines, state)
        self._other = EveryEngine(rules, limits, engines, state)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def begin(self, now: float) -> list[Decision]:
        decisions = self._scheduler.begin(now)
        assert decisions == self._other.begin(now)
        return decisions

    def handle(self, event: Event, now: float) -> list[Decision]:
        if isinstance(event, events.Started):
            event = event._replace(slots=1 + (event.engine + event.life) % 5)
        decisions = self._scheduler.handle(event, now)
        assert decisions == self._other.handle(event, now)
        assert self._scheduler.engines == self._other.engines
        serving = {e.number: (e.load, e.number) for e in self._scheduler.engines.values() if e.serves}
        assert {number: place for number, (_, place) in self._scheduler._serving._known.items()} == serving
        return decisions


SEEDS = st.integers(0, 2**32 - 1)
DROPS = st.integers(0, 5)  # of ten groups
CHANCES = st.builds(
    Chances,
    death=st.integers(0, 15),
    silence=st.integers(0, 5),
    double=st.integers(0, 200),
    late=st.integers(0, 600),
    crash=st.integers(0, 6),
    join=st.integers(0, 20),
    leave=st.integers(0, 20),
    validation=st.integers(0, 1000),
    patience=st.integers(0, 1000),
)


@st.composite
def rules(draw: st.DrawFn, is_pinned: bool) -> Rules:
    num_groups, group_size = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return Rules(
        num_groups,
        group_size,
        total_steps=draw(st.integers(0, 5)),
        eta=draw(st.integers(0, 3)),
        is_pinned=is_pinned,
        budget=draw(st.none() | st.integers(num_groups, 3 * num_groups)),
        num_parts=draw(st.integers(1, group_size)),
    )


@cases(250)
@given(rules(is_pinned=True), CHANCES, st.integers(1, 4), st.integers(1, 6), SEEDS, DROPS)
def test_what_a_pinned_run_learns_from_depends_on_no_schedule(
    given_rules: Rules, chances: Chances, engines: int, slots: int, seed: int, drops: int
) -> None:
    limits = EngineLimits(slots=slots, progress_s=5.0, start_s=20.0, restarts=10**6)
    world = World(given_rules, limits, chances, engines, seed, drops).run()
    assert world.end is not None and not world.end.is_failure
    trained, weights = reference(given_rules, drops)
    assert world.trained == trained
    assert world.weights[given_rules.total_steps] == weights


@cases(200)
@given(rules(is_pinned=False), CHANCES, st.integers(1, 4), st.integers(1, 6), SEEDS, DROPS)
def test_no_token_is_older_than_eta_though_weights_change_under_way(
    given_rules: Rules, chances: Chances, engines: int, slots: int, seed: int, drops: int
) -> None:
    limits = EngineLimits(slots=slots, progress_s=5.0, start_s=20.0, restarts=10**6)
    world = World(given_rules, limits, chances, engines, seed, drops).run()
    assert world.end is not None and not world.end.is_failure
    expected, _ = reference(given_rules, drops)  # the same prompts and tokens: here these hang on no weights
    for step, groups in enumerate(world.trained):
        assert [key for key, _ in groups] == [key for key, _ in expected[step]]
        for (_, results), (_, wanted) in zip(groups, expected[step], strict=True):
            assert [[t for t, _ in sample] for sample in results] == [[t for t, _ in sample] for sample in wanted]
            versions = [[version for _, version in sample] for sample in results]
            assert all(max(0, step - given_rules.eta) <= min(v) and max(v) <= step for v in versions)
            assert versions == [sorted(v) for v in versions]


@cases(80)
@given(st.booleans().flatmap(lambda pinned: rules(is_pinned=pinned)), st.integers(1, 3), st.integers(0, 2), SEEDS)
def test_a_fleet_that_keeps_dying_ends_in_a_sentence(
    given_rules: Rules, engines: int, restarts: int, seed: int
) -> None:
    limits = EngineLimits(slots=4, progress_s=5.0, start_s=20.0, restarts=restarts)
    world = World(given_rules, limits, Chances(death=400), engines, seed, drops=0).run()
    assert world.end is not None
    if world.end.is_failure:
        assert "no rollout engine is left (engine " in world.end.sentence
        assert world.newest < given_rules.total_steps and not world.engines
    else:
        assert world.newest == given_rules.total_steps


@cases(250)
@given(st.booleans().flatmap(lambda pinned: rules(is_pinned=pinned)), CHANCES, st.integers(1, 6), SEEDS, DROPS)
def test_who_is_not_looked_at_would_not_have_been_given_anything(
    given_rules: Rules, chances: Chances, engines: int, seed: int, drops: int
) -> None:
    limits = EngineLimits(slots=8, progress_s=5.0, start_s=20.0, restarts=10**6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedules, "FleetScheduler", Both)
        world = World(given_rules, limits, chances, engines, seed, drops).run()
    assert world.end is not None and not world.end.is_failure
