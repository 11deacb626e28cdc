"""Packed causal attention for Megatron's layer spec, and the record that carries the packing to it.

Letters: T packed tokens of this rank, B sequences, Q queries and S keys of a sequence, padded within a batch of similar
lengths, H query heads, K key/value heads, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

MAX_PADDING = 0.15  # share of padded positions above which sequences of unequal length are not batched together
MIN_SEPARATE_LENGTH = 64  # mean length, tokens, from which a call per sequence costs less than gathering and padding


@dataclass(frozen=True)
class LengthGroup:
    """Sequences of similar length that one attention call takes together."""

    query_indices_BQ: Tensor  # int64, where each query lies in this rank's tokens; padding repeats the last one
    valid_BQ: Tensor  # bool, False on padding
    is_padded: bool
    # With context parallelism, else None: where each key lies in the tokens of all ranks, rank after rank, and which
    # keys a query sees. Without it the keys are the queries' and the mask is causal.
    key_indices_BS: Tensor | None = None
    is_visible_QS: Tensor | None = None


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's packing record with the batches that attention runs on; ``cp_group`` holds the context-parallel ranks.

    ``cu_seqlens_q`` describes the whole pack as one sequence, because the rotary table is gathered per token beforehand
    (see ``PolicyModel``): Megatron then applies it in one operation instead of one per sequence.
    """

    separate_lengths: tuple[int, ...] = ()  # where every sequence has an attention call of its own; then no groups
    groups: tuple[LengthGroup, ...] = ()
    inverse_T: Tensor | None = None  # int64, from the concatenated valid positions of the groups to pack order
    rotary_T11D: Tensor | None = None  # float32 angles of every token, where the layers rotate by themselves


def length_groups(lengths: Sequence[int]) -> list[LengthGroup]:
    """Batch the sequences of a pack by length so that at most ``MAX_PADDING`` of the computed positions are padding."""
    starts = list(accumulate(lengths, initial=0))
    batches: list[list[int]] = []
    tokens = 0
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        length = lengths[index]
        if batches and (len(batches[-1]) + 1) * length * (1 - MAX_PADDING) <= tokens + length:
            batches[-1].append(index)
            tokens += length
        else:
            batches.append([index])
            tokens = length
    groups = []
    for batch in batches:
        starts_B1 = torch.tensor([starts[i] for i in batch])[:, None]
        lengths_B1 = torch.tensor([lengths[i] for i in batch])[:, None]
        offsets_1Q = torch.arange(int(lengths_B1.max()))[None]
        valid_BQ = offsets_1Q < lengths_B1
        indices_BQ = starts_B1 + torch.minimum(offsets_1Q, lengths_B1 - 1)
        groups.append(LengthGroup(indices_BQ, valid_BQ, not bool(valid_BQ.all())))
    return groups


def zigzag_groups(padded: Sequence[int], num_ranks: int, rank: int) -> list[LengthGroup]:
    """Batch the sequences of equal length of a pack of which this rank holds its zigzag share of every sequence.

    Args:
        padded: the lengths of whole sequences, multiples of ``2 * num_ranks`` (see ``parallel.zigzag``).
    """
    starts = list(accumulate((length // num_ranks for length in padded), initial=0))  # in the tokens of any one rank
    num_local = starts[-1]
    groups = []
    for length, batch in groupby(sorted(range(len(padded)), key=lambda i: padded[i]), key=lambda i: padded[i]):
        part = length // (2 * num_ranks)
        starts_B1 = torch.tensor([starts[i] for i in batch])[:, None]
        positions_S = torch.arange(length)
        part_S, is_back_S = positions_S // part, positions_S // part >= num_ranks
        owner_S = torch.where(is_back_S, 2 * num_ranks - 1 - part_S, part_S)
        key_S = owner_S * num_local + is_back_S * part + positions_S % part
        own_Q = positions_S[owner_S == rank]  # ascending, as the rank holds them
        queries_BQ = starts_B1 + torch.arange(2 * part)[None]
        visible_QS = positions_S[None] <= own_Q[:, None]
        valid_BQ = torch.ones_like(queries_BQ, dtype=torch.bool)
        groups.append(LengthGroup(queries_BQ, valid_BQ, False, starts_B1 + key_S[None], visible_QS))
    return groups


def packed_sequences(lengths: Sequence[int], context_parallel_group: Any, device: torch.device) -> PackedSequences:
    """The packing of one micro-batch, built once and used by every layer.

    Args:
        lengths: of the sequences; with context parallelism the padded ones.
        context_parallel_group: whose ranks share the sequences.
        device: of the tokens.
    """
    num_ranks, rank = context_parallel_group.size(), context_parallel_group.rank()
    if num_ranks == 1 and sum(lengths) >= MIN_SEPARATE_LENGTH * len(lengths):
        return _record(lengths, sum(lengths), context_parallel_group, device, separate_lengths=tuple(lengths))
    groups = length_groups(lengths) if num_ranks == 1 else zigzag_groups(lengths, num_ranks, rank)
    order = torch.cat([group.query_indices_BQ[group.valid_BQ] for group in groups])
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel())
    return _record(
        lengths,
        order.numel(),
        context_parallel_group,
        device,
        groups=tuple(_on_device(group, device) for group in groups),
        inverse_T=inverse.to(device),
    )


def _record(
    lengths: Sequence[int], num_tokens: int, context_parallel_group: Any, device: torch.device, **batches: Any
) -> PackedSequences:
    whole = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=whole,
        cu_seqlens_kv=whole,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        cp_group=context_parallel_group,
        **batches,
    )


def _on_device(group: LengthGroup, device: torch.device) -> LengthGroup:
    keys, visible = group.key_indices_BS, group.is_visible_QS
    return LengthGroup(
        group.query_indices_BQ.to(device),
        group.valid_BQ.to(device),
        group.is_padded,
        None if keys is None else keys.to(device),
        None if visible is None else visible.to(device),
    )


class PackedAttention(MegatronModule):
    """``core_attention`` of the layer spec: causal attention within each sequence of a pack, through torch's SDPA."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        assert attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal), attn_mask_type
        assert not (attention_dropout or config.attention_dropout), "attention dropout is not part of these models"
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        """query [T, H, D], key and value [T, K, D] -> [T, H * D]."""
        assert packed_seq_params is not None, "every batch is packed"
        if packed_seq_params.cp_group.size() > 1:
            # Every rank sees all keys and values, and sums the gradients of its own over the ranks.
            key, value = (
                gather_from_sequence_parallel_region(
                    x.contiguous(), tensor_parallel_output_grad=True, group=packed_seq_params.cp_group
                )
                for x in (key, value)
            )
        if packed_seq_params.separate_lengths:
            parts = zip(*(x.split(packed_seq_params.separate_lengths) for x in (query, key, value)), strict=True)
            outputs = [self._attend(q[None], k[None], v[None]).flatten(0, 1) for q, k, v in parts]
            return torch.cat(outputs).flatten(1)
        outputs = []
        for group in packed_seq_params.groups:
            q_index = group.query_indices_BQ
            k_index = q_index if group.key_indices_BS is None else group.key_indices_BS
            out_BQHD = self._attend(query[q_index], key[k_index], value[k_index], group.is_visible_QS)
            outputs.append(out_BQHD[group.valid_BQ] if group.is_padded else out_BQHD.flatten(0, 1))
        return torch.cat(outputs)[packed_seq_params.inverse_T].flatten(1)

    def _attend(self, q_BQHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, is_visible_QS: Tensor | None = None) -> Tensor:
        # Padding stands at the end, so causality alone keeps it out of every real position.
        out_BHQD = F.scaled_dot_product_attention(
            q_BQHD.transpose(1, 2),
            k_BSKD.transpose(1, 2),
            v_BSKD.transpose(1, 2),
            attn_mask=is_visible_QS,
            is_causal=is_visible_QS is None,
            scale=self.scale,
            enable_gqa=k_BSKD.shape[2] != q_BQHD.shape[2],
        )
        return out_BHQD.transpose(1, 2)
