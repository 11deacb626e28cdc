"""What this process is doing, and how often it has come on: the marks that a watch over all ranks goes by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Wait:
    """What a process waits for."""

    for_whom: str  # in words that follow "waiting for"
    is_for_ranks: bool  # for other ranks of the run: whoever holds them up is not this process


class Heart:
    """The phase, the step and the progress of one process.

    Progress is whatever cannot go on for ever by itself: a phase that begins or ends, a step of an engine, a
    micro-batch, a scored sample, a piece of a weight sync. Any thread may mark it, at no cost worth counting.
    """

    def __init__(self) -> None:
        self.step = 0  # the training step under way, from 1; 0: models and engines are being built
        self.count = 0  # pieces of progress so far
        self._phases: tuple[str, ...] = ()
        self._waits: tuple[Wait, ...] = ()
        self._gauges: tuple[Callable[[], object], ...] = ()
        self._values: list[object] = []

    @property
    def phase(self) -> str:
        return self._phases[-1] if self._phases else "start" if self.step == 0 else "between phases"

    @property
    def wait(self) -> Wait | None:
        return self._waits[-1] if self._waits else None

    def mark(self) -> None:
        self.count += 1

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """The block is this phase, within the one around it."""
        outer = self._phases
        self._phases = (*outer, phase)
        self.mark()
        try:
            yield
        finally:
            self._phases = outer
            self.mark()

    @contextmanager
    def waiting(self, for_whom: str, is_for_ranks: bool = True) -> Iterator[None]:
        """The block does nothing but wait."""
        outer = self._waits
        self._waits = (*outer, Wait(for_whom, is_for_ranks))
        try:
            yield
        finally:
            self._waits = outer

    @contextmanager
    def measured(self, gauge: Callable[[], object]) -> Iterator[None]:
        """In the block another value of ``gauge`` is progress too: for work in code that cannot mark it.

        Args:
            gauge: called now and then in another thread; raises nothing.
        """
        outer = self._gauges
        self._gauges = (*outer, gauge)
        try:
            yield
        finally:
            self._gauges = outer

    def read_gauges(self) -> None:
        """Mark progress if a gauge shows another value than at the last call; only one thread calls this."""
        values = [gauge() for gauge in self._gauges]
        if values != self._values:
            self._values = values
            self.mark()


HEART = Heart()  # of this process
