"""Rows of sequences between layouts: who is sent what, with a stand-in for the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from mega_rl.parallel import rows
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.parallel.rows import move

WORLD, NUM = 8, 11
SHAPES = {index: (2, index + 1) for index in range(NUM)}


def held(layout: ParallelLayout) -> list[list[int]]:
    return [list(range(layout.coordinates(rank).data, NUM, layout.data)) for rank in range(WORLD)]


def row(index: int) -> Tensor:
    return torch.arange(2 * (index + 1), dtype=torch.float32).view(2, -1) + 100 * index


@pytest.mark.parametrize(
    ("sizes", "others"),
    [((2, 2, 1), (1, 1, 4)), ((1, 1, 1), (8, 1, 1)), ((8, 1, 1), (1, 1, 1)), ((2, 1, 2), (2, 2, 2))],
)
def test_every_rank_gets_what_it_wants_and_is_sent_what_it_lacks(
    sizes: tuple[int, int, int], others: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank is gone through twice: what all of them send is there when they receive."""
    source, target = (ParallelLayout.create(WORLD, t, p, context=c) for t, p, c in (sizes, others))
    have, want = held(source), held(target)
    sent: dict[tuple[int, int], Tensor] = {}

    def of_rank(rank: int, receives: bool) -> dict[int, Tensor]:
        def exchange(outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
            sent.update({(rank, other): tensor for other, tensor in outgoing.items()})
            for other, tensor in incoming.items() if receives else ():
                assert sent[other, rank].shape == tensor.shape and sent[other, rank].dtype == tensor.dtype
                tensor.copy_(sent[other, rank])

        monkeypatch.setattr(rows, "exchange", exchange)
        own: Any = {index: row(index) for index in have[rank]}
        return move(own, have, want, SHAPES, torch.float32, rank)

    for rank in range(WORLD):
        of_rank(rank, receives=False)
    for rank in range(WORLD):
        found = of_rank(rank, receives=True)
        assert set(found) == set(want[rank])
        assert all(torch.equal(tensor, row(index)) for index, tensor in found.items())
        missing = sum(2 * (index + 1) for index in set(want[rank]) - set(have[rank]))
        assert sum(tensor.numel() for (_, other), tensor in sent.items() if other == rank) == missing
