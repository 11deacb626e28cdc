"""Who sends what to whom, compiled once from the two layouts; integers only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from mega_rl.bridge.slices import (
    Box,
    Slice,
    carry_over,
    intersect,
    num_elements,
    split_box,
    subtract_all,
)

SPLITS_PER_RANK = 16  # a replicated piece above total / (ranks x this) is cut and shared out among its owners


@dataclass(frozen=True, slots=True)
class Move:
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

    def part(self, hf_box: Box) -> Move:
        """The same move for a part of its box."""
        return Move(
            self.src_rank,
            self.dst_rank,
            self.hf_name,
            hf_box,
            self.src_name,
            carry_over(hf_box, self.hf_box, self.src_box),
            self.dst_name,
            carry_over(hf_box, self.hf_box, self.dst_box),
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
    moves: tuple[Move, ...]
    minimum: tuple[int, ...]  # [num_ranks] elements, see Volume

    def volume(self, rank: int | None = None) -> Volume:
        """Elements moved: of one rank, or summed over all."""
        local = sent = received = 0
        for m in self.moves:
            if m.is_local:
                local += m.num_elements if rank in (None, m.src_rank) else 0
            else:
                sent += m.num_elements if rank in (None, m.src_rank) else 0
                received += m.num_elements if rank in (None, m.dst_rank) else 0
        return Volume(local, sent, received, sum(self.minimum) if rank is None else self.minimum[rank])

    def bytes(self, element_size: int, rank: int | None = None) -> Volume:
        """The same in bytes for elements of ``element_size`` bytes."""
        v = self.volume(rank)
        return Volume(*(element_size * n for n in (v.local, v.sent, v.received, v.minimum)))


_Owners = tuple[tuple[int, Slice], ...]  # every rank that holds a piece, with its slice around it
_Cell = tuple[Box, _Owners]


@dataclass(frozen=True)
class _Need:
    """A piece that a rank must be sent, with all who could."""

    dst_rank: int
    destination: Slice
    hf_box: Box
    owners: _Owners


def compile_plan(sources: Sequence[Sequence[Slice]], destinations: Sequence[Sequence[Slice]]) -> Plan:
    """The plan from ``sources[rank]`` to ``destinations[rank]``; the same on every rank that compiles it.

    Raises ValueError that names tensor, box and rank where no source holds an element that a destination wants.
    """
    assert len(sources) == len(destinations), "one list of slices per rank on both sides"
    held = _index(sources)
    moves: list[Move] = []
    needs: list[_Need] = []
    found: dict[tuple[str, Box], list[_Cell]] = {}  # replicas of an engine want equal boxes
    minimum = []
    for rank, wanted in enumerate(destinations):
        missing: dict[str, list[Box]] = defaultdict(list)  # distinct elements of each tensor to receive
        for destination in wanted:
            local, rest = _take_local(rank, destination, held)
            moves += local
            for box in rest:
                key = destination.hf_name, box
                if key not in found:
                    found[key] = _find_owners(*key, held)
                needs += [_Need(rank, destination, cell, owners) for cell, owners in found[key]]
            missing[destination.hf_name] += subtract_all(rest, missing[destination.hf_name])
        minimum.append(sum(num_elements(box) for boxes in missing.values() for box in boxes))
    for need in needs:
        if not need.owners:
            raise ValueError(
                f"{need.destination.hf_name}: no rank holds {need.hf_box}, which rank {need.dst_rank} wants"
            )
    moves += _assign(needs, len(sources))
    return Plan(len(sources), tuple(_in_destination_order(moves, destinations)), tuple(minimum))


_Held = dict[str, dict[Box, dict[int, Slice]]]  # tensor -> distinct box -> owning rank -> its slice


def _index(sources: Sequence[Sequence[Slice]]) -> _Held:
    held: _Held = defaultdict(lambda: defaultdict(dict))
    for rank, slices in enumerate(sources):
        for piece in slices:
            held[piece.hf_name][piece.hf_box].setdefault(rank, piece)
    return held


def _move(src_rank: int, source: Slice, dst_rank: int, destination: Slice, box: Box) -> Move:
    return Move(
        src_rank,
        dst_rank,
        destination.hf_name,
        box,
        source.local_name,
        carry_over(box, source.hf_box, source.local_box),
        destination.local_name,
        carry_over(box, destination.hf_box, destination.local_box),
    )


def _take_local(rank: int, destination: Slice, held: _Held) -> tuple[list[Move], list[Box]]:
    """Copies of what the rank already holds, and the boxes that it does not."""
    moves, rest = [], [destination.hf_box]
    for box, owners in held.get(destination.hf_name, {}).items():
        if rank in owners:
            found = [piece for r in rest if (piece := intersect(r, box)) is not None]
            moves += [_move(rank, owners[rank], rank, destination, piece) for piece in found]
            rest = subtract_all(rest, [box]) if found else rest
    return moves, rest


def _find_owners(hf_name: str, box: Box, held: _Held) -> list[_Cell]:
    """The box cut into pieces that each have one set of owners; a piece that nobody holds has none."""
    cells: list[tuple[Box, dict[int, Slice]]] = [(box, {})]
    for source_box, owners in held.get(hf_name, {}).items():
        if intersect(box, source_box) is None:
            continue
        refined = []
        for cell, known in cells:
            inside = intersect(cell, source_box)
            if inside is not None:
                refined.append((inside, {**owners, **known}))
            refined += [(outside, known) for outside in subtract_all([cell], [source_box])]
        cells = refined
    return [(cell, tuple(sorted(known.items(), key=_by_rank))) for cell, known in cells]


def _by_rank(item: tuple[int, Slice]) -> int:
    return item[0]


def _assign(needs: list[_Need], num_ranks: int) -> list[Move]:
    """One owner for every piece: pieces with the fewest owners first, then the largest, each to the least loaded.

    A large piece with several owners is cut by rows first, so that the owners share it.
    """
    limit = max(1, sum(num_elements(n.hf_box) for n in needs) // (num_ranks * SPLITS_PER_RANK))
    pieces = []
    for need in needs:
        size = num_elements(need.hf_box)
        share = max(limit, num_elements(need.hf_box[1:])) if len(need.owners) > 1 else size
        pieces += [(need, box) for box in split_box(need.hf_box, share)]
    pieces.sort(key=lambda piece: (len(piece[0].owners), -num_elements(piece[1])))  # stable, so deterministic
    load = [0] * num_ranks
    moves = []
    for need, box in pieces:
        rank, source = min(need.owners, key=lambda owner: (load[owner[0]], owner[0]))
        load[rank] += num_elements(box)
        moves.append(_move(rank, source, need.dst_rank, need.destination, box))
    return moves


def _in_destination_order(moves: list[Move], destinations: Sequence[Sequence[Slice]]) -> list[Move]:
    """Tensor by tensor in the order in which destinations list them, so that a stream can follow the plan."""
    order: dict[str, int] = {}
    for wanted in destinations:
        for piece in wanted:
            order.setdefault(piece.hf_name, len(order))
    return sorted(moves, key=lambda m: (order[m.hf_name], m.dst_rank, m.src_rank, m.dst_name, m.hf_box))
