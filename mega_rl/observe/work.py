"""How many floating-point operations this process's models were asked for, phase by phase."""

from __future__ import annotations

from collections.abc import Iterable

from mega_rl.observe.heartbeat import HEART


class ModelWork:
    """Model operations, as ``models.flops`` counts them, of the phase that was under way."""

    def __init__(self) -> None:
        self._flops: dict[str, float] = {}

    def add(self, flops: float) -> None:
        self._flops[HEART.phase] = self._flops.get(HEART.phase, 0.0) + flops

    def collect(self, phases: Iterable[str]) -> float:
        """The operations of some phases since the last call; those of the others are forgotten too."""
        flops, self._flops = self._flops, {}
        return sum(flops.get(phase, 0.0) for phase in phases)


WORK = ModelWork()  # of this process
