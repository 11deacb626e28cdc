"""Which tokens of a pack a context-parallel rank computes: lengths in, positions out, plain integers.

A causal token costs as much as the tokens before it, so every sequence is cut into ``2 * num_ranks`` equal parts, of
which rank r takes the r-th from the front and the r-th from the back: all ranks work equally long (Llama 3,
arXiv 2407.21783, section 3.3.2). Each sequence is padded at its end for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

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


def zigzag_positions(padded: Sequence[int], num_ranks: int, rank: int) -> list[int]:
    """The positions in the padded pack that one rank holds, in its own order: of every sequence, two parts."""
    positions: list[int] = []
    start = 0
    for length in padded:
        part, rest = divmod(length, 2 * num_ranks)
        assert rest == 0, (padded, num_ranks)
        for index in (rank, 2 * num_ranks - 1 - rank):
            positions.extend(range(start + index * part, start + (index + 1) * part))
        start += length
    return positions


def unpadded_positions(lengths: Sequence[int], padded: Sequence[int]) -> list[int]:
    """For every position of the padded pack the one in the pack without padding, or ``PADDING``."""
    sources: list[int] = []
    start = 0
    for index, length in enumerate(padded):
        filled = lengths[index] if index < len(lengths) else 0
        sources.extend(range(start, start + filled))
        sources.extend([PADDING] * (length - filled))
        start += filled
    return sources
