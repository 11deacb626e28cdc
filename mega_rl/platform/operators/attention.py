"""Attention over packed sequences in flash-attention's terms: the check of its arguments, and torch's SDPA for it.

Letters: T packed queries, S packed keys, B sequences (of a group), Q and P positions of one sequence's queries and
keys, H query heads, K key/value heads, D head width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

MAX_PADDING = 0.15  # share of padded positions above which sequences of unequal length are not batched together
MIN_SEPARATE_LENGTH = 64  # mean length, tokens, from which a call per sequence costs less than gathering and padding

Result = TypeVar("Result")


def once_per_tensor(function: Callable[[Tensor], Result]) -> Callable[[Tensor], Result]:
    """Keep ``function``'s result for a tensor as long as that tensor lives: later layers get the result for free.

    The tensor must not be written to.
    """
    results = WeakTensorKeyDictionary()

    @functools.wraps(function)
    def kept(tensor: Tensor) -> Result:
        if tensor not in results:
            results[tensor] = function(tensor)
        return results[tensor]

    return kept


@dataclass(frozen=True)
class Borders:
    """A ``cu_seqlens`` as Python integers."""

    positions: tuple[int, ...]  # of B sequences B + 1, from 0
    lengths: tuple[int, ...]
    longest: int


_placed: MutableMapping[Tensor, Borders] = WeakTensorKeyDictionary()  # of tensors whose numbers the host has anyway


def place_borders(lengths: Sequence[int], device: torch.device) -> Tensor:
    """``cu_seqlens`` of sequences of these lengths; ``read_borders`` of it does not wait for the device."""
    positions = tuple(accumulate(lengths, initial=0))
    cu_seqlens = torch.tensor(positions, dtype=torch.int32, device=device)
    _placed[cu_seqlens] = Borders(positions, tuple(lengths), max(lengths))
    return cu_seqlens


@once_per_tensor
def read_borders(cu_seqlens: Tensor) -> Borders:
    """Copy ``cu_seqlens`` from the device and check it; ValueError if it does not bound sequences."""
    if cu_seqlens in _placed:
        return _placed[cu_seqlens]
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1:
        raise ValueError(f"cu_seqlens must be int32 [B + 1], not {cu_seqlens.dtype} {list(cu_seqlens.shape)}")
    positions = tuple(cu_seqlens.tolist())
    lengths = tuple(end - start for start, end in pairwise(positions))
    if not lengths or positions[0] != 0 or min(lengths) < 1:
        raise ValueError("cu_seqlens must begin with 0 and rise by every sequence's length, at least one token each")
    return Borders(positions, lengths, max(lengths))


@dataclass(frozen=True)
class VarlenPacking:
    """Where the sequences of packed queries and keys begin and end, in flash-attention's terms."""

    cu_seqlens_q: Tensor  # int32 [B + 1] on the device, begins with 0
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    @property
    def borders_q(self) -> Borders:
        return read_borders(self.cu_seqlens_q)

    @property
    def borders_k(self) -> Borders:
        return read_borders(self.cu_seqlens_k)


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if any(x.dim() != 3 for x in (q, k, v)):
        raise ValueError(f"attention takes [tokens, heads, width]: {shapes}")
    if k.shape[:-1] != v.shape[:-1] or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"keys and values need equal tokens and heads, queries and keys equal width: {shapes}")
    if q.shape[-2] % k.shape[-2] != 0:
        raise ValueError(f"the query heads must be a multiple of the key heads: {shapes}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v need one dtype: {q.dtype}, {k.dtype}, {v.dtype}")


def check_arguments(q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, packing: VarlenPacking, causal: bool) -> None:
    """Raise ValueError for what a fused kernel would accept and answer with meaningless numbers."""
    _check_heads(q_THD, k_SKD, v_SKD)
    queries, keys = packing.borders_q, packing.borders_k
    if (queries.positions[-1], keys.positions[-1]) != (q_THD.shape[0], k_SKD.shape[0]):
        raise ValueError(
            f"cu_seqlens end at {queries.positions[-1]} queries, {keys.positions[-1]} keys, of "
            f"{q_THD.shape[0]} and {k_SKD.shape[0]}"
        )
    if packing.max_seqlen_q < queries.longest or packing.max_seqlen_k < keys.longest:
        raise ValueError(f"max_seqlen is less than the longest sequence, {queries.longest} and {keys.longest} tokens")
    if len(queries.lengths) != len(keys.lengths):
        raise ValueError(f"queries have {len(queries.lengths)} sequences, keys {len(keys.lengths)}")
    if causal and any(q > k for q, k in zip(queries.lengths, keys.lengths, strict=True)):
        raise ValueError("causal attention needs at least as many keys as queries in every sequence")


@dataclass(frozen=True)
class LengthGroup:
    """Sequences of similar length that one attention call takes together."""

    indices_BQ: Tensor  # int64, where each position lies in the pack; padding repeats the last one of its sequence
    valid_BQ: Tensor  # bool, False on padding
    is_padded: bool


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


@once_per_tensor
def batched_calls(cu_seqlens: Tensor) -> tuple[list[LengthGroup], Tensor]:
    """The groups of a pack, and int64 [T] from their concatenated valid positions back to pack order."""
    groups = length_groups(read_borders(cu_seqlens).lengths)
    order = torch.cat([group.indices_BQ[group.valid_BQ] for group in groups])
    inverse_T = torch.empty_like(order)
    inverse_T[order] = torch.arange(order.numel())
    device = cu_seqlens.device
    groups = [LengthGroup(g.indices_BQ.to(device), g.valid_BQ.to(device), g.is_padded) for g in groups]
    return groups, inverse_T.to(device)


@once_per_tensor
def kept_masks(cu_seqlens: Tensor) -> dict[tuple[int, int], Tensor]:
    """Numbers of queries and keys -> their mask, as far as the sequences of a pack have needed one."""
    return {}


def lower_right(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """bool [Q, P]: the last query sees all keys, each one before it one fewer."""
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)


def sdpa(
    q_BQHD: Tensor, k_BPKD: Tensor, v_BPKD: Tensor, scale: float, causal: bool, is_visible_QP: Tensor | None = None
) -> Tensor:
    """torch's SDPA with heads behind positions: [B, Q, H, D].

    ``is_visible_QP`` replaces causality, which torch aligns at the first key and not at the last.
    """
    out_BHQD = F.scaled_dot_product_attention(
        q_BQHD.transpose(1, 2),
        k_BPKD.transpose(1, 2),
        v_BPKD.transpose(1, 2),
        attn_mask=is_visible_QP,
        is_causal=causal and is_visible_QP is None,
        scale=scale,
        enable_gqa=k_BPKD.shape[2] != q_BQHD.shape[2],
    )
    return out_BHQD.transpose(1, 2)


def equal_neighbours(sizes: Iterable[tuple[int, int]]) -> list[tuple[tuple[int, int], int]]:
    """Each size and how often it follows itself: sequences that one call takes without copying them together."""
    return [(size, len(list(same))) for size, same in groupby(sizes)]


def sdpa_attention(
    q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, packing: VarlenPacking, *, softmax_scale: float, causal: bool
) -> Tensor:
    """Attention over packed sequences through torch's SDPA, on any device."""
    queries, keys = packing.borders_q, packing.borders_k
    is_short = len(q_THD) < MIN_SEPARATE_LENGTH * len(queries.lengths)
    if not (is_short and causal and queries.positions == keys.positions):
        sizes = zip(queries.lengths, keys.lengths, strict=True)
        runs = [(size, 1) for size in sizes] if causal else equal_neighbours(sizes)
        of_q, of_k = ([times * size[side] for size, times in runs] for side in (0, 1))
        parts = zip(runs, q_THD.split(of_q), k_SKD.split(of_k), v_SKD.split(of_k), strict=True)
        masks = kept_masks(packing.cu_seqlens_q)
        outputs = []
        for (size, times), q, k, v in parts:
            mask = None
            if causal and size[0] != size[1]:  # torch would align at the first key; every layer takes the same mask
                mask = masks[size] if size in masks else masks.setdefault(size, lower_right(*size, q_THD.device))
            q_BQHD, k_BPKD, v_BPKD = (x.unflatten(0, (times, -1)) for x in (q, k, v))
            outputs.append(sdpa(q_BQHD, k_BPKD, v_BPKD, softmax_scale, causal, mask).flatten(0, 1))
        return torch.cat(outputs)
    groups, inverse_T = batched_calls(packing.cu_seqlens_q)
    outputs = []
    for group in groups:
        # Padding stands at the end, so causality is enough to keep it out of every real position.
        q_BQHD, k_BPKD, v_BPKD = (x[group.indices_BQ] for x in (q_THD, k_SKD, v_SKD))
        out_BQHD = sdpa(q_BQHD, k_BPKD, v_BPKD, softmax_scale, causal)
        outputs.append(out_BQHD[group.valid_BQ] if group.is_padded else out_BQHD.flatten(0, 1))
    return torch.cat(outputs)[inverse_T]
