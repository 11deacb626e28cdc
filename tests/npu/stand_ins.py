"""What ``npu::`` operators compute, on CPU tensors: float32 inside, written from their documentation.

They are as strict as the device is: arguments that it would answer with wrong numbers are refused here.
Letters: T packed queries, S packed keys, H query heads, K key/value heads, D head width, Q and P positions of one
sequence's queries and keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

NO_BAND = 2**31 - 1
STATISTICS_WIDTH = 8  # the operator repeats every maximum and sum so often


def _hidden(num_queries: int, num_keys: int, atten_mask: Tensor | None, sparse_mode: int) -> Tensor:
    """bool [Q, P], True where a query does not see a key."""
    if sparse_mode == 0 and atten_mask is None:
        return torch.zeros(num_queries, num_keys, dtype=torch.bool)
    assert sparse_mode == 3, f"sparse_mode {sparse_mode} has no stand-in"
    assert atten_mask is not None, "sparse_mode 3 without atten_mask is full attention"
    compressed = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    assert torch.equal(atten_mask.bool(), compressed), (
        "sparse_mode 3 takes the compressed mask, True above the diagonal"
    )
    return torch.ones(num_queries, num_keys, dtype=torch.bool).triu(num_keys - num_queries + 1)


def _sequences(
    query: Tensor, key: Tensor, ends_q: Sequence[int], ends_k: Sequence[int]
) -> Iterator[tuple[slice, slice]]:
    assert ends_q is not None and ends_k is not None, "TND needs actual_seq_qlen and actual_seq_kvlen"
    assert len(ends_q) == len(ends_k) <= 1000, "as many keys' sequences as queries', 1,000 at most"
    assert ends_q[0] > 0 and ends_k[0] > 0, "cumulative ends have no leading zero"
    assert (ends_q[-1], ends_k[-1]) == (len(query), len(key)), "the last sequence ends with the tokens"
    yield from zip(
        (slice(a, b) for a, b in pairwise((0, *ends_q))), (slice(a, b) for a, b in pairwise((0, *ends_k))), strict=True
    )


def _heads_first(tokens_THD: Tensor, num_heads: int) -> Tensor:
    """float32 [H, T, D], key/value heads repeated for their queries."""
    return tokens_THD.float().repeat_interleave(num_heads // tokens_THD.shape[1], 1).transpose(0, 1)


def _scores(q_HQD: Tensor, k_HPD: Tensor, scale: float, atten_mask: Tensor | None, sparse_mode: int) -> Tensor:
    scores_HQP = q_HQD @ k_HPD.transpose(1, 2) * scale
    return scores_HQP.masked_fill(_hidden(q_HQD.shape[1], k_HPD.shape[1], atten_mask, sparse_mode), float("-inf"))


def _check(query: Tensor, key: Tensor, head_num: int, input_layout: str, keep_prob: float) -> None:
    assert input_layout == "TND", f"layout {input_layout} has no stand-in"
    assert keep_prob == 1.0, "dropout has no stand-in"
    assert head_num == query.shape[1] and head_num % key.shape[1] == 0, (head_num, query.shape, key.shape)


def fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = NO_BAND,
    next_tockens: int = NO_BAND,
    inner_precise: int = 0,
    prefix: Any = None,
    actual_seq_qlen: Any = None,
    actual_seq_kvlen: Any = None,
    sparse_mode: int = 0,
    *_: Any,
    **__: Any,
) -> tuple[Any, ...]:
    """npu_fusion_attention: output [T, H, D], maxima and sums of the softmax [T, H, 8], and what dropout would need."""
    _check(query, key, head_num, input_layout, keep_prob)
    output_THD = query.new_empty(*query.shape[:2], value.shape[2])
    maximum, total = (torch.empty(*query.shape[:2], STATISTICS_WIDTH) for _ in range(2))
    for queries, keys in _sequences(query, key, actual_seq_qlen, actual_seq_kvlen):
        q, k, v = (_heads_first(x, head_num) for x in (query[queries], key[keys], value[keys]))
        scores_HQP = _scores(q, k, scale, atten_mask, sparse_mode)
        highest = scores_HQP.amax(-1, keepdim=True)
        weights_HQP = (scores_HQP - highest).exp()
        sums = weights_HQP.sum(-1, keepdim=True)
        output_THD[queries] = (weights_HQP / sums @ v).transpose(0, 1).to(output_THD.dtype)
        maximum[queries], total[queries] = highest.transpose(0, 1), sums.transpose(0, 1)
    return output_THD, maximum, total, query.new_empty(0), 0, 0, 0


def fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    attention_in: Tensor,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    actual_seq_qlen: Any = None,
    actual_seq_kvlen: Any = None,
    sparse_mode: int = 0,
    **_: Any,
) -> tuple[Any, ...]:
    """npu_fusion_attention_grad: gradients of query, key and value, and two that are not asked for."""
    _check(query, key, head_num, input_layout, keep_prob)
    gradients = tuple(torch.empty_like(x) for x in (query, key, value))
    num_groups, per_group = key.shape[1], head_num // key.shape[1]
    for queries, keys in _sequences(query, key, actual_seq_qlen, actual_seq_kvlen):
        q, k, v = (_heads_first(x, head_num) for x in (query[queries], key[keys], value[keys]))
        dy_HQD, output_HQD = (x[queries].float().transpose(0, 1) for x in (dy, attention_in))
        scores_HQP = _scores(q, k, scale_value, atten_mask, sparse_mode)
        highest, sums = (x[queries][..., :1].transpose(0, 1) for x in (softmax_max, softmax_sum))
        weights_HQP = (scores_HQP - highest).exp() / sums
        inner = dy_HQD @ v.transpose(1, 2) - (dy_HQD * output_HQD).sum(-1, keepdim=True)
        to_scores = weights_HQP * inner * scale_value
        found = (to_scores @ k, to_scores.transpose(1, 2) @ q, weights_HQP.transpose(1, 2) @ dy_HQD)
        for gradient, part, span, groups in zip(
            gradients, found, (queries, keys, keys), (False, True, True), strict=True
        ):
            part_THD = part.transpose(0, 1)
            if groups:  # query heads of one key head
                part_THD = part_THD.unflatten(1, (num_groups, per_group)).sum(2)
            gradient[span] = part_THD.to(gradient.dtype)
    return (*gradients, None, query.new_empty(0))


STAND_INS = {
    "npu::npu_fusion_attention": fusion_attention,
    "npu::npu_fusion_attention_grad": fusion_attention_grad,
}
