"""A worker of an engine that outlives its trainer, with a pretended engine in it; the weights are real ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mega_rl.bridge.series import Series
from mega_rl.rollout.engine import Request
from mega_rl.rollout.remote.engine_process import EngineSpec
from mega_rl.rollout.remote.fleet.kept_engine import KeptEngine, digest
from mega_rl.types import Trajectory
from tests.pretended_fleet import Response

NORM = Series("model.norm.weight", ((0, 5),), "model.norm.weight", ((0, 5),))
STEP_S = 0.01  # of the engine, so that work is in hand when a trainer is killed


class PretendedEngine:
    """What ``ReceivingEngine`` is to an ``EngineProcess``; all its tokens depend on the weights that it has loaded."""

    def __init__(self) -> None:
        self.live = {"model.norm.weight": torch.zeros(5)}
        self._version, self._num_entered = -1, 0
        self._under_way: dict[int, Response] = {}

    @property
    def num_unfinished(self) -> int:
        return len(self._under_way)

    def enter(self, requests: Sequence[Request]) -> list[int]:
        first = self._num_entered
        self._num_entered += len(requests)
        self._under_way |= {first + i: Response(request, 0) for i, request in enumerate(requests)}
        return list(range(first, self._num_entered))

    def numbered_step(self) -> list[tuple[int, Trajectory]]:
        time.sleep(STEP_S)
        for response in self._under_way.values():
            response.advance(self._version, self.live["model.norm.weight"].tolist())
        ended = {number: response for number, response in self._under_way.items() if response.has_ended}
        for number in ended:
            del self._under_way[number]
        return [(number, response.trajectory()) for number, response in ended.items()]

    def exchange(self, write: Callable[[Mapping[str, torch.Tensor]], None], version: int) -> None:
        assert not self._under_way, "weights change under a pinned ticket"
        write(self.live)
        self._version = version

    def abandon(self) -> None:
        self._under_way.clear()


class PretendedKeptEngine(KeptEngine):
    """Starts at once, without a model."""

    def open(self, spec: EngineSpec) -> Any:
        return None

    def start(self, spec: EngineSpec, tensor_rank: int, point: Any) -> None:
        self._tensor_rank = tensor_rank
        engine: Any = PretendedEngine()
        self._engine = self._sampler = engine
        self._digest = digest(spec)
