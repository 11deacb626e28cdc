"""The ``npu::`` operators that ``mega_rl`` uses, in torch on CPU tensors, written from their documentation.

They stand for kernels that need an NPU: the pretended devices run them in the place of CANN's, and the tests without
torch_npu in the place of torch_npu. An argument that the documentation rules out fails here, where the real shape
functions let it pass; what no caller of ours uses is refused. Names, order and defaults of the arguments are the
operators' own, which ``tests/contract/test_npu_schemas.py`` holds against the wheels. Sums are in float32.

Letters: T packed tokens, H query heads, K key/value heads, D width, B sequences, Q and P positions, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

STAND_INS: dict[str, Callable[..., Any]] = {}  # "npu::name" -> what runs in its place
COMPOSED: dict[str, Callable[..., Any]] = {}  # those that torch_npu makes of other operators: no kernel to replace
NO_LIMIT = 2147483647
HALVES = (torch.float16, torch.bfloat16)


def stand_in(function: Callable[..., Any]) -> Callable[..., Any]:
    STAND_INS[f"npu::{function.__name__}"] = function
    return function


def composed(function: Callable[..., Any]) -> Callable[..., Any]:
    COMPOSED[f"npu::{function.__name__}"] = function
    return function


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


# --- attention -------------------------------------------------------------------------------------------------------


def _hidden(num_queries: int, num_keys: int, atten_mask: Tensor | None, sparse_mode: int) -> Tensor | None:
    """bool [Q, P], True where a key is hidden; None: every key is seen."""
    if atten_mask is None:
        return None  # whatever the mode says
    assert sparse_mode == 3, f"sparse mode {sparse_mode} is not used"
    return torch.ones(num_queries, num_keys, dtype=torch.bool).triu(num_keys - num_queries + 1)


def _sequences(layout: str, query: Tensor, key: Tensor, q_ends: Any, kv_ends: Any) -> Iterator[tuple[Any, Any]]:
    """Indices of the queries and of the keys of every sequence."""
    assert layout == "TND", f"layout {layout} is not used"
    for ends, tensor in ((q_ends, query), (kv_ends, key)):
        assert all(type(end) is int for end in ends), "Python integers"
        assert ends[0] > 0 and ends[-1] == len(tensor) and len(ends) <= 1000, "cumulative, without the 0 in front"
    assert len(q_ends) == len(kv_ends)
    yield from zip(*([slice(*pair) for pair in pairwise([0, *ends])] for ends in (q_ends, kv_ends)), strict=True)


def _check_attention(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, mask: Tensor | None, sparse_mode: int
) -> None:
    assert query.dim() == len(input_layout) == key.dim() == value.dim() and query.dtype == key.dtype == value.dtype
    assert head_num == query.shape[-2] <= 256 and head_num % key.shape[-2] == 0
    assert value.shape[-1] <= query.shape[-1] == key.shape[-1] <= 768 and key.shape[:-1] == value.shape[:-1]
    if sparse_mode == 3 and mask is not None:
        assert torch.equal(mask.bool(), torch.ones(2048, 2048, dtype=torch.bool).triu(1)), "the compressed mask"


def _scores(q: Tensor, k: Tensor, scale: float, hidden: Tensor | None) -> Tensor:
    """float32 [K, H / K, Q, P] of one sequence, [Q, H, D] and [P, K, D]."""
    q_QKRD = _wide(q).unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("qkrd,pkd->krqp", q_QKRD, _wide(k)) * scale
    return scores if hidden is None else scores.masked_fill(hidden, float("-inf"))


def _attend(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Attention [Q, H, D] of one sequence, with maximum and sum [Q, H] of its softmax."""
    maximum = scores.amax(-1, keepdim=True)
    weights = (scores - maximum).exp()
    total = weights.sum(-1, keepdim=True)
    output = torch.einsum("krqp,pkd->qkrd", weights / total, _wide(v)).flatten(1, 2)
    return output, *(x[..., 0].flatten(0, 1).t() for x in (maximum, total))


@stand_in
def npu_fusion_attention(
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
    pre_tockens: int = NO_LIMIT,
    next_tockens: int = NO_LIMIT,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[Any, ...]:
    assert pse is padding_mask is prefix is sink is dropout_mask is None and keep_prob == 1.0, "not used"
    assert pre_tockens == next_tockens == NO_LIMIT and inner_precise == 0 and softmax_layout == "", "not used"
    _check_attention(query, key, value, head_num, input_layout, atten_mask, sparse_mode)
    parts = []
    for own, other in _sequences(input_layout, query, key, actual_seq_qlen, actual_seq_kvlen):
        q, k, v = query[own], key[other], value[other]
        parts.append(_attend(_scores(q, k, scale, _hidden(len(q), len(k), atten_mask, sparse_mode)), v))
    output, maximum, total = (torch.cat(part) for part in zip(*parts, strict=True))
    statistics = (x[..., None].repeat_interleave(8, -1) for x in (maximum, total))  # blocks of 32 bytes
    return output.to(query.dtype), *statistics, query.new_empty(0), 0, 0, 0


@stand_in
def npu_fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = NO_LIMIT,
    next_tockens: int = NO_LIMIT,
    inner_precise: int = 0,
    seed: int = 0,
    offset: int = 0,
    numels: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
) -> tuple[Any, ...]:
    """From the statistics of the forward pass, as a kernel does that does not keep the scores."""
    assert softmax_max is not None and softmax_sum is not None and attention_in is not None and keep_prob == 1.0
    _check_attention(query, key, value, head_num, input_layout, atten_mask, sparse_mode)
    parts = []
    for own, other in _sequences(input_layout, query, key, actual_seq_qlen, actual_seq_kvlen):
        q, k, v, grad, out = query[own], key[other], value[other], _wide(dy[own]), _wide(attention_in[own])
        num_kv_heads = k.shape[1]
        scores = _scores(q, k, scale_value, _hidden(len(q), len(k), atten_mask, sparse_mode))
        maximum, total = (
            x[own][..., 0].t().unflatten(0, (num_kv_heads, -1))[..., None] for x in (softmax_max, softmax_sum)
        )
        weights = (scores - maximum).exp() / total
        grad_QKRD, out_QKRD = (x.unflatten(1, (num_kv_heads, -1)) for x in (grad, out))
        to_weights = torch.einsum("qkrd,pkd->krqp", grad_QKRD, _wide(v))
        centre = (grad_QKRD * out_QKRD).sum(-1).permute(1, 2, 0)[..., None]
        to_scores = weights * (to_weights - centre) * scale_value
        to_q = torch.einsum("krqp,pkd->qkrd", to_scores, _wide(k)).flatten(1, 2)
        to_k = torch.einsum("krqp,qkrd->pkd", to_scores, _wide(q).unflatten(1, (num_kv_heads, -1)))
        parts.append((to_q, to_k, torch.einsum("krqp,qkrd->pkd", weights, grad_QKRD)))
    gradients = (torch.cat(part).to(query.dtype) for part in zip(*parts, strict=True))
    return *gradients, query.new_empty(0), query.new_empty(0)


# --- normalisation, activation, rotary embedding ---------------------------------------------------------------------


@stand_in
def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor]:
    assert input.dtype == gamma.dtype and input.shape[-1:] == gamma.shape and 2 <= input.dim() <= 8
    wide = _wide(input)
    rstd = (wide.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt()
    return (wide * rstd * _wide(gamma)).to(input.dtype), rstd


@stand_in
def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor, Tensor]:
    assert x1.shape == x2.shape and x1.dtype == x2.dtype
    total = (_wide(x1) + _wide(x2)).to(x1.dtype)
    return *npu_rms_norm(total, gamma, epsilon), total


@stand_in
def npu_rms_norm_backward(dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    grad, normed = _wide(dy), _wide(input) * rstd
    to_normed = grad * _wide(gamma)
    to_input = rstd * (to_normed - normed * (to_normed * normed).mean(-1, keepdim=True))
    to_gamma = (grad * normed).flatten(0, -2).sum(0)
    return to_input.to(input.dtype), to_gamma.to(torch.promote_types(gamma.dtype, torch.float32))


@stand_in
def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    assert input.shape[dim] % 2 == 0 and input.dim() <= 8
    gate, up = _wide(input).chunk(2, dim)
    return (gate * gate.sigmoid() * up).to(input.dtype)


@stand_in
def npu_swiglu_backward(grad_output: Tensor, input: Tensor, dim: int = -1) -> Tensor:
    assert grad_output.dtype == input.dtype
    gate, up = _wide(input).chunk(2, dim)
    slope = gate.sigmoid()
    to_gate = _wide(grad_output) * up * (slope + gate * slope * (1 - slope))
    return torch.cat((to_gate, _wide(grad_output) * gate * slope), dim).to(input.dtype)


def _check_rotary(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str) -> None:
    assert rotary_mode == "half", "the other mode is not used"
    assert input.dim() == r1.dim() == r2.dim() == 4 and input.dtype == r1.dtype == r2.dtype
    batch, _, heads, width = input.shape
    assert r1.shape == r2.shape == (1, input.shape[1], 1, width), "1S1D beside BSND"
    assert width % 2 == 0 and width < 896 and batch < 1000 and heads < 1000


@stand_in
def npu_rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    assert rotate is None, "not used"
    _check_rotary(input, r1, r2, rotary_mode)
    first, second = _wide(input).chunk(2, -1)
    return (_wide(input) * r1 + torch.cat((-second, first), -1) * r2).to(input.dtype)


@stand_in
def npu_rotary_mul_backward(
    grad: Tensor, input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half"
) -> tuple[Tensor, Tensor, Tensor]:
    _check_rotary(input, r1, r2, rotary_mode)
    first, second = (_wide(grad) * r2).chunk(2, -1)
    to_input = _wide(grad) * r1 + torch.cat((second, -first), -1)
    a, b = _wide(input).chunk(2, -1)
    to_r1, to_r2 = _wide(grad) * _wide(input), _wide(grad) * torch.cat((-b, a), -1)
    return to_input.to(input.dtype), *(x.sum(2, keepdim=True).sum(0, keepdim=True).to(r1.dtype) for x in (to_r1, to_r2))


# --- experts ---------------------------------------------------------------------------------------------------------


@stand_in
def npu_grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    bias: Any = None,
    scale: Any = None,
    offset: Any = None,
    antiquant_scale: Any = None,
    antiquant_offset: Any = None,
    per_token_scale: Any = None,
    group_list: Tensor | None = None,
    activation_input: Any = None,
    activation_quant_scale: Any = None,
    activation_quant_offset: Any = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    tuning_config: Any = None,
    output_dtype: int | None = None,
    x_dtype: int | None = None,
    weight_dtype: int | None = None,
    scale_dtype: int | None = None,
    per_token_scale_dtype: int | None = None,
) -> list[Tensor]:
    """``group_type`` 0: groups of rows, a matrix for each; 2: each sums over its own part of the columns."""
    assert bias is scale is offset is per_token_scale is output_dtype is None and act_type == 0, "not used"
    assert split_item in (2, 3) and len(x) == 1 and x[0].dim() == 2, "one input and one result"
    assert group_list is not None and group_list.dtype == torch.int64 and group_list_type in (0, 1), "ends or lengths"
    ends, left = (group_list.cumsum(0) if group_list_type else group_list).tolist(), x[0]
    lengths = [end - start for start, end in pairwise([0, *ends])]
    assert min(lengths) >= 0 and ends[-1] == left.shape[0 if group_type == 0 else 1], "ends that never fall"
    assert len(ends) <= (128 if len(weight) > 1 else 1024) and all(w.dtype == left.dtype for w in weight)
    if group_type == 2:
        assert len(weight) == 1 and weight[0].dim() == 2
        parts = zip(left.split(lengths, 1), weight[0].split(lengths, 0), strict=True)
        return [torch.stack([_wide(a) @ _wide(b) for a, b in parts]).to(left.dtype)]
    assert group_type == 0
    if len(weight) == 1 and weight[0].dim() == 3:
        matrices = list(weight[0])
    else:
        assert left.dtype in HALVES and all(w.dim() == 2 for w in weight), "float32 takes single tensors only"
        matrices = list(weight)
    parts = zip(left.split(lengths), matrices, strict=True)
    return [torch.cat([_wide(a) @ _wide(b) for a, b in parts]).to(left.dtype)]


def _rows(routing_map: Tensor) -> tuple[Tensor, Tensor]:
    """Of the rows sorted by expert: the token of each, and [T * experts of a token], where each token's are."""
    num_tokens, num_experts = routing_map.shape
    tokens = torch.arange(num_tokens).expand(num_experts, -1)[routing_map.t().bool()]
    return tokens, tokens.argsort(stable=True)


@stand_in
def npu_moe_token_permute_with_routing_map(
    tokens: Tensor,
    routing_map: Tensor,
    *,
    probs: Tensor | None = None,
    num_out_tokens: int | None = None,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    assert probs is None and not drop_and_pad, "not used"
    assert routing_map.dtype in (torch.bool, torch.int8) and routing_map.shape[0] == tokens.shape[0]
    counts = set(routing_map.sum(1).tolist())
    assert len(counts) == 1 and num_out_tokens == counts.pop() * len(tokens), "as many experts for every token"
    owners, places = _rows(routing_map)
    return tokens[owners], tokens.new_empty(0), places.to(torch.int32)


@stand_in
def npu_moe_token_permute_with_routing_map_grad(
    permuted_token_out_grad: Tensor,
    probs_grad: Tensor | None,
    sorted_indices: Tensor,
    routing_map: Tensor,
    experts_num: int,
    tokens_num: int,
    drop_and_pad: bool,
) -> tuple[Tensor, Tensor]:
    assert not drop_and_pad and routing_map.shape == (tokens_num, experts_num)
    grouped = _wide(permuted_token_out_grad)[sorted_indices.long()].unflatten(0, (tokens_num, -1))
    return grouped.sum(1).to(permuted_token_out_grad.dtype), permuted_token_out_grad.new_empty(0)


@composed
def npu_moe_token_unpermute_with_routing_map(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: Sequence[int],
    *,
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    drop_and_pad: bool = False,
) -> Tensor:
    arguments = {"probs": probs, "routing_map": routing_map, "drop_and_pad": drop_and_pad}
    return _npu_moe_token_unpermute_with_routing_map(permuted_tokens, sorted_indices, restore_shape, **arguments)[0]


@stand_in
def _npu_moe_token_unpermute_with_routing_map(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: Sequence[int],
    *,
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    drop_and_pad: bool = False,
) -> tuple[Tensor, ...]:
    """What the operator with a gradient is made of."""
    assert probs is None and not drop_and_pad and sorted_indices.dtype == torch.int32
    assert list(restore_shape) == [restore_shape[0], permuted_tokens.shape[1]]
    grouped = _wide(permuted_tokens)[sorted_indices.long()].unflatten(0, (restore_shape[0], -1))
    nothing = sorted_indices.new_empty(0)
    return grouped.sum(1).to(permuted_tokens.dtype), nothing, nothing, permuted_tokens.new_empty(0)


@stand_in
def npu_moe_token_unpermute_with_routing_map_grad(
    unpermuted_tokens_grad: Tensor,
    out_index: Tensor,
    permuted_token_id: Tensor,
    routing_map: Tensor | None,
    permuted_tokens: Tensor | None,
    probs: Tensor | None,
    drop_and_pad: bool,
    restore_shape: Sequence[int],
) -> tuple[Tensor, Tensor]:
    assert probs is None and not drop_and_pad and out_index.dtype == torch.int32
    per_token = len(out_index) // restore_shape[0]
    gradient = unpermuted_tokens_grad.new_empty(len(out_index), restore_shape[1])
    gradient[out_index.long()] = unpermuted_tokens_grad.repeat_interleave(per_token, 0)
    return gradient, unpermuted_tokens_grad.new_empty(0)
