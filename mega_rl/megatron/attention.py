"""Packed causal attention for Megatron's layer spec, and the record that carries the packing to it.

Letters: T packed tokens of this rank, B sequences of a group, Q queries and S keys of a sequence, H query heads, K
key/value heads, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mega_rl.megatron.routing import Routing
from mega_rl.platform.operators import dispatch as operators


@dataclass(frozen=True)
class ZigzagGroup:
    """Sequences of equal length, of which this rank holds its share, that one attention call takes together."""

    query_indices_BQ: Tensor  # int64, where each query lies in this rank's tokens
    key_indices_BS: Tensor  # int64, where each key lies in the tokens of all ranks, rank after rank
    is_visible_QS: Tensor  # bool, which keys a query sees


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's packing record with what attention needs; ``cp_group`` holds the context-parallel ranks.

    ``cu_seqlens_q`` describes the whole pack as one sequence, because the rotary table is gathered per token beforehand
    (see ``PolicyModel``): Megatron then applies it in one operation instead of one per sequence.
    """

    cu_seqlens: Tensor | None = None  # int32 [B + 1], where sequences begin; None with context parallelism
    zigzag: tuple[ZigzagGroup, ...] = ()  # set with context parallelism only
    inverse_T: Tensor | None = None  # int64, set with zigzag: from the groups' joined queries to this rank's order
    rotary_T11D: Tensor | None = None  # float32 angles of every token, if the layers rotate by themselves
    routing: Routing | None = None  # which experts take this rank's tokens; None: the routers choose


def zigzag_groups(padded: Sequence[int], num_ranks: int, rank: int) -> list[ZigzagGroup]:
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
        groups.append(ZigzagGroup(queries_BQ, starts_B1 + key_S[None], visible_QS))
    return groups


def packed_sequences(lengths: Sequence[int], context_parallel_group: Any, device: torch.device) -> PackedSequences:
    """The packing of one micro-batch, built once and used by every layer.

    Args:
        lengths: of the sequences; with context parallelism the padded ones.
        context_parallel_group: whose ranks share the sequences.
        device: of the tokens.
    """
    num_ranks, rank = context_parallel_group.size(), context_parallel_group.rank()
    if num_ranks == 1:
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        return _record(lengths, sum(lengths), context_parallel_group, device, cu_seqlens=starts)
    groups = zigzag_groups(lengths, num_ranks, rank)
    order = torch.cat([group.query_indices_BQ.flatten() for group in groups])
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel())
    return _record(
        lengths,
        order.numel(),
        context_parallel_group,
        device,
        zigzag=tuple(_on_device(group, device) for group in groups),
        inverse_T=inverse.to(device),
    )


def _record(
    lengths: Sequence[int], num_tokens: int, context_parallel_group: Any, device: torch.device, **borders: Any
) -> PackedSequences:
    whole = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=whole,
        cu_seqlens_kv=whole,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        cp_group=context_parallel_group,
        **borders,
    )


def _on_device(group: ZigzagGroup, device: torch.device) -> ZigzagGroup:
    return ZigzagGroup(*(x.to(device) for x in (group.query_indices_BQ, group.key_indices_BS, group.is_visible_QS)))


class PackedAttention(MegatronModule):
    """``core_attention`` of the layer spec: causal attention within each sequence of a pack."""

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
            return self._context_parallel(query, key, value, packed_seq_params).flatten(1)
        borders, longest = packed_seq_params.cu_seqlens, packed_seq_params.max_seqlen_q
        assert borders is not None
        output_THD = operators.varlen_attention(
            query, key, value, borders, borders, longest, longest, softmax_scale=self.scale, causal=True
        )
        return output_THD.flatten(1)

    def _context_parallel(self, query: Tensor, key: Tensor, value: Tensor, packing: PackedSequences) -> Tensor:
        # Every rank sees all keys and values, and sums the gradients of its own over the ranks.
        key, value = (
            gather_from_sequence_parallel_region(
                x.contiguous(), tensor_parallel_output_grad=True, group=packing.cp_group
            )
            for x in (key, value)
        )
        outputs = []
        for group in packing.zigzag:
            q, k, v = query[group.query_indices_BQ], key[group.key_indices_BS], value[group.key_indices_BS]
            output_BQHD = operators.dense_attention(
                q, k, v, softmax_scale=self.scale, is_visible_QP=group.is_visible_QS
            )
            outputs.append(output_BQHD.flatten(0, 1))
        return torch.cat(outputs)[packing.inverse_T]
