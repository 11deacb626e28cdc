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

from mega_rl.bridge.reshard.alike import Holder, TensorGroup, group_tensors
from mega_rl.bridge.reshard.assign import Need, Shares, assign
from mega_rl.bridge.reshard.runs import Move, PieceRun
from mega_rl.bridge.series import Number, Series, from_slice, hf_name_of
from mega_rl.bridge.slices import Box, Slice, intersect, num_elements, subtract_all

Layout = Sequence[Sequence[Slice | Series]]  # what each rank holds or wants


class Flow(NamedTuple):
    """A piece of like tensors with the rows of it that go from an owner to a destination."""

    piece: Need
    shares: Shares

    def restrict(self, place: int) -> Flow | None:
        """The part that belongs to one of the tensors, the one at this place in ``numbers``."""
        piece = self.piece
        rows = piece.hf_box[0][1] - piece.hf_box[0][0]
        shares = self.shares.copy()
        shares[:, 2:] = (shares[:, 2:] - place * rows).clip(0, rows)
        shares = shares[shares[:, 2] < shares[:, 3]]
        return Flow(piece._replace(numbers=(piece.numbers[place],)), shares) if len(shares) else None


@dataclass(frozen=True)
class Volume:
    """Elements that a plan moves, for one rank or over all of them."""

    local: int  # copied within a rank
    sent: int
    received: int
    minimum: int  # distinct elements that a rank needs and does not hold: no plan can receive fewer


@dataclass(frozen=True, eq=False)
class ReshardPlan:
    """Every destination element written exactly once, from the rank itself if it holds it, else from one owner."""

    num_ranks: int
    flows: tuple[Flow, ...]
    minimum: tuple[int, ...]  # [num_ranks] elements, see Volume

    @cached_property
    def traffic(self) -> np.ndarray:
        """Elements from rank to rank, [num_ranks, num_ranks] int64; the diagonal is what is copied within a rank."""
        table = np.zeros((self.num_ranks, self.num_ranks), dtype=np.int64)
        row_elements = np.array([flow.piece.row_elements for flow in self.flows], dtype=np.int64)
        flow, share = self._flow_of_share, self._shares
        np.add.at(table, tuple(self._ends.T), (share[:, 3] - share[:, 2]) * row_elements[flow])
        return table

    @cached_property
    def _shares(self) -> np.ndarray:
        """The shares of all flows, one below the other."""
        return np.concatenate([np.empty((0, 4), dtype=np.int64), *[flow.shares for flow in self.flows]])

    @cached_property
    def _flow_of_share(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.flows)), [len(flow.shares) for flow in self.flows])

    @cached_property
    def _ends(self) -> np.ndarray:
        """[num_shares, 2]: the ranks from which and to which each of ``_shares`` goes."""
        ends = [np.empty((0, 2), dtype=np.int64)]
        for (_, _, owners, destinations), shares in self.flows:
            ranks = [np.array([rank for rank, _ in holders]) for holders in (owners, destinations)]
            ends.append(np.stack([ranks[i][shares[:, i]] for i in range(2)], axis=1))
        return np.concatenate(ends)

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """The moves of all ranks, for small plans. A rank needs only the moves of its ``runs_of``."""
        everything = np.arange(len(self._shares))
        return tuple(move for run in self._runs(everything) for move in run.moves())

    def runs_of(self, rank: int) -> Iterator[PieceRun]:
        """The runs in which the rank takes part; the runs of a pair of ranks come in the same order on both."""
        return self._runs(np.flatnonzero((self._ends == rank).any(axis=1)))

    def _runs(self, which: np.ndarray) -> Iterator[PieceRun]:
        for flow, share in zip(self._flow_of_share[which].tolist(), self._shares[which].tolist(), strict=True):
            owner, destination, start, end = share
            numbers, box, owners, destinations = self.flows[flow].piece
            (src, source), (dst, user) = owners[owner], destinations[destination]
            yield PieceRun(numbers, box, src, source, dst, user, start, end)

    def select(self, hf_names: Sequence[str]) -> ReshardPlan:
        """The plan for only these tensors, each in flows of its own; its ``minimum`` stays that of all."""
        found = (flow.restrict(place) for name in hf_names for flow, place in self._flows_by_tensor[_tensor(name)])
        return ReshardPlan(self.num_ranks, tuple(flow for flow in found if flow), self.minimum)

    @cached_property
    def _flows_by_tensor(self) -> dict[tuple[str, Number], list[tuple[Flow, int]]]:
        """The flows of every tensor, with its place in them."""
        found: dict[tuple[str, Number], list[tuple[Flow, int]]] = defaultdict(list)
        for flow in self.flows:
            name = flow.piece.owners[0][1].hf_name
            for place, number in enumerate(flow.piece.numbers):
                found[name, number].append((flow, place))
        return found

    def wanted_box(self, hf_name: str) -> Box:
        """The box that a destination wants of the tensor."""
        flows = self._flows_by_tensor[_tensor(hf_name)]
        assert flows, f"{hf_name} is in no destination of the plan"
        return flows[0][0].piece.destinations[0][1].hf_box

    def volume(self, rank: int | None = None) -> Volume:
        """Elements moved: of one rank, or summed over all."""
        local = self.traffic.diagonal()
        sent, received = self.traffic.sum(1) - local, self.traffic.sum(0) - local
        if rank is None:
            return Volume(int(local.sum()), int(sent.sum()), int(received.sum()), sum(self.minimum))
        return Volume(int(local[rank]), int(sent[rank]), int(received[rank]), self.minimum[rank])


def _tensor(hf_name: str) -> tuple[str, Number]:
    """Pattern and number of one tensor."""
    series = from_slice(Slice(hf_name, (), "", ()))
    return series.hf_name, (series.layers[0], series.experts[0])


def compile_plan(sources: Layout, destinations: Layout) -> ReshardPlan:
    """The plan from ``sources[rank]`` to ``destinations[rank]``; the same on every rank that compiles it.

    Raises ValueError that names tensor, box and rank if no source holds an element that a destination wants.
    """
    assert len(sources) == len(destinations), "one list of slices per rank on both sides"
    num_ranks = len(sources)
    flows: list[Flow] = []
    needs: list[Need] = []
    minimum = [0] * num_ranks
    for group in group_tensors(_holders(sources), _holders(destinations)):
        copies, group_needs = _plan_group(group, minimum)
        flows += copies
        needs += group_needs
    flows += map(Flow, needs, assign(needs, num_ranks))
    return ReshardPlan(num_ranks, tuple(flows), tuple(minimum))


def _holders(layout: Layout) -> Iterator[Holder]:
    for rank, pieces in enumerate(layout):
        for piece in pieces:
            yield rank, piece if isinstance(piece, Series) else from_slice(piece)


class _Likes(NamedTuple):
    """Ranks that hold equal boxes of a group's tensors and want equal ones; for every box, all of them in one order."""

    own: list[list[Holder]]
    wanted: list[list[Holder]]


def _like_ranks(group: TensorGroup) -> Iterator[_Likes]:
    own: dict[int, list[Series]] = defaultdict(list)
    wanted: dict[int, list[Series]] = defaultdict(list)
    for found, holders in ((own, group.sources), (wanted, group.destinations)):
        for rank, series in holders:
            found[rank].append(series)
    alike: dict[tuple[tuple[Box, ...], ...], list[int]] = defaultdict(list)
    for rank, users in wanted.items():
        alike[tuple([s.hf_box for s in own.get(rank, ())]), tuple([s.hf_box for s in users])].append(rank)
    for (own_boxes, wanted_boxes), ranks in alike.items():
        yield _Likes(
            [[(rank, own[rank][i]) for rank in ranks] for i in range(len(own_boxes))],
            [[(rank, wanted[rank][i]) for rank in ranks] for i in range(len(wanted_boxes))],
        )


_Cell = tuple[Box, tuple[Holder, ...]]  # a box and every rank that holds all of it


def _plan_group(group: TensorGroup, minimum: list[int]) -> tuple[list[Flow], list[Need]]:
    """Copies within ranks, and what must be sent; adds to each rank's minimum."""
    held: dict[Box, dict[int, Series]] = {}
    for rank, series in group.sources:
        held.setdefault(series.hf_box, {}).setdefault(rank, series)
    copies: list[Flow] = []
    cells: dict[Box, list[_Cell]] = {}
    needs: dict[_Cell, list[Holder]] = defaultdict(list)
    for likes in _like_ranks(group):
        received: list[Box] = []  # distinct elements that each of the ranks must be sent
        for users in likes.wanted:
            rank, series = users[0]
            rest = [series.hf_box]
            for owners in likes.own:
                box = owners[0][1].hf_box
                kept = [piece for r in rest if (piece := intersect(r, box)) is not None]
                copies += [_copies(Need(group.numbers, piece, tuple(owners), tuple(users))) for piece in kept]
                rest = subtract_all(rest, [box])
            for box in rest:
                if box not in cells:
                    cells[box] = _find_owners(box, held)
                for cell in cells[box]:
                    if not cell[1]:
                        name = hf_name_of(series.hf_name, group.numbers[0])
                        raise ValueError(f"{name}: no rank holds {cell[0]}, which rank {rank} wants")
                    needs[cell] += users
            received += subtract_all(rest, received)
        elements = len(group.numbers) * sum(map(num_elements, received))
        for rank, _ in likes.wanted[0]:
            minimum[rank] += elements
    # By rank: neighbours have the same owners to hear from.
    return copies, [
        Need(group.numbers, box, owners, tuple(sorted(users, key=lambda user: user[0])))
        for (box, owners), users in needs.items()
    ]


def _copies(piece: Need) -> Flow:
    """Every owner's rows stay with it; it is the destination at the same place."""
    shares = np.zeros((len(piece.owners), 4), dtype=np.int64)
    shares[:, :2] = np.arange(len(piece.owners))[:, None]
    shares[:, 3] = piece.num_rows
    return Flow(piece, shares)


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
