"""What goes from one rank to another: runs of like tensors, and the moves into which a run is expanded when needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mega_rl.bridge.series import Number, Series, hf_name_of
from mega_rl.bridge.slices import Box, flat_range, num_elements


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


@dataclass(frozen=True)
class PieceRun:
    """One piece of many like tensors that goes from one rank to another, or stays.

    The piece's rows in all tensors of the group, one tensor below the other, are numbered; the run is of the rows from
    ``start`` to ``end``.
    """

    numbers: tuple[Number, ...]  # the numbers of the group's tensors
    hf_box: Box
    src_rank: int
    source: Series
    dst_rank: int
    destination: Series
    start: int
    end: int

    @cached_property
    def row_elements(self) -> int:
        return num_elements(self.hf_box[1:])

    @cached_property
    def piece_elements(self) -> int:
        return num_elements(self.hf_box)

    @property
    def num_elements(self) -> int:
        return (self.end - self.start) * self.row_elements

    @property
    def is_local(self) -> bool:
        return self.src_rank == self.dst_rank

    def hf_names(self) -> list[str]:
        """The tensors of which the run has a part."""
        rows = self.hf_box[0][1] - self.hf_box[0][0]
        return [hf_name_of(self.source.hf_name, n) for n in self.numbers[self.start // rows : -(-self.end // rows)]]

    def moves(self, start: int = 0, end: int | None = None) -> Iterator[Move]:
        """The moves of the run's elements number ``start`` to ``end``, or to its last, counted row by row."""
        row, size = self.row_elements, self.piece_elements
        first = self.start * row + start
        last = self.end * row if end is None else self.start * row + end
        for i in range(first // size, -(-last // size)):
            low, high = max(0, first - i * size), min(size, last - i * size)
            for boxes in self._parts(low, high):
                yield self._move(self.numbers[i], *boxes)

    @cached_property
    def _boxes(self) -> tuple[Box, Box, Box]:
        """The piece in the HF tensor, on the source and on the destination, all of the same extents."""
        return self.hf_box, self.source.place(self.hf_box), self.destination.place(self.hf_box)

    def _parts(self, low: int, high: int) -> Iterator[tuple[Box, ...]]:
        """``_boxes`` cut to elements of one tensor's piece."""
        row = self.row_elements
        if high - low == self.piece_elements:
            yield self._boxes
        elif low % row == high % row == 0:
            rows = low // row, high // row
            yield tuple([((b[0][0] + rows[0], b[0][0] + rows[1]), *b[1:]) for b in self._boxes])
        else:
            yield from zip(*[flat_range(box, low, high) for box in self._boxes], strict=True)

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
