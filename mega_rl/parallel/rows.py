"""Rows of numbers of whole sequences, from the ranks of one layout to those of another.

Letters: n numbers of a token, L tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from mega_rl.parallel.sending import exchange


def move(
    rows: Mapping[int, Tensor],
    held: Sequence[Collection[int]],
    wanted: Sequence[Collection[int]],
    shapes: Mapping[int, tuple[int, int]],
    dtype: torch.dtype,
    rank: int,
) -> dict[int, Tensor]:
    """The rows [n, L] of the sequences that this rank wants, by sequence. Collective.

    A rank that holds what it wants is sent nothing, and every other rank is sent a sequence once.

    Args:
        rows: of the sequences that this rank holds, in host memory.
        held, wanted: by rank: which sequences it has, and which it needs; the same on all ranks.
        shapes: (n, L) of every sequence.
        dtype: of all rows.
    """
    holders: dict[int, list[int]] = {}
    for other, sequences in enumerate(held):
        for sequence in sequences:
            holders.setdefault(sequence, []).append(other)

    def sent(source: int, receiver: int) -> list[int]:
        missing = sorted(set(wanted[receiver]) - set(held[receiver]))
        return [one for one in missing if holders[one][receiver % len(holders[one])] == source]

    others = [other for other in range(len(held)) if other != rank]
    outgoing = {other: sent(rank, other) for other in others}
    incoming = {other: sent(other, rank) for other in others}
    arrived = {
        other: torch.empty(sum(_size(shapes[one]) for one in sequences), dtype=dtype)
        for other, sequences in incoming.items()
        if sequences
    }
    exchange(
        {
            other: torch.cat([rows[one].flatten() for one in sequences])
            for other, sequences in outgoing.items()
            if sequences
        },
        arrived,
    )
    found = {one: rows[one] for one in wanted[rank] if one in rows}
    for other, tensor in arrived.items():
        parts = tensor.split([_size(shapes[one]) for one in incoming[other]])
        found |= {one: part.view(shapes[one]) for one, part in zip(incoming[other], parts, strict=True)}
    return found


def _size(shape: tuple[int, int]) -> int:
    return shape[0] * shape[1]
