"""Which part of a batch a rank gets, and whose sums count."""

from __future__ import annotations

import torch

from mega_rl.microbatch import Figures, Sequence
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.stages.run.batch_share import BatchShare, pack_for_rank, totals_of

LAYOUT = ParallelLayout.create(8, 2, 2)  # tensor 2, pipeline 2, data 2


def share(rank: int) -> BatchShare:
    return BatchShare(LAYOUT, rank, max_tokens=16, pad_multiple=4, pad_token_id=9)


def test_data_parallel_ranks_share_the_sequences_and_the_others_hold_the_same() -> None:
    sequences = [Sequence(torch.arange(n + 1), torch.ones(n)) for n in (3, 9, 5, 14, 2, 7)]
    seen: dict[int, list[tuple[int, ...]]] = {}
    for rank in range(8):
        microbatches = pack_for_rank(share(rank), sequences)
        assert all(m.num_tokens % 4 == 0 and m.num_tokens <= 16 for m in microbatches)
        indices = [m.sequence_indices for m in microbatches]
        assert seen.setdefault(LAYOUT.coordinates(rank).data, indices) == indices
    assert sorted(i for parts in seen.values() for part in parts for i in part) == list(range(6))
    assert len({len(parts) for parts in seen.values()}) == 1
    padded = [
        m
        for m in pack_for_rank(share(0), sequences)
        if m.num_tokens > sum(len(sequences[i].loss_mask) for i in m.sequence_indices)
    ]
    assert padded and all(int(m.token_ids[-1]) == 9 for m in padded)


def test_the_sequences_of_a_unit_share_a_microbatch_in_their_order() -> None:
    sequences = [Sequence(torch.arange(n + 1), torch.ones(n)) for n in (3, 9, 5, 4, 2, 7, 1, 1)]
    found = [m.sequence_indices for rank in (0, 2) for m in pack_for_rank(share(rank), sequences, unit=2)]
    assert sorted(i for indices in found for i in indices) == list(range(8))
    assert all(b == a + 1 and a % 2 == 0 for i in found for a, b in zip(i[::2], i[1::2], strict=True))
    assert all(m.num_tokens <= 16 for rank in (0, 2) for m in pack_for_rank(share(rank), sequences, unit=2))


def test_one_rank_of_each_replica_and_stage_is_counted() -> None:
    counted = [rank for rank in range(8) if share(rank).is_counted]
    assert sorted((LAYOUT.coordinates(r).data, LAYOUT.coordinates(r).pipeline) for r in counted) == [
        (data, stage) for data in range(2) for stage in range(2)
    ]
    assert [share(rank).is_last_stage for rank in range(8)] == [LAYOUT.coordinates(r).pipeline == 1 for r in range(8)]


def test_figures_of_ranks_that_are_not_counted_are_left_out() -> None:
    reports = [
        Figures({"loss": torch.tensor(loss)}, {"ratio": torch.tensor(r)}) for loss, r in ((2.0, 5.0), (1.0, 3.0))
    ]
    found = totals_of(share(0), reports)
    assert (found.sums, found.maxima) == ({"loss": 3.0}, {"ratio": 5.0})
    found = totals_of(share(1), reports)
    assert (found.sums, found.maxima) == ({}, {})
