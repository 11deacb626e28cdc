"""Who sends what to whom, compiled once from the two layouts; integers only.

Tensors of one kind that the same ranks hold and want in the same pieces are planned as one group: the plan's length
depends on the ranks, and hardly on the number of layers and experts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from mega_rl.bridge.assign import Need, assign
from mega_rl.bridge.groups import Group, Holder, group_tensors
from mega_rl.bridge.series import Number, Series, from_slice, hf_name_of
from mega_rl.bridge.slices import Box, Slice, flat_range, intersect, num_elements, subtract_all

Layout = Sequence[Sequence[Slice | Series]]  # what each rank holds or wants


class Move(NamedTuple):
    """One piece of an HF tensor that goes from its place on one rank to its place on another, or on the same."""

    src_rank: int
    dst_rank: int
    hf_name: str
    hf_box: Box
    src_name: str  # local parameter on the source
    src_box: Box
    dst_name: str  # local parameter on the destination
    dst_box: Box

    @property
    def num_elements(self) -> int:
        return num_elements(self.hf_box)

    @property
    def is_local(self) -> bool:
        return self.src_rank == self.dst_rank

    def part(self, start: int, end: int) -> list[Move]:
        """The same move for the elements number ``start`` to ``end`` of its box, counted row by row."""
        boxes = (flat_range(box, start, end) for box in (self.hf_box, self.src_box, self.dst_box))
        return [self._replace(hf_box=h, src_box=s, dst_box=d) for h, s, d in zip(*boxes, strict=True)]


class Run(NamedTuple):
    """One piece of many like tensors that goes from one rank to another, or stays.

    The piece's rows in all tensors of the group, one tensor below the other, are numbered; the run is of the rows from
    ``start`` to ``end``.
    """

    numbers: tuple[Number, ...]  # of the group's tensors
    hf_box: Box
    src_rank: int
    source: Series
    dst_rank: int
    destination: Series
    start: int
    end: int

    @property
    def num_elements(self) -> int:
        return (self.end - self.start) * num_elements(self.hf_box[1:])

    @property
    def is_local(self) -> bool:
        return self.src_rank == self.dst_rank

    def restrict(self, wanted: frozenset[Number]) -> Iterator[Run]:
        """The parts that belong to the wanted tensors."""
        rows = self.hf_box[0][1] - self.hf_box[0][0]
        for i in range(self.start // rows, -(-self.end // rows)):
            if self.numbers[i] in wanted:
                start, end = max(0, self.start - i * rows), min(rows, self.end - i * rows)
                yield self._replace(numbers=(self.numbers[i],), start=start, end=end)

    def moves(self) -> Iterator[Move]:
        top, rows = self.hf_box[0][0], self.hf_box[0][1] - self.hf_box[0][0]
        whole = self.hf_box, self.source.place(self.hf_box), self.destination.place(self.hf_box)
        for i in range(self.start // rows, -(-self.end // rows)):
            boxes = whole
            start, end = max(0, self.start - i * rows), min(rows, self.end - i * rows)
            if end - start < rows:
                box = ((top + start, top + end), *self.hf_box[1:])
                boxes = box, self.source.place(box), self.destination.place(box)
            yield self._move(self.numbers[i], *boxes)

    def _move(self, number: Number, hf_box: Box, src_place: Box, dst_place: Box) -> Move:
        return Move(
            self.src_rank,
            self.dst_rank,
            hf_name_of(self.source.hf_name, number),
            hf_box,
            self.source.local_name_of(number),
            self.source.local_box_of(number, src_place),
            self.destination.local_name_of(number),
            self.destination.local_box_of(number, dst_place),
        )


@dataclass(frozen=True)
class Volume:
    """Elements that a plan moves, for one rank or over all of them."""

    local: int  # copied within a rank
    sent: int
    received: int
    minimum: int  # distinct elements that a rank needs and does not hold: no plan can receive fewer


@dataclass(frozen=True)
class Plan:
    """Every destination element written exactly once, from the rank itself where it holds it, else from one owner."""

    num_ranks: int
    runs: tuple[Run, ...]
    minimum: tuple[int, ...]  # [num_ranks] elements, see Volume

    @cached_property
    def traffic(self) -> np.ndarray:
        """Elements from rank to rank, [num_ranks, num_ranks] int64; the diagonal is what is copied within a rank."""
        flat = [0] * self.num_ranks**2
        for run in self.runs:
            flat[run.src_rank * self.num_ranks + run.dst_rank] += run.num_elements
        return np.array(flat, dtype=np.int64).reshape(self.num_ranks, self.num_ranks)

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """Those of all ranks: for small plans. A rank needs only those of its ``runs_of``."""
        return tuple(move for run in self.runs for move in run.moves())

    def runs_of(self, rank: int) -> Iterator[Run]:
        """Those in which the rank takes part; those of a pair of ranks come in one order on both."""
        return (run for run in self.runs if rank in (run.src_rank, run.dst_rank))

    def select(self, hf_names: Sequence[str]) -> Plan:
        """The plan for these tensors alone; its ``minimum`` stays that of all."""
        runs: list[Run] = []
        for pattern, numbers in _by_pattern(hf_names).items():
            for run in self._runs_by_pattern.get(pattern, []):
                runs += run.restrict(numbers)
        return Plan(self.num_ranks, tuple(runs), self.minimum)

    @cached_property
    def _runs_by_pattern(self) -> dict[str, list[Run]]:
        found: dict[str, list[Run]] = defaultdict(list)
        for run in self.runs:
            found[run.source.hf_name].append(run)
        return found

    def volume(self, rank: int | None = None) -> Volume:
        """Elements moved: of one rank, or summed over all."""
        local = self.traffic.diagonal()
        sent, received = self.traffic.sum(1) - local, self.traffic.sum(0) - local
        if rank is None:
            return Volume(int(local.sum()), int(sent.sum()), int(received.sum()), sum(self.minimum))
        return Volume(int(local[rank]), int(sent[rank]), int(received[rank]), self.minimum[rank])

    def bytes(self, element_size: int, rank: int | None = None) -> Volume:
        """The same in bytes for elements of ``element_size`` bytes."""
        v = self.volume(rank)
        return Volume(*(element_size * n for n in (v.local, v.sent, v.received, v.minimum)))


def _by_pattern(hf_names: Sequence[str]) -> dict[str, frozenset[Number]]:
    found: dict[str, set[Number]] = defaultdict(set)
    for name in hf_names:
        series = from_slice(Slice(name, (), "", ()))
        found[series.hf_name].add((series.layers[0], series.experts[0]))
    return {pattern: frozenset(numbers) for pattern, numbers in found.items()}


def compile_plan(sources: Layout, destinations: Layout) -> Plan:
    """The plan from ``sources[rank]`` to ``destinations[rank]``; the same on every rank that compiles it.

    Raises ValueError that names tensor, box and rank where no source holds an element that a destination wants.
    """
    assert len(sources) == len(destinations), "one list of slices per rank on both sides"
    num_ranks = len(sources)
    runs: list[Run] = []
    needs: list[Need] = []
    minimum = [0] * num_ranks
    for group in group_tensors(_holders(sources), _holders(destinations)):
        local, group_needs = _plan_group(group, minimum)
        runs += local
        needs += group_needs
    for need, shares in zip(needs, assign(needs, num_ranks), strict=True):
        source = dict(need.owners)
        for owner, i, start, end in shares:
            rank, destination = need.destinations[i]
            runs.append(Run(need.numbers, need.hf_box, owner, source[owner], rank, destination, start, end))
    return Plan(num_ranks, tuple(runs), tuple(minimum))


def _holders(layout: Layout) -> Iterator[Holder]:
    for rank, pieces in enumerate(layout):
        for piece in pieces:
            yield rank, piece if isinstance(piece, Series) else from_slice(piece)


_Cell = tuple[Box, tuple[Holder, ...]]  # a box and every rank that holds all of it


def _plan_group(group: Group, minimum: list[int]) -> tuple[list[Run], list[Need]]:
    """Copies within ranks, and what must be sent; adds to each rank's minimum."""
    held: dict[Box, dict[int, Series]] = {}
    own: dict[int, list[Series]] = defaultdict(list)
    for rank, series in group.sources:
        held.setdefault(series.hf_box, {}).setdefault(rank, series)
        own[rank].append(series)
    num, runs = len(group.numbers), []
    cells: dict[Box, list[_Cell]] = {}  # replicas of an engine want equal boxes
    needs: dict[_Cell | Box, tuple[_Cell, list[Holder]]] = {}
    wanted: dict[int, list[Box]] = defaultdict(list)  # distinct elements that a rank must receive
    for rank, destination in group.destinations:
        rest = [destination.hf_box]
        for series in own.get(rank, ()):
            for box in [piece for r in rest if (piece := intersect(r, series.hf_box)) is not None]:
                end = num * (box[0][1] - box[0][0])
                runs.append(Run(group.numbers, box, rank, series, rank, destination, 0, end))
            rest = subtract_all(rest, [series.hf_box])
        for box in rest:
            if box not in cells:
                cells[box] = _find_owners(box, held)
            for cell in cells[box]:
                if not cell[1]:
                    name = hf_name_of(destination.hf_name, group.numbers[0])
                    raise ValueError(f"{name}: no rank holds {cell[0]}, which rank {rank} wants")
                needs.setdefault(cell[0], (cell, []))[1].append((rank, destination))
        fresh = subtract_all(rest, wanted[rank])
        wanted[rank] += fresh
        minimum[rank] += num * sum(map(num_elements, fresh))
    return runs, [Need(group.numbers, box, owners, tuple(ranks)) for (box, owners), ranks in needs.values()]


def _find_owners(box: Box, held: dict[Box, dict[int, Series]]) -> list[_Cell]:
    """The box cut into pieces that each have one set of owners; a piece that nobody holds has none."""
    cells: list[tuple[Box, dict[int, Series]]] = [(box, {})]
    for source_box, owners in held.items():
        if intersect(box, source_box) is None:
            continue
        refined = []
        for cell, known in cells:
            inside = intersect(cell, source_box)
            if inside is not None:
                refined.append((inside, {**owners, **known}))
            refined += [(outside, known) for outside in subtract_all([cell], [source_box])]
        cells = refined
    return [(cell, tuple(sorted(known.items(), key=lambda owner: owner[0]))) for cell, known in cells]
