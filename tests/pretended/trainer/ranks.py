"""Trainer ranks that are threads of this process: their collectives meet, and none is a torch.distributed rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy
import pytest
import torch.distributed as dist

from mega_rl.bridge.reshard import held_pieces, proof
from mega_rl.bridge.reshard.held_pieces import Numbers

Result = TypeVar("Result")
TIMEOUT_S = 120.0
COMBINED: dict[Any, Callable[[Sequence[Numbers]], Numbers]] = {
    dist.ReduceOp.MIN: lambda values: numpy.minimum.reduce(values),
    dist.ReduceOp.SUM: lambda values: numpy.add.reduce(values),
}


class PretendedRanks:
    """Runs one function as every rank, at the same time."""

    def __init__(self, size: int) -> None:
        self.size, self._own = size, threading.local()
        self._given: list[Any] = [None] * size
        self._combined = numpy.zeros(0, dtype=numpy.int64)
        self._meeting = threading.Barrier(size, timeout=TIMEOUT_S)

    def run(self, function: Callable[[int], Result]) -> list[Result]:
        """``function(rank)`` of each.

        Raises:
            Exception: the first rank's that raised one which is not a meeting that another rank left.
        """

        def as_rank(rank: int) -> Result:
            self._own.rank = rank
            try:
                return function(rank)
            except Exception:
                self._meeting.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            calls = [pool.submit(as_rank, rank) for rank in range(self.size)]
        errors = [error for call in calls if (error := call.exception()) is not None]
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return [call.result() for call in calls]

    def gathered(self, value: Any, group: None = None) -> list[Any]:
        self._meeting.wait()
        self._given[self._own.rank] = value
        self._meeting.wait()
        return list(self._given)

    def reduced(self, values: Numbers, op: Any) -> Numbers:
        given = self.gathered(values)
        if self._own.rank == 0:  # for all: the others would only make the same once more
            self._combined = COMBINED[op](given)
        self._meeting.wait()
        return self._combined.copy()

    def is_any(self, flag: bool) -> bool:
        return any(self.gathered(flag))

    def numbers(self, own: Sequence[float], reduction: Callable[..., Sequence[float]], size: int) -> list[float]:
        """As ``collectives.reduced``."""
        found = list(reduction([list(row) for row in self.gathered(own)]))
        self._meeting.wait()
        assert len(found) == size
        return found

    @contextmanager
    def together(self, what: str, group: None = None) -> Iterator[None]:
        yield

    def rank(self) -> int:
        return int(self._own.rank)

    def take_the_place_of_the_group(self, patch: pytest.MonkeyPatch) -> None:
        """In the proofs."""
        patch.setattr(held_pieces, "reduced", self.reduced)
        patch.setattr(proof, "together", self.together)
        patch.setattr(held_pieces, "own_rank", self.rank)
