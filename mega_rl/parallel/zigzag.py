"""Which tokens of a pack a context-parallel rank computes: lengths in, positions out, by arithmetic.

A causal token costs as much as the tokens before it, so every sequence is cut into ``2 * num_ranks`` equal parts, of
which rank r takes the r-th from the front and the r-th from the back: all ranks work equally long (Llama 3,
arXiv 2407.21783, section 3.3.2). Each sequence is padded at its end for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import torch
from torch import Tensor

PADDING = -1  # stands for a position of the pack that no token of a sequence stands at


def padded_lengths(lengths: Sequence[int], num_ranks: int, multiple: int) -> list[int]:
    """The lengths rounded up to multiples of ``2 * num_ranks``, and the length of a tail if one is needed.

    The tail makes the tokens of every rank a multiple of ``multiple`` (tensor-parallel ranks with sequence
    parallelism).
    """
    parts = 2 * num_ranks
    rounded = [-(-length // parts) * parts for length in lengths]
    tail = -sum(rounded) % (num_ranks * lcm(2, multiple))
    return [*rounded, tail] if tail else rounded


def zigzag_positions(padded: Sequence[int], num_ranks: int, rank: int) -> Tensor:
    """int64: the positions in the padded pack that one rank holds, in its own order: of every sequence, two parts."""
    assert all(length % (2 * num_ranks) == 0 for length in padded), (padded, num_ranks)
    lengths = torch.tensor(padded)
    part, starts = lengths // (2 * num_ranks), lengths.cumsum(0) - lengths
    begins = torch.stack([starts + rank * part, starts + (2 * num_ranks - 1 - rank) * part], 1)
    return ranges(begins.flatten(), part.repeat_interleave(2))


def unpadded_positions(lengths: Sequence[int], padded: Sequence[int]) -> Tensor:
    """int64: for every position of the padded pack the one in the pack without padding, or ``PADDING``."""
    filled, whole = torch.tensor([*lengths, *[0] * (len(padded) - len(lengths))]), torch.tensor(padded)
    sources = torch.full((sum(padded),), PADDING)
    sources[ranges(whole.cumsum(0) - whole, filled)] = torch.arange(sum(lengths))
    return sources


@dataclass(frozen=True)
class VisibleKeys:
    """What one rank's parts of all sequences see, as sequences of one attention call: two of every sequence.

    A part's queries are the last of the positions that they see, so that causality is all that has to be asked for.
    """

    num_queries: tuple[int, ...]  # of every part, in the order in which the rank holds them
    num_keys: tuple[int, ...]
    keys: Tensor  # int64 [sum of num_keys], where each key lies in the tokens of all ranks, rank after rank


def visible_keys(padded: Sequence[int], num_ranks: int, rank: int) -> VisibleKeys:
    """The keys of both parts that a rank holds of every sequence: all positions up to the end of the part."""
    lengths = torch.tensor(padded)
    part = lengths // (2 * num_ranks)
    num_keys = torch.stack([(rank + 1) * part, (2 * num_ranks - rank) * part], 1).flatten()
    positions = ranges(torch.zeros_like(num_keys), num_keys)  # in their sequences
    starts = (lengths.cumsum(0) - lengths) // num_ranks  # in the tokens of any one rank
    start, size = (x.repeat_interleave(2).repeat_interleave(num_keys) for x in (starts, part))
    number = positions // size
    is_back = number >= num_ranks
    owner = torch.where(is_back, 2 * num_ranks - 1 - number, number)
    keys = owner * (sum(padded) // num_ranks) + start + is_back * size + positions % size
    return VisibleKeys(tuple(part.repeat_interleave(2).tolist()), tuple(num_keys.tolist()), keys)


def ranges(starts: Tensor, sizes: Tensor) -> Tensor:
    """int64: ``start, start + 1, ...`` of so many numbers, one range after the other."""
    ends = sizes.cumsum(0)
    return (starts - ends + sizes).repeat_interleave(sizes) + torch.arange(int(ends[-1]))
