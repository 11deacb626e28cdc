"""Which engine elsewhere gets which request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from mega_rl.rollout.engine import Request
from mega_rl.rollout.remote import engines as module
from mega_rl.rollout.remote.engines import RemoteEngines
from mega_rl.types import Prompt, PromptImage, Trajectory


class PretendedFleet:
    """Engines that end everything that they were given when they are asked."""

    engine_size = 1

    def __init__(self, spec: Any, num_engines: int) -> None:
        self.given: list[tuple[int, list[tuple[int, int, int]]]] = []  # engine, (prompt, sample, turn)
        self.waiting: list[list[Request]] = [[] for _ in range(num_engines)]
        self.shown: list[Any] = []  # what came with requests
        self.failure: Exception | None = None  # of taking requests
        self.slow: set[int] = set()  # engines that do not answer yet

    def shared(self, value: Any) -> Any:
        return ("put", value)

    def submit_to(self, engine: int, method: str, value: Any = None, *more: Any) -> Any:
        if method == "interrupt":
            stopped, self.waiting[engine] = self.waiting[engine], []
            return [replace(r, tail=Trajectory.single_turn(r.prompt, 0, [8], [-1.0], "", "abort", 0)) for r in stopped]
        if method == "submit":
            self.shown.append(more)
            self.given.append((engine, [(r.prompt.index, r.sample_index, r.turn) for r in value]))
            self.waiting[engine] += value
            return None
        ended, self.waiting[engine] = self.waiting[engine], []
        return [Trajectory.single_turn(r.prompt, r.sample_index, [7], [-0.5], "", "stop", 0) for r in ended]

    def first_done(self, calls: dict[int, Any], wait_s: float | None = None) -> int | None:
        done = [engine for engine in calls if engine not in self.slow]
        assert done or wait_s is not None, "nothing ends, and it is waited for without a limit"
        return next(iter(done), None)

    def results(self, calls: Any, doing: str, first_worker: int) -> list[Any]:
        if calls is None and self.failure is not None:
            raise self.failure
        return [calls]


class PretendedPictures:
    def encoded(self, prompts: Iterable[Prompt]) -> dict[str, str]:
        return {image.key: f"bytes of {image.key}" for prompt in prompts for image in prompt.images}


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RemoteEngines, PretendedFleet]]:
    monkeypatch.setattr(module, "EngineGroup", PretendedFleet)
    monkeypatch.setattr(module.dist, "get_rank", lambda: 0)
    spec: Any = SimpleNamespace(
        max_model_len=100, collective_timeout_s=60.0, rollout=SimpleNamespace(tensor_parallel_size=1)
    )
    made = RemoteEngines(spec, 3)
    fleet: Any = made.fleet
    yield made, fleet


def turns(prompt: int, samples: range, turn: int) -> list[Request]:
    of_prompt = Prompt(prompt, (1, 2), "", "", "")
    return [Request(of_prompt, sample, seed=0, max_tokens=4, turn=turn) for sample in samples]


def test_later_turns_go_to_the_engine_of_the_turn_before(engines: tuple[RemoteEngines, PretendedFleet]) -> None:
    sampler, fleet = engines
    sampler.submit([one for prompt in range(3) for one in turns(prompt, range(2), 0)])
    assert fleet.given == [(engine, [(engine, 0, 0), (engine, 1, 0)]) for engine in range(3)]
    while sampler.num_unfinished:
        sampler.step()
    fleet.given.clear()
    # one after another, as their environments answer: the least busy engine would always be the first
    for prompt, sample in ((2, 1), (1, 0), (2, 0)):
        sampler.submit(turns(prompt, range(sample, sample + 1), 1))
        while sampler.num_unfinished:
            sampler.step()
    assert fleet.given == [(2, [(2, 1, 1)]), (1, [(1, 0, 1)]), (2, [(2, 0, 1)])]
    fleet.given.clear()
    sampler.submit([*turns(0, range(1), 1), *turns(2, range(2), 2), *turns(9, range(2), 0)])
    assert fleet.given == [(0, [(0, 0, 1)]), (2, [(2, 0, 2), (2, 1, 2)]), (1, [(9, 0, 0), (9, 1, 0)])]


def test_what_is_under_way_is_taken_out(engines: tuple[RemoteEngines, PretendedFleet]) -> None:
    """What engines end that were asked before is not lost; all others come back with their tails, in their order."""
    sampler, fleet = engines
    sampler.submit([*turns(4, range(2), 0), *turns(2, range(2), 0)])
    fleet.slow = {1}
    assert [(t.prompt.index, t.sample_index) for t in sampler.step()] == [(4, 0), (4, 1)]
    sampler.submit([*turns(7, range(2), 0), *turns(9, range(1), 0)])  # the other engine is on its way
    found, stopped = sampler.interrupt()
    assert [(t.prompt.index, t.sample_index) for t in found] == [(2, 0), (2, 1)]
    assert [(r.prompt.index, r.sample_index) for r in stopped] == [(7, 0), (7, 1), (9, 0)]
    assert all(r.tail is not None and r.tail.num_sampled == 1 for r in stopped)
    assert sampler.num_unfinished == 0 and sampler._loads == [0, 0, 0] and not sampler._advancing
    sampler.submit(stopped)
    assert fleet.given[-2:] == [(0, [(7, 0, 0), (7, 1, 0)]), (1, [(9, 0, 0)])]


@pytest.mark.parametrize("per_engine", [1, 40])
def test_however_many_responses_end_the_ranks_are_told_once(
    engines: tuple[RemoteEngines, PretendedFleet], per_engine: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of nothing else than their numbers."""
    told: list[Sequence[int]] = []
    monkeypatch.setattr(module, "told_numbers", lambda numbers: told.append(numbers) or list(numbers))
    sampler, _ = engines
    requests = [one for number in range(3) for one in turns(number, range(per_engine), 0)]
    sampler.submit(requests)
    ended = sampler.step()
    assert {(t.prompt.index, t.sample_index) for t in ended} == {(r.prompt.index, r.sample_index) for r in requests}
    assert sampler.num_unfinished == 0 and sampler.step() == []
    assert [len(numbers) for numbers in told] == [2 * len(requests), 0]


def test_what_is_not_known_goes_to_the_engine_with_the_least_to_do(
    engines: tuple[RemoteEngines, PretendedFleet],
) -> None:
    sampler, fleet = engines
    sampler.submit(turns(0, range(2), 0))
    while sampler.num_unfinished:
        sampler.step()
    sampler.submit(turns(5, range(1), 0))  # a new step: where the one before was sampled is forgotten
    fleet.given.clear()
    sampler.submit([replace(one, turn=3) for one in turns(0, range(2), 0)])
    assert fleet.given == [(1, [(0, 0, 3), (0, 1, 3)])]


def test_pictures_go_beside_the_requests_and_not_in_them(engines: tuple[RemoteEngines, PretendedFleet]) -> None:
    sampler, fleet = engines
    picture_set: Any = PretendedPictures()
    sampler._picture_set = picture_set
    seeing = Prompt(0, (1, 2, 2), "", "", "", {}, (PromptImage("a", 1, 1), PromptImage("b", 2, 1)))
    sampler.submit([Request(seeing, sample, seed=0, max_tokens=4) for sample in range(3)])
    sampler.submit(turns(1, range(2), 0))
    assert fleet.shown == [(("put", {"a": "bytes of a", "b": "bytes of b"}),), ()], "once for all samples of a prompt"
    sampler._picture_set = None
    sampler.submit([Request(replace(seeing, index=2), 0, seed=0, max_tokens=4)])
    assert fleet.shown[2:] == [()]


def test_requests_that_an_engine_could_not_take_are_a_failure(engines: tuple[RemoteEngines, PretendedFleet]) -> None:
    sampler, fleet = engines
    sampler.submit(turns(0, range(2), 0))
    fleet.failure = RuntimeError("the image processors of trainer and engine differ")
    with pytest.raises(RuntimeError, match="image processors"):
        sampler.step()
