"""Packed attention of a layer against each sequence by itself.

Letters: T packed tokens, L one sequence's, H query heads, K key/value heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mega_rl.megatron.layers import attention as module
from mega_rl.megatron.layers.attention import PackedAttention, PackedSequences, packed_sequences
from mega_rl.parallel.zigzag import zigzag_positions

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


@dataclass(frozen=True)
class Group:
    """A context-parallel group as one of its ranks sees it."""

    num_ranks: int = 1
    own: int = 0

    def size(self) -> int:
        return self.num_ranks

    def rank(self) -> int:
        return self.own


def packing_of(lengths: list[int], group: Group = Group()) -> PackedSequences:  # noqa: B008 - it cannot be changed
    return packed_sequences(lengths, group, torch.device("cpu"))


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


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("lengths", [[8], [16, 8, 48, 8, 24], [8] * 5], ids=str)
def test_ranks_that_share_sequences_equal_each_sequence_alone(
    lengths: list[int], num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank in turn, with the keys and values that the ranks would have collected."""
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(sum(lengths), n, D, generator=generator) for n in (4, 2, 2)]
    upstream = torch.randn(sum(lengths), 4 * D, generator=generator)
    own_inputs = [x.clone().requires_grad_() for x in qkv]
    shares = [zigzag_positions(lengths, num_ranks, rank) for rank in range(num_ranks)]
    monkeypatch.setattr(module, "gather_from_sequence_parallel_region", lambda x, **_: x)  # they are given whole
    gathered = torch.cat(shares)
    for rank, share in enumerate(shares):
        packing = packing_of(lengths, Group(num_ranks, rank))
        query, key, value = own_inputs[0][share], own_inputs[1][gathered], own_inputs[2][gathered]
        own = attention(4, 2)(query, key, value, packed_seq_params=packing)
        exact = torch.cat([plain(*(x[a:b] for x in qkv), scale=D**-0.5) for a, b in pairwise(borders(lengths))])
        torch.testing.assert_close(own, exact[share], atol=2e-6, rtol=1e-5)
        own.backward(upstream[share])
    exact_inputs = [x.double().requires_grad_() for x in qkv]
    parts = [plain(*(x[a:b] for x in exact_inputs), scale=D**-0.5) for a, b in pairwise(borders(lengths))]
    torch.cat(parts).backward(upstream.double())
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
