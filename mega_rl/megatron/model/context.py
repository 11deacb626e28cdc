"""One micro-batch as one rank's input, and its output back in the order of the pack: where context parallelism ends.

Letters: T packed tokens of the micro-batch, L tokens of this rank, M layers with experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from mega_rl.config.schema.sections import ContextMethod
from mega_rl.megatron.layers.attention import LocalImages, PackedSequences, packed_sequences
from mega_rl.microbatch import Images, Microbatch
from mega_rl.parallel.zigzag import PADDING, padded_lengths, unpadded_positions, zigzag_positions


@dataclass(frozen=True)
class LocalInput:
    """What a model chunk is given of one micro-batch."""

    token_ids: Tensor  # [1, L] int64
    target_ids: Tensor  # [1, L] int64
    position_ids: Tensor  # [A, L] int64, A axes: 1, or 3 where there are pictures
    packing: PackedSequences
    pack_order: Tensor | None  # [T] int64, where each packed token lies in the tokens of all ranks; None: L is T
    routed_experts: Tensor | None  # [L, M, K] int16, as in the micro-batch
    sources: Tensor | None  # [L] int64 on the host, where each token stands in the pack, or ``PADDING``; None: L is T


def local_input(
    microbatch: Microbatch,
    borders: Sequence[int],
    context_parallel_group: Any,
    multiple: int,
    method: ContextMethod = "gather",
) -> LocalInput:
    """This rank's share of a micro-batch, whose tensors lie on the device.

    Args:
        borders: ``cu_seqlens`` of the micro-batch on the host, which need not wait for the device then.
        context_parallel_group: whose ranks share every sequence.
        multiple: L becomes a multiple of it; without context parallelism the micro-batch must have it already.
        method: how the ranks share attention.
    """
    device = microbatch.token_ids.device
    lengths = [end - start for start, end in pairwise(borders)]
    num_ranks = context_parallel_group.size()
    tokens = (microbatch.token_ids, microbatch.target_ids)
    positions_AT = microbatch.position_ids.reshape(-1, microbatch.num_tokens)
    if num_ranks == 1:
        assert microbatch.num_tokens % multiple == 0, (microbatch.num_tokens, multiple)
        packing = packed_sequences(lengths, context_parallel_group, device)
        packing.images = _local_images(microbatch.images, torch.arange(microbatch.num_tokens, device=device))
        token_ids, target_ids = (x[None] for x in tokens)
        return LocalInput(token_ids, target_ids, positions_AT, packing, None, microbatch.routed_experts, None)
    padded = padded_lengths(lengths, num_ranks, multiple)
    sources = unpadded_positions(lengths, padded)
    shares = [zigzag_positions(padded, num_ranks, rank) for rank in range(num_ranks)]
    sources_of_all = sources[torch.cat(shares)]
    places = torch.nonzero(sources_of_all != PADDING)[:, 0]
    pack_order = torch.empty_like(places)
    pack_order[sources_of_all[places]] = places
    # Padding computes the first token again: it stands behind every token of its sequence, which never see it.
    own_sources = sources[shares[context_parallel_group.rank()]]
    own = own_sources.clamp_min(0).to(device)
    packing = packed_sequences(padded, context_parallel_group, device, method)
    packing.images = _local_images(microbatch.images, own)
    token_ids, target_ids = (x[own][None] for x in tokens)
    positions_AL = positions_AT[:, own]
    routed_experts = None if microbatch.routed_experts is None else microbatch.routed_experts[own]
    return LocalInput(token_ids, target_ids, positions_AL, packing, pack_order.to(device), routed_experts, own_sources)


def learnt_tokens(mask_T: Tensor, sources_L: Tensor | None) -> Tensor | None:
    """int64 [K]: this rank's tokens that are learnt from, or None if all are; at least one, as gradients need it.

    Args:
        mask_T: of the micro-batch; one that is on the host need not wait for the device.
        sources_L: as in ``LocalInput``.
    """
    is_learnt_L = mask_T.cpu() != 0
    if sources_L is not None:
        is_learnt_L = is_learnt_L[sources_L.clamp_min(0)] & (sources_L != PADDING)
    if is_learnt_L.all():
        return None
    return torch.nonzero(is_learnt_L)[:, 0] if is_learnt_L.any() else torch.zeros(1, dtype=torch.int64)


def _local_images(images: Images | None, own_L: Tensor) -> LocalImages | None:
    """``own_L``: which packed token each token of this rank is; padding repeats one."""
    if images is None:
        return None
    num_packed = int(torch.maximum(own_L.max(), images.places.max())) + 1
    feature_of_T = torch.full((num_packed,), -1, device=own_L.device)
    feature_of_T[images.places] = torch.arange(images.places.numel(), device=own_L.device)
    feature_L = feature_of_T[own_L]
    places_K = torch.nonzero(feature_L >= 0)[:, 0]
    return LocalImages(images, feature_L[places_K], places_K)


def in_pack_order(output: Tensor, local: LocalInput) -> Tensor:
    """``[n, L]`` of this rank -> ``[n, T]``, the same on all context-parallel ranks.

    Every rank goes on to compute the whole loss, so the gradient that comes back is cut and not summed.
    """
    if local.pack_order is None:
        return output
    output_of_all = gather_from_sequence_parallel_region(
        output.t().contiguous(), tensor_parallel_output_grad=False, group=local.packing.cp_group
    )
    return output_of_all[local.pack_order].t()
