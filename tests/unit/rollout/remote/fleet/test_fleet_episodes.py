"""Episodes beside the engines of a fleet: the same whatever engine has them, however often it dies."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from mega_rl.rollout.engine import Request
from mega_rl.rollout.episodes import episodes as under_test
from mega_rl.rollout.remote.engine_process import EngineProcess, episodes_on
from mega_rl.rollout.remote.fleet.kept_engine import KeptEngine
from mega_rl.rollout.requests import make_requests
from mega_rl.types import Trajectory
from tests.pretended.samplers import ScriptedEngine
from tests.unit.rollout.episodes.test_episodes import SlowEcho, episodes, plan, requests, tokenizer

Found = dict[tuple[int, int], Trajectory]  # by attempt and sample
ATTEMPTS = 6


@contextmanager
def process(order: int = 0, pace: int = 3) -> Iterator[EngineProcess]:
    made = EngineProcess()
    made._engine = ScriptedEngine(tokenizer(), order, pace)  # type: ignore[assignment]
    made._sampler = episodes_on(made._engine, plan(SlowEcho if order else plan().make), 0, 1)
    try:
        yield made
    finally:
        made._sampler.close()


def issued(process: EngineProcess, tickets: dict[int, list[Request]], max_calls: int = 10**6) -> Found:
    for attempt, asked in tickets.items():
        process.issue(0, attempt, range(len(asked)), asked)
    found: Found = {}
    while process.sampler.num_unfinished and max_calls:
        max_calls -= 1
        found |= {(attempt, sample): trajectory for attempt, sample, trajectory in process.proceed(16)}
    return found


def tickets() -> dict[int, list[Request]]:
    """Groups of two steps: the same prompts under way twice, with other seeds."""
    prompts = [asked.prompt for asked in requests(num_prompts=3, n=1)]
    return {
        3 * step + i: make_requests([prompt], n=2, step=step, seed=1, max_tokens=200, temperature=1.0)
        for step in range(2)
        for i, prompt in enumerate(prompts)
    }


def test_an_engine_drops_the_episodes_of_a_trainer_that_is_gone() -> None:
    made: list[int] = []
    closed: list[int] = []

    class Closing(SlowEcho):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(1)

        def close(self) -> None:
            closed.append(1)

    wanted = tickets()
    kept = KeptEngine("a trainer")
    kept._engine = ScriptedEngine(tokenizer(), order=3, pace=1)  # type: ignore[assignment]
    kept._sampler = episodes_on(kept._engine, plan(Closing), 0, 1)
    early = issued(kept, wanted, max_calls=1)
    deadline = time.monotonic() + 60
    while len(made) < 2 * ATTEMPTS:  # what is made later is closed later
        assert time.monotonic() < deadline
        time.sleep(0.01)
    kept.rest()
    assert len(early) < 2 * ATTEMPTS == len(closed) and not kept.sampler.num_unfinished and not kept._tickets
    assert not kept.engine.num_unfinished
    found = issued(kept, wanted)
    kept.sampler.close()  # type: ignore[union-attr]
    with process() as other:
        assert found == issued(other, wanted)


def test_whole_episodes_do_not_depend_on_the_engine_that_has_them() -> None:
    wanted = tickets()
    expected = {
        (attempt, sample): trajectory
        for attempt, asked in wanted.items()
        for sample, trajectory in enumerate(episodes(plan(), asked))
    }
    with process() as one:
        found = issued(one, wanted)
        assert one._num_steps > 0
    assert found == expected
    assert len({tuple(trajectory.token_ids) for trajectory in found.values()}) == 2 * ATTEMPTS
    assert all(t.prompt.index < 3 and t.episode is not None and t.episode.num_turns == 3 for t in found.values())
    with process(order=5, pace=1) as first, process(order=9, pace=7) as second:
        early = issued(first, wanted, max_calls=1)  # and it dies: all that it has not ended is begun anew
        rest = {a: asked for a, asked in wanted.items() if not {(a, 0), (a, 1)} <= early.keys()}
        again = issued(second, rest)
    assert rest and early | again == expected


def test_an_engine_that_waits_for_a_tool_makes_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tool's own limit ends the wait; until then it is no standstill of the engine."""
    monkeypatch.setattr(under_test, "MAX_WAIT_S", 0.01)
    is_over = threading.Event()

    class Waiting(SlowEcho):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            is_over.wait(60)

    made = EngineProcess()
    made._engine = ScriptedEngine(tokenizer(), 0, 3)  # type: ignore[assignment]
    made._sampler = episodes_on(made._engine, plan(Waiting), 0, 1)
    made.issue(0, 0, range(2), tickets()[0])
    for num_steps in (16, 32):
        assert made.proceed(16) == [] and made._num_steps == num_steps
    is_over.set()
    while made.sampler.num_unfinished:
        made.proceed(16)
    made.sampler.close()  # type: ignore[union-attr]
