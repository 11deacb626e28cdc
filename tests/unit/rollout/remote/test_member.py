"""One engine of a fleet as a sampler, over a fleet that answers at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mega_rl.errors import InputError
from mega_rl.rollout.engine import Request
from mega_rl.rollout.remote.member import FleetMember
from mega_rl.serving.engines import Engines
from mega_rl.types import Prompt, Trajectory


class Fleet:
    """Two engines of two workers; each engine ends its newest request first."""

    engine_size = 2

    def __init__(self) -> None:
        self.under_way: list[list[Request]] = [[], []]

    def submit_to(self, engine: int, method: str, *arguments: Any) -> list[Any]:
        if method == "submit":
            self.under_way[engine] += arguments[0]
            return [None, None]
        assert method == "advance"
        request = self.under_way[engine].pop()
        ids = [engine, request.sample_index]
        ended = Trajectory.single_turn(request.prompt, request.sample_index, ids, [0.0, 0.0], "", "stop", 0)
        return [[ended], []]

    def results(self, calls: list[Any], doing: str, first_worker: int = 0) -> list[Any]:
        assert first_worker in (0, 2)
        return calls


def requests(index: int) -> list[Request]:
    return [Request(Prompt(index, (1, 2), "", "", ""), number, 0, max_tokens=4) for number in range(3)]


def test_members_of_one_fleet_answer_for_themselves() -> None:
    fleet = Fleet()
    first, second = (FleetMember(fleet, engine, 8) for engine in range(2))  # type: ignore[arg-type]
    second.submit(requests(5))
    assert (first.num_unfinished, second.num_unfinished) == (0, 3)
    assert [one.sampled_ids.tolist() for one in first.generate(requests(4))] == [[0, 0], [0, 1], [0, 2]]
    assert [one.sampled_ids.tolist() for _ in range(3) for one in second.step()] == [[1, 2], [1, 1], [1, 0]]
    assert second.num_unfinished == 0
    with pytest.raises(InputError, match="has 2 tokens"):
        first.submit([Request(Prompt(0, (1, 2), "", "", ""), 0, 0, max_tokens=7)])


async def sampled(engines: Engines, session: str) -> list[list[int]]:
    events = engines.sample(requests(0), session)
    return [one.sampled_ids.tolist() async for one in events if isinstance(one, Trajectory)]


def test_responses_that_are_told_as_a_whole_are_served_too() -> None:
    fleet = Fleet()
    engines = Engines([FleetMember(fleet, engine, 8) for engine in range(2)])  # type: ignore[arg-type]
    found = asyncio.run(sampled(engines, "a session"))
    assert sorted(ids[1] for ids in found) == [0, 1, 2] and len({ids[0] for ids in found}) == 1
    assert engines.loads == [0, 0]
    engines.close()
