"""The trainer's pieces of tensors, numbered alike on all ranks, though no rank learns what another one holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

import numpy
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from mega_rl.bridge.slices import Box, Slice, num_elements
from mega_rl.observe.heartbeat import HEART

Numbers = NDArray[numpy.int64]
LARGEST = numpy.iinfo(numpy.int64).max  # what a rank gives to a minimum that it has nothing for


class HeldPieces:
    """A piece is a box of a tensor. What several ranks hold is one piece, and belongs to the first of them.

    Attributes:
        num_pieces: of all ranks.
        numbers: of this rank's slices, each in [0, num_pieces); the pieces of a tensor have consecutive numbers.
        is_own: which slices are this rank's to count: those of all ranks are every piece once.
        tensors: [num_pieces], the tensor of each piece.
        elements: [number of tensors], how many elements the pieces of each tensor have together.
    """

    def __init__(self, index: Mapping[str, int], slices: Sequence[Slice]) -> None:
        """Collective.

        Args:
            index: the number of each tensor; the same on every rank.
            slices: that this rank holds, of these tensors.
        """
        self._rank = own_rank()
        tensors = _array(index[piece.hf_name] for piece in slices)
        within, counts = _numbered_boxes(tensors, _array(_key(piece.hf_box) for piece in slices), len(index))
        first = numpy.cumsum(counts) - counts
        self.numbers = first[tensors] + within
        self.tensors = numpy.repeat(numpy.arange(len(index)), counts)
        self.num_pieces = len(self.tensors)
        self._owners = lowest(self.numbers, numpy.full(len(slices), self._rank), self.num_pieces)
        self.is_own = numpy.zeros(len(slices), dtype=bool)
        self.is_own[numpy.unique(self.numbers, return_index=True)[1]] = True
        self.is_own &= self._owners[self.numbers] == self._rank
        sizes = _array(num_elements(piece.hf_box) for piece in slices)
        self.elements = total(tensors[self.is_own], sizes[self.is_own], len(index))

    def unequal(self, hashes: Numbers, is_asked: NDArray[numpy.bool_]) -> tuple[int, int, int] | None:
        """The first piece of which two ranks hold different copies: its tensor and the ranks; None: all agree.

        Collective.

        Args:
            hashes: of this rank's slices.
            is_asked: by tensor; of the others there are no hashes.
        """
        asked = is_asked[self.tensors[self.numbers]]
        numbers, hashes = self.numbers[asked], hashes[asked]
        # The largest is the complement of the smallest complement: one exchange finds both.
        both = numpy.concatenate([numbers, numbers + self.num_pieces]), numpy.concatenate([hashes, ~hashes])
        smallest, others = numpy.split(lowest(*both, 2 * self.num_pieces), 2)
        differing = numpy.flatnonzero((smallest != ~others) & is_asked[self.tensors])
        if not len(differing):
            return None
        piece = int(differing[0])
        first, mine = int(self._owners[piece]), hashes[numbers == piece]
        given = mine[:1] if first == self._rank else mine[:0]
        expected = total(numpy.zeros(len(given), dtype=numpy.int64), given, 1)[0]
        wrong = mine[mine != expected]
        second = lowest(numpy.zeros(len(wrong), dtype=numpy.int64), numpy.full(len(wrong), self._rank), 1)[0]
        return int(self.tensors[piece]), first, int(second)


def lowest(places: Numbers, values: Numbers, size: int) -> Numbers:
    """[size]: the smallest value that a rank has for each place, ``LARGEST`` where none has one. Collective."""
    found = numpy.full(size, LARGEST, dtype=numpy.int64)
    numpy.minimum.at(found, places, values)
    return reduced(found, dist.ReduceOp.MIN)


def total(places: Numbers, values: Numbers, size: int) -> Numbers:
    """[size]: the sum of all ranks' values for each place, modulo 2^64. Collective."""
    found = numpy.zeros(size, dtype=numpy.int64)
    numpy.add.at(found, places, values)
    return reduced(found, dist.ReduceOp.SUM)


def own_rank() -> int:
    """Of this process in the default group; 0 if there is none."""
    return dist.get_rank() if dist.is_initialized() else 0


def reduced(values: Numbers, op: dist.ReduceOp.RedOpType) -> Numbers:
    """A vector of all ranks from that of each, in the host's memory; a single process needs no group."""
    if dist.is_initialized():
        with HEART.waiting("the other ranks"):
            dist.all_reduce(torch.from_numpy(values), op)
    return values


def _numbered_boxes(tensors: Numbers, keys: Numbers, num_tensors: int) -> tuple[Numbers, Numbers]:
    """The number of each slice's box among the distinct boxes of its tensor, and how many each tensor has.

    In every round the smallest key of each tensor that has no number yet takes the next one: as many exchanges of one
    number per tensor as the most divided tensor has pieces, and one more.
    """
    numbers, counts = numpy.zeros_like(tensors), numpy.zeros(num_tensors, dtype=numpy.int64)
    left = numpy.ones(len(tensors), dtype=bool)
    while True:
        taken = lowest(tensors[left], keys[left], num_tensors)
        if (taken == LARGEST).all():
            return numbers, counts
        found = left & (keys == taken[tensors])
        numbers[found] = counts[tensors[found]]
        counts += taken != LARGEST
        left &= ~found


def _key(box: Box) -> int:
    """The same for equal boxes in every process; for different ones of a tensor it differs, but for odds of 2^-50."""
    return int.from_bytes(blake2b(repr(box).encode(), digest_size=8).digest()) >> 2


def _array(values: Iterable[int]) -> Numbers:
    return numpy.array(list(values), dtype=numpy.int64)
