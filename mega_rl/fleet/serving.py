"""The engines that may be given work, in the order in which they are: whoever has least of it first."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterator, Set as AbstractSet
from itertools import islice
from typing import NamedTuple

from mega_rl.fleet.engines import Engine

Place = tuple[int, int]  # responses under way, and the engine's number: the order in which engines are looked at


class EngineKind(NamedTuple):
    """What decides, beside its load, whether an engine can be given anything."""

    version: int
    bound: int | None
    slots: int


class ServingEngines:
    """All engines with ``serves``; ``note`` must be told of each that has changed.

    Engines of a kind are in order, so where the first of them can be given nothing, the others are not looked at.
    """

    def __init__(self) -> None:
        self._of_kind: dict[EngineKind, list[Place]] = {}  # ascending
        self._known: dict[int, tuple[EngineKind, Place]] = {}  # by engine
        self.num_looked_at = 0  # places, in all

    def note(self, engine: Engine) -> None:
        """This is what an engine is now."""
        self._forget(engine.number)
        if engine.serves:
            kind, place = EngineKind(engine.version, engine.bound, engine.slots), (engine.load, engine.number)
            bisect.insort(self._of_kind.setdefault(kind, []), place)
            self._known[engine.number] = kind, place

    def _forget(self, number: int) -> None:
        if (known := self._known.pop(number, None)) is not None:
            kind, place = known
            places = self._of_kind[kind]
            del places[bisect.bisect_left(places, place)]
            if not places:
                del self._of_kind[kind]

    def num_heading_for(self, version: int) -> int:
        """Engines with ``next_version`` so; without those that load it."""
        return sum(len(places) for kind, places in self._of_kind.items() if _next_version(kind) == version)

    def not_heading_for(self, version: int, number: int) -> list[int]:
        """The first so many engines with another ``next_version``."""
        others = [places for kind, places in self._of_kind.items() if _next_version(kind) != version]
        return [engine for _, engine in islice(heapq.merge(*others), max(0, number))]

    def each(self, can_take: Callable[[EngineKind, int], bool]) -> Iterator[int]:
        """Every engine that can take something when its turn comes, once, in their order as of now.

        What follows from one turn may change who comes later, and engines themselves.

        Args:
            can_take: whether an engine of a kind with so many responses can take something; if not, none of the kind
                with as many or more can.
        """
        after, seen = (-1, -1), set[int]()
        while (found := self._next(after, seen, can_take)) is not None:
            after = found
            seen.add(found[1])
            yield found[1]

    def _next(self, after: Place, seen: AbstractSet[int], can_take: Callable[[EngineKind, int], bool]) -> Place | None:
        found: list[Place] = []
        for kind, places in self._of_kind.items():
            for index in range(bisect.bisect_right(places, after), len(places)):
                self.num_looked_at += 1
                load, engine = places[index]
                if not can_take(kind, load):
                    break
                if engine not in seen:  # else it has had its turn, and has another place since
                    found.append(places[index])
                    break
        return min(found, default=None)


def _next_version(kind: EngineKind) -> int:
    return kind.version if kind.bound is None else kind.bound
