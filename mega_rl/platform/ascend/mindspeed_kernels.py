"""MindSpeed's fused operators in the place of torch_npu's, one by one; ``mindspeed`` says which of them a run wants.

Each is reached by the module and the name that MindSpeed core_r0.16.0 has, with the arguments that it takes there. One
that is not there, or that its compiler cannot build, leaves torch_npu's own in its place. Letters as in
``operators.torch_kernels``.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from mega_rl.errors import InputError
from mega_rl.platform.operators.npu_kernels import CAUSAL_AT_THE_END, DIRECT, AscendKernels

NO_LIMIT = 2147483647  # of tokens before and after a query; the mask decides
HALVES = 0  # rotary mode
Kernel = Callable[..., Any]


def _attention(module: Any) -> dict[str, Kernel]:
    forward = module.dot_product_attention_forward_impl

    def attention(
        q_THD: Tensor,
        k_SKD: Tensor,
        v_SKD: Tensor,
        query_ends: list[int],
        key_ends: list[int],
        mask: Tensor | None,
        softmax_scale: float,
    ) -> Tensor:
        mode = CAUSAL_AT_THE_END if mask is not None else 0
        layer = SimpleNamespace(  # what the function reads of Megatron's attention layer
            config=SimpleNamespace(sparse_mode=mode, pre_tockens=NO_LIMIT, next_tockens=NO_LIMIT),
            softmax_scale=softmax_scale,
            attention_dropout=SimpleNamespace(p=0.0),
        )
        packing = SimpleNamespace(cu_seqlens_q=query_ends, cu_seqlens_kv=key_ends)
        output: Tensor = forward(layer, q_THD, k_SKD, v_SKD, mask, packed_seq_params=packing)
        return output

    return {"attention": attention}


def _rms_norm(module: Any) -> dict[str, Kernel]:
    norm = module.RMSNorm.fused_rmsnorm
    config = SimpleNamespace(layernorm_zero_centered_gamma=False)

    def rms_norm(x: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
        normed: Tensor = norm(SimpleNamespace(config=config, weight=weight_D, eps=epsilon), x)
        return normed

    return {"rms_norm": rms_norm}


def _swiglu(module: Any) -> dict[str, Kernel]:
    return {"swiglu": module.fused_swiglu}


def _compiled(builder: Any) -> Any:
    """What MindSpeed compiles for this machine, now rather than in the first layer of a run."""
    try:
        return builder.load(verbose=False)
    except Exception as error:
        if os.environ.get("ASCEND_HOME_PATH"):
            raise
        raise InputError("it is compiled, and ASCEND_HOME_PATH names no CANN: source its set_env.sh") from error


def _rotary(module: Any) -> dict[str, Kernel]:
    function = module.npu_rotary_position_embedding
    _compiled(module.rope_op_builder)

    def rotary(x_1THD: Tensor, cos_1T1D: Tensor, sin_1T1D: Tensor) -> Tensor:
        rotated: Tensor = function(x_1THD.contiguous(), cos_1T1D, sin_1T1D, HALVES)
        return rotated

    return {"rotary": rotary}


def _grouped_product(module: Any) -> dict[str, Kernel]:
    """The compiled function itself: the one in Python wants the weights copied into one tensor, and keeps it."""
    compiled = _compiled(module.GMMFunction.builder).npu_gmm

    def grouped_product(left: Tensor, right: list[Tensor], ends_E: Tensor, group_type: int) -> Tensor:
        if len(ends_E) == 1:  # which MindSpeed's documentation rules out
            return DIRECT.grouped_product(left, right, ends_E, group_type)
        product: Tensor = compiled([left], right, [], ends_E, group_type, 0)[0]
        return product

    return {"grouped_product": grouped_product}


def _permutation(module: Any) -> dict[str, Kernel]:
    apply, revert = module.MoePermuteMaskMap.apply, module.MoeUnpermuteMaskMap.apply

    def permute(x_TD: Tensor, is_routed_TE: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        rows_ND, _, order_N = apply(x_TD, is_routed_TE, None, num_rows, False)
        return rows_ND, order_N

    def unpermute(rows_ND: Tensor, order_N: Tensor, is_routed_TE: Tensor) -> Tensor:
        shape = [is_routed_TE.shape[0], rows_ND.shape[1]]
        tokens_TD: Tensor = revert(rows_ND, order_N, shape, None, is_routed_TE, False)
        return tokens_TD

    return {"permute": permute, "unpermute": unpermute}


@dataclass(frozen=True)
class Offer:
    """One operator of MindSpeed's, under the name of its feature."""

    what: str
    module: str
    take: Callable[[Any], dict[str, Kernel]]  # from the module; AttributeError where it lacks something
    direct: str  # what stands in its place otherwise


OFFERS = {
    "use_flash_attn": Offer(
        "attention",
        "mindspeed.core.transformer.flash_attention.flash_attention.adaptor",
        _attention,
        "npu_fusion_attention",
    ),
    "use_fused_rmsnorm": Offer("norms", "mindspeed.core.fusions.fused_rms_norm", _rms_norm, "npu_rms_norm"),
    "use_fused_swiglu": Offer("SwiGLU", "mindspeed.core.fusions.fused_bias_swiglu", _swiglu, "npu_swiglu"),
    "use_fused_rotary_pos_emb": Offer(
        "rotary embedding", "mindspeed.ops.npu_rotary_position_embedding", _rotary, "npu_rotary_mul"
    ),
    "moe_grouped_gemm": Offer("experts' products", "mindspeed.ops.gmm", _grouped_product, "npu_grouped_matmul"),
    "moe_permute_fusion": Offer(
        "tokens to experts and back",
        "mindspeed.te.pytorch.permutation",
        _permutation,
        "npu_moe_token_permute_with_routing_map",
    ),
}


@dataclass(frozen=True)
class Taken:
    kernels: AscendKernels
    lines: list[str]  # one for each operator: whose it is, and why
    missing: Mapping[str, str]  # the wanted operators that are not MindSpeed's -> why


def take(unwanted: Collection[str]) -> Taken:
    """Every operator by MindSpeed that it has and that is not unwanted; after its adaptor, as some import Megatron."""
    kernels, lines, missing = DIRECT, [], {}
    for name, offer in OFFERS.items():
        reason = "is false"
        if name not in unwanted:
            try:
                kernels = replace(kernels, **offer.take(importlib.import_module(offer.module)))
                lines.append(f"  {offer.what} by MindSpeed ({name}: {offer.module})")
                continue
            except Exception as error:  # noqa: BLE001 - a vendor's package, and a compiler, raise what they like
                missing[name] = (str(error).splitlines() or [type(error).__name__])[0]
                reason = f"cannot be used ({missing[name]})"
        lines.append(f"  {offer.what} by torch_npu's {offer.direct}, called directly: {name} {reason}")
    return Taken(kernels, lines, missing)
