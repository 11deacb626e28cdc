"""Packed attention against each sequence by itself, and the batching of sequences by length.

Letters: T packed tokens, L one sequence's, H query heads, K key/value heads, D head width.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mega_rl.megatron.attention import MAX_PADDING, PackedAttention, PackedSequences, length_groups, packed_sequences

D = 8
RAGGED = [7, 19, 1, 30, 41, 3, 12, 1, 12, 5, 50, 9]
PACKS = {
    "ragged": RAGGED,
    "equal": [6] * 5,
    "one_sequence": [33],
    "one_token": [1],
    "thousand_one_token_sequences": [1] * 1000,
    "long_after_short": [1, 1, 1, 64],
    "long_enough_for_calls_of_their_own": [70, 130, 64],
}


def borders(lengths: list[int]) -> list[int]:
    return [0, *accumulate(lengths)]


class OneRank:
    """A context-parallel group of one."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def packing_of(lengths: list[int]) -> PackedSequences:
    return packed_sequences(lengths, OneRank(), torch.device("cpu"))


def attention(num_heads: int, num_kv_heads: int, softmax_scale: float | None = None) -> PackedAttention:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=num_heads * D,
        num_attention_heads=num_heads,
        num_query_groups=num_kv_heads,
        kv_channels=D,
        attention_dropout=0.0,
    )
    return PackedAttention(config, 1, AttnMaskType.causal, "self", softmax_scale=softmax_scale)


def plain(query_LHD: Tensor, key_LKD: Tensor, value_LKD: Tensor, scale: float) -> Tensor:
    """Causal softmax attention of one sequence, written out: [L, H * D]."""
    repeats = query_LHD.shape[1] // key_LKD.shape[1]
    key_LHD, value_LHD = (x.repeat_interleave(repeats, dim=1) for x in (key_LKD, value_LKD))
    scores = torch.einsum("qhd,khd->hqk", query_LHD, key_LHD) * scale
    is_future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(is_future, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value_LHD).flatten(1)


@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_equals_each_sequence_alone(lengths: list[int], num_heads: int, num_kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(sum(lengths), n, D, generator=generator) for n in (num_heads, num_kv_heads, num_kv_heads)]
    upstream = torch.randn(sum(lengths), num_heads * D, generator=generator)
    own_inputs = [x.clone().requires_grad_() for x in qkv]
    packing = packing_of(lengths)
    own = attention(num_heads, num_kv_heads)(*own_inputs, packed_seq_params=packing)
    own.backward(upstream)
    exact_inputs = [x.double().requires_grad_() for x in qkv]
    parts = [plain(*(x[a:b] for x in exact_inputs), scale=D**-0.5) for a, b in pairwise(borders(lengths))]
    exact = torch.cat(parts)
    exact.backward(upstream.double())
    torch.testing.assert_close(own.double(), exact, atol=2e-6, rtol=1e-5)
    for a, b in zip(own_inputs, exact_inputs, strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(a.grad.double(), b.grad, atol=5e-6, rtol=1e-5)


def test_softmax_scale() -> None:
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(12, 2, D, generator=generator) for _ in range(3)]
    own = attention(2, 2, softmax_scale=0.9)(*qkv, packed_seq_params=packing_of([5, 7]))
    torch.testing.assert_close(own, torch.cat([plain(*(x[a:b] for x in qkv), scale=0.9) for a, b in ((0, 5), (5, 12))]))


def test_dropout_and_other_masks_are_refused() -> None:
    config = attention(2, 2).config
    with pytest.raises(AssertionError):
        PackedAttention(config, 1, AttnMaskType.no_mask, "self")
    with pytest.raises(AssertionError):
        PackedAttention(config, 1, AttnMaskType.causal, "self", attention_dropout=0.1)


lengths_strategy = st.one_of(
    st.lists(st.integers(1, 300), min_size=1, max_size=60),
    st.lists(st.integers(1, 6), min_size=1, max_size=200),
)


@settings(max_examples=150, deadline=None)
@given(lengths_strategy)
def test_groups_cover_every_position_once_with_little_padding(lengths: list[int]) -> None:
    groups = length_groups(lengths)
    covered = torch.cat([group.query_indices_BQ[group.valid_BQ] for group in groups])
    assert covered.sort().values.tolist() == list(range(sum(lengths)))
    rows = [row[valid] for g in groups for row, valid in zip(g.query_indices_BQ, g.valid_BQ, strict=True)]
    spans = sorted((int(row[0]), int(row[-1]) + 1) for row in rows)
    assert spans == list(pairwise(borders(lengths))), "a row is one whole sequence"
    assert all(torch.equal(row, torch.arange(int(row[0]), int(row[-1]) + 1)) for row in rows)
    for group in groups:
        assert group.is_padded == (not group.valid_BQ.all())
        assert float((~group.valid_BQ).float().mean()) <= MAX_PADDING + 1e-6
        # a padded position repeats a token of its own sequence and stands behind every valid one
        assert (group.valid_BQ.int().diff(dim=1) <= 0).all()
        starts = group.query_indices_BQ[:, :1]
        assert ((group.query_indices_BQ - starts) < group.valid_BQ.sum(1, keepdim=True)).all()


@pytest.mark.parametrize(
    ("lengths", "num_groups"), [([1] * 1000, 1), ([17] * 8, 1), ([90, 100, 95, 88], 1), ([1, 100], 2)]
)
def test_similar_lengths_share_a_call(lengths: list[int], num_groups: int) -> None:
    assert len(length_groups(lengths)) == num_groups


@settings(max_examples=50, deadline=None)
@given(lengths_strategy)
def test_inverse_restores_the_order_of_the_pack(lengths: list[int]) -> None:
    packing = packing_of(lengths)
    if packing.separate_lengths:
        assert packing.separate_lengths == tuple(lengths) and not packing.groups and packing.inverse_T is None
        return
    positions = torch.cat([group.query_indices_BQ[group.valid_BQ] for group in packing.groups])
    assert packing.inverse_T is not None
    assert torch.equal(positions[packing.inverse_T], torch.arange(sum(lengths)))
