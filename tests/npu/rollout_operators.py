"""The operators that vllm-ascend calls for dense models and mixtures of experts, in torch on CPU tensors.

Each stands for a kernel that needs an NPU. Those of torch_npu (``npu``, ``atb``) are written from its documentation;
those of vllm-ascend's own extension (``_C_ascend``) have none, and are written from their schemas and from what their
results are used for. What no caller uses is refused. ``tests/contract/test_rollout_schemas.py`` holds their arguments
against the recorded schemas.

Letters as in ``stand_ins.py``: T tokens, H query heads, K key heads, D width, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.npu import stand_ins

ROLLOUT: dict[str, Callable[..., Any]] = {}  # "namespace::name" -> what runs in its place
MASK = torch.ones(2048, 2048, dtype=torch.bool).triu(1)  # the compressed one of sparse mode 3


def stand_in(namespace: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def keep(function: Callable[..., Any]) -> Callable[..., Any]:
        ROLLOUT[f"{namespace}::{function.__name__}"] = function
        return function

    return keep


# --- normalisation, rotary embedding ---------------------------------------------------------------------------------


@stand_in("_C_ascend")
def npu_add_rms_norm_bias(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor | None = None, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """Stands for a residual connection and the RMSNorm behind it in one kernel; returns the sum as well."""
    assert beta is None, "not used"
    total = x1 + x2
    y, rstd = stand_ins.npu_rms_norm(total, gamma, epsilon)
    return y, rstd, total


@stand_in("atb")
def _npu_rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox_style: bool
) -> None:
    """Stands for NNAL's rotary embedding, which turns queries and keys [T, heads * D] in place."""
    assert is_neox_style and query.is_contiguous() and key.is_contiguous(), "the other style is not used"
    assert cos_sin_cache.shape[-1] == head_size and query.dtype == key.dtype
    cos, sin = cos_sin_cache[positions].float().chunk(2, -1)  # [T, D / 2]
    for x in (query, key):
        first, second = x.unflatten(-1, (-1, head_size)).float().chunk(2, -1)
        turned = (first * cos[:, None] - second * sin[:, None], second * cos[:, None] + first * sin[:, None])
        x.copy_(torch.cat(turned, -1).flatten(1).to(x.dtype))


# --- attention with a paged cache ------------------------------------------------------------------------------------


@stand_in("atb")
def _npu_reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor
) -> None:
    """Stands for NNAL's write of new keys and values into the slots of the cache's blocks."""
    assert slot_indices.dtype == torch.int32 and len(slot_indices) == len(key) == len(value)
    kept = slot_indices >= 0
    slots = slot_indices[kept].long()
    for cache, new in ((key_cache, key), (value_cache, value)):
        cache.flatten(0, 1)[slots] = new[kept].to(cache.dtype)


@stand_in("npu")
def npu_fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    pse_shift: Tensor | None = None,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    block_table: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = stand_ins.NO_LIMIT,
    next_tokens: int = stand_ins.NO_LIMIT,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    block_size: int = 0,
    **unused: Any,
) -> tuple[Tensor, Tensor]:
    """Stands for the attention of an engine: of whole prompts, or of new tokens over the blocks of the cache; and, in
    both directions (``sparse_mode`` 0, without a mask), for that of a tower that sees pictures.

    Keys are [T, K, D] with cumulative ends, or with ``block_table`` [blocks, rows, K * D] with a length for each
    sequence. The real kernel takes halves only; float32 is allowed here so that figures can be compared closely.
    """
    assert pse_shift is None and not any(value not in (None, 0, False) for value in unused.values()), unused
    assert input_layout == "TND" and query.dtype == key.dtype == value.dtype
    assert query.dim() == 3 and query.shape[1] == num_heads and num_heads % num_key_value_heads == 0
    assert pre_tokens == next_tokens == stand_ins.NO_LIMIT and sparse_mode in (0, 3), "not used"
    is_causal = sparse_mode == 3
    assert (atten_mask is not None) == is_causal
    if atten_mask is not None:
        assert atten_mask.dtype == torch.int8 and torch.equal(atten_mask.bool(), MASK)
    assert actual_seq_lengths is not None and actual_seq_lengths_kv is not None
    ends, kv_ends = list(actual_seq_lengths), list(actual_seq_lengths_kv)
    assert ends[-1] == len(query) and ends == sorted(ends), "cumulative, all queries"
    outputs = []
    for number, (start, end) in enumerate(pairwise([0, *ends])):
        if block_table is None:
            own = slice(kv_ends[number - 1] if number else 0, kv_ends[number])
            k, v = key[own], value[own]
        else:
            assert block_table.dtype == torch.int32 and key.shape[1] == block_size and block_size % 16 == 0
            blocks = block_table[number, : -(-kv_ends[number] // block_size)].long()
            k, v = (
                x[blocks].flatten(0, 1)[: kv_ends[number]].unflatten(-1, (num_key_value_heads, -1))
                for x in (key, value)
            )
        q = query[start:end]
        hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1) & is_causal
        outputs.append(stand_ins._attend(stand_ins._scores(q, k, scale, hidden), v)[0])
    return torch.cat(outputs).to(query.dtype), query.new_empty(0, dtype=torch.float32)


# --- experts ---------------------------------------------------------------------------------------------------------


@stand_in("_C_ascend")
def moe_gating_top_k(
    x: Tensor,
    k: int,
    k_group: int,
    group_count: int,
    group_select_mode: int,
    renorm: int,
    norm_type: int,
    out_flag: bool,
    routed_scaling_factor: float,
    eps: float,
    bias_opt: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Stands for the router: from logits [T, E] the weights and numbers of ``k`` experts for each token."""
    assert k_group == group_count == 1 and norm_type == 0 and bias_opt is None and not out_flag, "not used"
    scores = x.float().softmax(-1)
    weights, experts = scores.topk(k, -1)
    if renorm:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return (weights * routed_scaling_factor).to(x.dtype), experts.int(), scores


@stand_in("_C_ascend")
def npu_moe_init_routing_custom(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = 0,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Stands for the way to the experts: rows by expert, where each (token, choice) went, rows of each expert."""
    assert scale is offset is None and quant_mode == -1 and drop_pad_mode == row_idx_type == 0, "not used"
    assert expert_tokens_num_type == 1 and expert_tokens_num_flag and expert_idx.dtype == torch.int32
    assert list(active_expert_range) == [0, expert_num], "experts elsewhere are not used"
    order = expert_idx.flatten().long().argsort(stable=True)
    places = torch.empty_like(expert_idx.flatten())
    places[order] = torch.arange(len(order), dtype=torch.int32)
    counts = torch.bincount(expert_idx.flatten().long(), minlength=expert_num)
    return x[order // expert_idx.shape[1]], places, counts, x.new_empty(len(order), dtype=torch.float32)


@stand_in("npu")
def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> Tensor:
    """Stands for the way back from the experts: the weighted sum of each token's rows."""
    assert probs is not None and not padded_mode and sorted_indices.dtype == torch.int32
    grouped = permuted_tokens.float()[sorted_indices.long()].unflatten(0, probs.shape)
    return (grouped * probs.float()[..., None]).sum(1).to(permuted_tokens.dtype)


@stand_in("atb")
def _npu_matmul_add_fp32(x: Tensor, weight: Tensor, C: Tensor) -> None:  # noqa: N803 - the operator's name for it
    """Stands for NNAL's product that is added in float32; vllm-ascend warms it up and does not use it after."""
    C += x.float().t() @ weight.float()


# --- Triton ----------------------------------------------------------------------------------------------------------


class SlotMapping:
    """Stands for vLLM's Triton kernel that says where in the cache every token goes; launched ``kernel[grid](...)``."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.run

    def run(
        self,
        num_tokens: int,
        max_num_tokens: int,
        query_start_loc: Tensor,
        positions: Tensor,
        block_table: Tensor,
        block_table_stride: int,
        block_size: int,
        slot_mapping: Tensor,
        *,
        TOTAL_CP_WORLD_SIZE: int,  # noqa: N803
        PAD_ID: int,  # noqa: N803
        **unused: Any,
    ) -> None:
        assert TOTAL_CP_WORLD_SIZE == 1, "context parallelism is not used"
        slot_mapping[num_tokens:max_num_tokens] = PAD_ID
        for number, (start, end) in enumerate(pairwise(query_start_loc.tolist())):
            own = positions[start:end]
            slot_mapping[start:end] = block_table[number, own // block_size] * block_size + own % block_size
