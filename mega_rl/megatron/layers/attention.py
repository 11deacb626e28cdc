"""Packed causal attention for Megatron's layer spec, and the record that carries the packing to it.

With context parallelism a rank holds two parts of every sequence (``parallel.zigzag``), and each is a sequence of its
own to the attention: its queries, and the keys up to its end, collected from all ranks. No mask is made.

Letters: T packed tokens of this rank, S keys of all its parts, B sequences, H query heads, K key/value heads, D head
width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import all_to_all, gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mega_rl.config.schema.sections import ContextMethod
from mega_rl.megatron.layers.routing import MicrobatchRouting
from mega_rl.microbatch import Images
from mega_rl.parallel.zigzag import visible_keys, zigzag_positions
from mega_rl.platform import dispatch as operators
from mega_rl.platform.operators.attention import place_borders


@dataclass(frozen=True)
class Exchange:
    """Ulysses (arXiv 2309.14509): a rank gives its tokens' other heads away and gets all tokens of its own heads.

    Letters: C ranks, P tokens of all ranks, which are L of each.
    """

    in_pack_order_P: Tensor  # int64, where each token of the pack lies in the tokens of all ranks, rank after rank
    by_rank_P: Tensor  # int64, the reverse
    group: Any

    def to_heads(self, x_LHD: Tensor) -> Tensor:
        """All tokens of the pack in its order, and this rank's heads: [P, H / C, D]."""
        parts_CLHD = x_LHD.unflatten(1, (self.group.size(), -1)).transpose(0, 1)
        received = all_to_all(self.group, parts_CLHD.flatten(0, 1).contiguous())
        return received.index_select(0, self.in_pack_order_P)

    def to_tokens(self, x_PHD: Tensor) -> Tensor:
        """The reverse of ``to_heads``."""
        received = all_to_all(self.group, x_PHD.index_select(0, self.by_rank_P))
        return received.unflatten(0, (self.group.size(), -1)).transpose(0, 1).flatten(1, 2)


@dataclass(frozen=True)
class LocalImages:
    """All pictures of a micro-batch, and which of their features stand in this rank's tokens."""

    images: Images
    features_K: Tensor  # int64, numbers of the features that stand here; one may stand twice (padding)
    places_K: Tensor  # int64, where each of them stands in this rank's tokens


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's packing record with what attention needs; ``cp_group`` holds the context-parallel ranks.

    ``cu_seqlens_q`` describes the whole pack as one sequence, because the rotary table is gathered per token beforehand
    (see ``PolicyModel``): Megatron then applies it in one operation instead of one per sequence.
    """

    cu_seqlens: Tensor | None = None  # int32 [B + 1], where the queries of a sequence, or of a part of one, begin
    cu_seqlens_of_keys: Tensor | None = None  # the same of the keys that they see; one tensor if these are the same
    longest: tuple[int, int] = (0, 0)  # queries and keys of one sequence or part
    # With context parallelism one of both: where each key lies in the tokens of all ranks, int64; or how heads are
    # exchanged for tokens.
    keys_S: Tensor | None = None
    exchange: Exchange | None = None
    rotary_T11D: Tensor | None = None  # float32 angles of every token, if the layers rotate by themselves
    routing: MicrobatchRouting | None = None  # which experts take this rank's tokens; None: the routers choose
    token_keys_N: Tensor | None = None  # int64 [L], what dropout knows this rank's tokens by; None: no dropout
    learnt_K: Tensor | None = None  # int64, the tokens of this rank whose predictions are wanted; None: all
    images: LocalImages | None = None
    # Features that the first layers add to their output (DeepStack), and the tokens of this rank that they belong to.
    deepstack: tuple[Tensor, ...] = ()
    deepstack_places_K: Tensor | None = None


def packed_sequences(
    lengths: Sequence[int], context_parallel_group: Any, device: torch.device, method: ContextMethod = "gather"
) -> PackedSequences:
    """The packing of one micro-batch, built once and used by every layer.

    Args:
        lengths: of the sequences; with context parallelism the padded ones.
        context_parallel_group: whose ranks share the sequences.
        device: of the tokens.
        method: how the ranks share attention.
    """
    num_ranks, rank = context_parallel_group.size(), context_parallel_group.rank()
    exchange = None
    if num_ranks > 1 and method == "ulysses":
        by_rank = torch.cat([zigzag_positions(lengths, num_ranks, other) for other in range(num_ranks)])
        in_pack_order = torch.empty_like(by_rank)
        in_pack_order[by_rank] = torch.arange(len(by_rank))
        exchange = Exchange(in_pack_order.to(device), by_rank.to(device), context_parallel_group)
    if num_ranks == 1 or exchange is not None:
        starts = place_borders(lengths, device)
        longest = (max(lengths), max(lengths))
        return _record(
            lengths,
            context_parallel_group,
            device,
            starts,
            cu_seqlens_of_keys=starts,
            longest=longest,
            exchange=exchange,
        )
    parts = visible_keys(lengths, num_ranks, rank)
    return _record(
        lengths,
        context_parallel_group,
        device,
        place_borders(parts.num_queries, device),
        cu_seqlens_of_keys=place_borders(parts.num_keys, device),
        longest=(max(parts.num_queries), max(parts.num_keys)),
        keys_S=parts.keys.to(device),
    )


def _record(
    lengths: Sequence[int], context_parallel_group: Any, device: torch.device, cu_seqlens: Tensor, **of_keys: Any
) -> PackedSequences:
    whole = place_borders([sum(lengths) // context_parallel_group.size()], device)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=whole,
        cu_seqlens_kv=whole,
        max_seqlen_q=max(lengths),  # of whole sequences: Megatron makes its rotary table as long
        max_seqlen_kv=max(lengths),
        cp_group=context_parallel_group,
        cu_seqlens=cu_seqlens,
        **of_keys,
    )


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
        packing, exchange = packed_seq_params, packed_seq_params.exchange
        if exchange is not None:
            query, key, value = (exchange.to_heads(x) for x in (query, key, value))
        if packing.keys_S is not None:
            # Every rank sees all keys and values, and sums the gradients of its own over the ranks.
            key, value = (
                gather_from_sequence_parallel_region(
                    x.contiguous(), tensor_parallel_output_grad=True, group=packing.cp_group
                )[packing.keys_S]
                for x in (key, value)
            )
        queries, keys = packing.cu_seqlens, packing.cu_seqlens_of_keys
        assert queries is not None and keys is not None
        output_THD = operators.varlen_attention(
            query, key, value, queries, keys, *packing.longest, softmax_scale=self.scale, causal=True
        )
        return (output_THD if exchange is None else exchange.to_tokens(output_THD)).flatten(1)
