"""The operators by Ascend's fused kernels: torch_npu's own, or others with the same arguments in their place.

The kernels accept wrong layouts, head counts and rotary modes, and return meaningless numbers: what
``platform.dispatch`` does not check for every platform is checked here. Limits are those of the operators'
documentation, for the 910B and 910C. Letters as in ``torch_kernels``.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mega_rl.errors import InputError
from mega_rl.platform.operators.attention import VarlenPacking, once_per_tensor, read_borders
from mega_rl.platform.operators.torch_kernels import GroupedMatmul, TorchOperators

MAX_SEQUENCES = 1000  # of one npu_fusion_attention call in the layout TND
MAX_HEADS = 256
MAX_WIDTH = 768  # of a head
MAX_ROTARY_WIDTH = 894
MAX_ROTARY_HEADS = 999
MAX_WEIGHTS = 128  # in a list; one stacked tensor may hold more
ROWS, REDUCED_ROWS = 0, 2  # group_type: experts own rows of the result, or rows that the product sums over
ONE_RESULT = 3  # split_item
CUMULATIVE = 0  # group_list_type: ends, not lengths
CAUSAL_AT_THE_END = 3  # sparse_mode


def _torch_npu() -> Any:
    """torch_npu, imported on first use: on other machines its import fails or takes over devices."""
    return importlib.import_module("torch_npu")


@functools.cache
def _causal_mask(device: torch.device) -> Tensor:
    """What sparse modes 2 to 4 take for sequences of any length; True is hidden."""
    return torch.ones(2048, 2048, dtype=torch.bool).triu(1).to(device)


@once_per_tensor
def _fused_calls(cu_seqlens: Tensor) -> list[tuple[slice, list[int]]]:
    """For each call the tokens it takes, and where its sequences end among them."""
    positions = read_borders(cu_seqlens).positions
    calls = []
    for first in range(0, len(positions) - 1, MAX_SEQUENCES):
        start, *ends = positions[first : first + MAX_SEQUENCES + 1]
        calls.append((slice(start, ends[-1]), [end - start for end in ends]))
    return calls


def _check_heads(q: Tensor, v: Tensor) -> None:
    num_heads, width = q.shape[-2:]
    if width > MAX_WIDTH:
        raise InputError(f"heads are {width} wide; attention on Ascend takes at most {MAX_WIDTH}")
    if v.shape[-1] > width:
        raise InputError(f"values are {v.shape[-1]} wide; attention on Ascend takes at most the queries' {width}")
    if num_heads > MAX_HEADS:
        raise InputError(f"attention on Ascend takes at most {MAX_HEADS} heads, not {num_heads}")


def _as_list(weights_FD: Sequence[Tensor], is_transposed: bool) -> list[Tensor]:
    """Weights as the operator takes them: matrices one by one, without a copy, if it can take them so."""
    if weights_FD[0].dtype != torch.float32 and len(weights_FD) <= MAX_WEIGHTS:
        return [weight_FD.t() for weight_FD in weights_FD] if is_transposed else list(weights_FD)
    weights_EFD = torch.stack(list(weights_FD))
    return [weights_EFD.transpose(1, 2) if is_transposed else weights_EFD]


class _AddRmsNorm(torch.autograd.Function):
    """The operator has no gradient of its own; this one is that of the norm, and the same for both summands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight_D: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        normed, reciprocal, total = _torch_npu().npu_add_rms_norm(x, residual, weight_D, epsilon)
        ctx.save_for_backward(total, weight_D, reciprocal)
        return normed, total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        (to_normed, to_total), (total, weight_D, reciprocal) = gradients, ctx.saved_tensors
        through_norm, to_weight_D = _torch_npu().npu_rms_norm_backward(to_normed, total, weight_D, reciprocal)
        to_summand = through_norm + to_total
        return to_summand, to_summand, to_weight_D.to(weight_D.dtype), None


def _attention(
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    query_ends: list[int],
    key_ends: list[int],
    mask: Tensor | None,
    softmax_scale: float,
) -> Tensor:
    """Of one call's sequences; causal with ``_causal_mask``, without a mask every key is seen."""
    return _torch_npu().npu_fusion_attention(
        q_THD,
        k_SKD,
        v_SKD,
        head_num=q_THD.shape[1],
        input_layout="TND",
        atten_mask=mask,
        scale=softmax_scale,  # its default is 1
        keep_prob=1.0,
        actual_seq_qlen=query_ends,
        actual_seq_kvlen=key_ends,
        sparse_mode=CAUSAL_AT_THE_END if mask is not None else 0,
    )[0]


def _rms_norm(x: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    return _torch_npu().npu_rms_norm(x, weight_D, epsilon=epsilon)[0]


def _swiglu(gate_and_up: Tensor) -> Tensor:
    return _torch_npu().npu_swiglu(gate_and_up, dim=-1)


def _rotary(x_1THD: Tensor, cos_1T1D: Tensor, sin_1T1D: Tensor) -> Tensor:
    return _torch_npu().npu_rotary_mul(x_1THD, cos_1T1D, sin_1T1D, rotary_mode="half")


def _grouped_product(left: Tensor, right: list[Tensor], ends_E: Tensor, group_type: int) -> Tensor:
    return _torch_npu().npu_grouped_matmul(
        [left], right, group_list=ends_E, split_item=ONE_RESULT, group_type=group_type, group_list_type=CUMULATIVE
    )[0]


def _permute(x_TD: Tensor, is_routed_TE: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    rows_ND, _, order_N = _torch_npu().npu_moe_token_permute_with_routing_map(
        x_TD, is_routed_TE, num_out_tokens=num_rows, drop_and_pad=False
    )
    return rows_ND, order_N


def _unpermute(rows_ND: Tensor, order_N: Tensor, is_routed_TE: Tensor) -> Tensor:
    return _torch_npu().npu_moe_token_unpermute_with_routing_map(
        rows_ND, order_N, [is_routed_TE.shape[0], rows_ND.shape[1]], routing_map=is_routed_TE, drop_and_pad=False
    )


@dataclass(frozen=True)
class AscendKernels:
    """What ``AscendOperators`` calls once it has checked the arguments; by default torch_npu, directly."""

    attention: Callable[..., Tensor] = _attention
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = _rms_norm
    swiglu: Callable[[Tensor], Tensor] = _swiglu
    rotary: Callable[[Tensor, Tensor, Tensor], Tensor] = _rotary
    grouped_product: Callable[[Tensor, list[Tensor], Tensor, int], Tensor] = _grouped_product
    permute: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]] = _permute
    unpermute: Callable[[Tensor, Tensor, Tensor], Tensor] = _unpermute


DIRECT = AscendKernels()


@dataclass(frozen=True)
class _Products:
    """``GroupedProducts`` by the kernel for grouped products."""

    kernel: Callable[[Tensor, list[Tensor], Tensor, int], Tensor]

    def rows(self, x_ND: Tensor, weights_FD: Sequence[Tensor], ends_E: Tensor, is_transposed: bool) -> Tensor:
        return self.kernel(x_ND, _as_list(weights_FD, is_transposed), ends_E, ROWS)

    def sums(self, grad_NF: Tensor, x_ND: Tensor, ends_E: Tensor) -> Tensor:
        return self.kernel(grad_NF.t(), [x_ND], ends_E, REDUCED_ROWS)


class AscendOperators(TorchOperators):
    def __init__(self, kernels: AscendKernels = DIRECT) -> None:
        self.kernels = kernels

    def varlen_attention(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, packing: VarlenPacking, *, softmax_scale: float, causal: bool
    ) -> Tensor:
        _check_heads(q_THD, v_SKD)
        mask = _causal_mask(q_THD.device) if causal else None
        outputs = [
            self.kernels.attention(q_THD[queries], k_SKD[keys], v_SKD[keys], query_ends, key_ends, mask, softmax_scale)
            for (queries, query_ends), (keys, key_ends) in zip(
                _fused_calls(packing.cu_seqlens_q), _fused_calls(packing.cu_seqlens_k), strict=True
            )
        ]
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def rms_norm(self, x: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
        return self.kernels.rms_norm(x, weight_D, epsilon)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight_D: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        return _AddRmsNorm.apply(x, residual, weight_D, epsilon)

    def swiglu(self, gate_and_up: Tensor) -> Tensor:
        if gate_and_up.numel() == 0:  # an expert-parallel rank without tokens
            return super().swiglu(gate_and_up)
        return self.kernels.swiglu(gate_and_up)

    def rotary(self, x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        _, num_heads, width = x_THD.shape
        if width > MAX_ROTARY_WIDTH or num_heads > MAX_ROTARY_HEADS:
            raise InputError(
                f"rotary embedding on Ascend takes at most {MAX_ROTARY_HEADS} heads of width {MAX_ROTARY_WIDTH}, not "
                f"{num_heads} of {width}"
            )
        cos_1T1D, sin_1T1D = cos_TD[None, :, None], sin_TD[None, :, None]
        return self.kernels.rotary(x_THD[None], cos_1T1D, sin_1T1D)[0]

    def grouped_matmul(self, x_ND: Tensor, weights_FD: Sequence[Tensor], ends_E: Tensor) -> Tensor:
        return GroupedMatmul.apply(_Products(self.kernels.grouped_product), x_ND, ends_E, *weights_FD)

    def permute_tokens(self, x_TD: Tensor, is_routed_TE: Tensor, experts_per_token: int) -> tuple[Tensor, Tensor]:
        """The order here is the row of every token's first, second, ... expert."""
        return self.kernels.permute(x_TD, is_routed_TE, len(x_TD) * experts_per_token)

    def unpermute_tokens(self, rows_ND: Tensor, order_N: Tensor, is_routed_TE: Tensor) -> Tensor:
        return self.kernels.unpermute(rows_ND, order_N, is_routed_TE)
