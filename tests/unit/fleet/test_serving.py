"""The order in which engines are looked at, and how many of them are."""

from __future__ import annotations

from mega_rl.fleet.engines import Condition, Engine
from mega_rl.fleet.serving import EngineKind, ServingEngines


def serving(loads: list[int]) -> tuple[ServingEngines, list[Engine]]:
    engines = [Engine(n, Condition.SERVING, version=n % 2, load=load, slots=8) for n, load in enumerate(loads)]
    found = ServingEngines()
    for engine in engines:
        found.note(engine)
    return found, engines


def test_each_engine_has_one_turn_in_the_order_as_it_was() -> None:
    found, engines = serving([5, 0, 3, 0, 9, 1])
    turns = []
    for number in found.each(lambda kind, load: load < 9):
        turns.append(number)
        engines[number].load += 2  # which may bring it behind others that have had no turn
        found.note(engines[number])
    assert turns == [1, 3, 5, 2, 0]


def test_engines_that_have_changed_meanwhile_have_no_turn() -> None:
    found, engines = serving([0, 1, 2, 3])
    turns = []
    for number in found.each(lambda kind, load: True):
        turns.append(number)
        engines[3].loading = 7
        found.note(engines[3])
    assert turns == [0, 1, 2] and found.num_heading_for(0) == 2 and found.num_heading_for(1) == 1


def test_nobody_behind_an_engine_that_can_take_nothing_is_looked_at() -> None:
    found, _ = serving([6] * 1000)
    asked: list[tuple[EngineKind, int]] = []

    def can_take(kind: EngineKind, load: int) -> bool:
        asked.append((kind, load))
        return False

    assert list(found.each(can_take)) == [] and len(asked) == found.num_looked_at == 2, "one of each kind"


def test_who_is_bound_heads_for_other_weights() -> None:
    found, engines = serving([4, 2, 3, 1])
    engines[1].bound = 0
    found.note(engines[1])
    assert found.num_heading_for(0) == 3 and found.not_heading_for(0, 5) == [3]
    assert found.not_heading_for(7, 2) == [3, 1] and found.not_heading_for(7, -1) == []
