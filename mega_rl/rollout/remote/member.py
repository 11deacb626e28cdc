"""One engine of a fleet as a sampler of its own, for whoever chooses engines by itself."""

from __future__ import annotations

from collections.abc import Sequence

from mega_rl.rollout.engine import Request
from mega_rl.rollout.remote.placement import EngineGroup
from mega_rl.rollout.requests import check_length
from mega_rl.types import Trajectory

MAX_STEPS = 4  # of the engine between two words of it: so long a new request waits at most


class FleetMember:
    """A ``Sampler``. Members of one fleet may be used by different threads; nothing is collective."""

    weight_version = 0

    def __init__(self, fleet: EngineGroup, engine: int, max_model_len: int) -> None:
        self._fleet, self._engine, self._max_model_len = fleet, engine, max_model_len
        self._num_unfinished = 0

    def check(self, requests: Sequence[Request]) -> None:
        for request in requests:
            check_length(request, self._max_model_len)

    @property
    def num_unfinished(self) -> int:
        return self._num_unfinished

    def submit(self, requests: Sequence[Request]) -> None:
        self.check(requests)
        self._fleet.submit_to(self._engine, "submit", requests)
        self._num_unfinished += len(requests)

    def step(self) -> list[Trajectory]:
        first = self._engine * self._fleet.engine_size
        calls = self._fleet.submit_to(self._engine, "advance", MAX_STEPS)
        ended: list[Trajectory] = self._fleet.results(calls, "sampling", first_worker=first)[0]
        self._num_unfinished -= len(ended)
        return ended

    def generate(self, requests: Sequence[Request]) -> list[Trajectory]:
        assert not self._num_unfinished, "generation while other responses are under way"
        self.submit(requests)
        found: dict[tuple[int, int], Trajectory] = {}
        while self._num_unfinished:
            found |= {(one.prompt.index, one.sample_index): one for one in self.step()}
        return [found[request.prompt.index, request.sample_index] for request in requests]
