"""The operators that have fused kernels, one name each: checked here, computed by the platform of this process.

Wrong arguments raise ValueError. A fused kernel may accept them and return meaningless numbers, so every platform
refuses the same ones; a platform refuses what only it cannot do with InputError. ``platform.operators.reference``
writes out what each operator computes. Letters as in ``torch_kernels``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mega_rl import platform
from mega_rl.platform.operators.attention import VarlenPacking, check_arguments
from mega_rl.platform.operators.torch_kernels import TorchOperators


def _own() -> TorchOperators:
    return platform.current().operators


def _shapes(**tensors: Tensor) -> str:
    return ", ".join(f"{name} {list(x.shape)} {str(x.dtype).removeprefix('torch.')}" for name, x in tensors.items())


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    causal: bool,
) -> Tensor:
    """Attention within each of B packed sequences, in flash-attention's terms, differentiable.

    Args:
        q: [T, H, D].
        k, v: [S, K, D]; H is a multiple of K, and the values may have another width.
        cu_seqlens_q, cu_seqlens_k: int32 [B + 1] on the device, where sequences begin, from 0 to T or S. They are read
            once for all layers, so they must not be written to; one tensor may serve as both.
        max_seqlen_q, max_seqlen_k: length of the longest sequence, or more.
        softmax_scale: what the scores are multiplied by; usually ``D ** -0.5``.
        causal: a query sees the keys up to its own position, the last query being at its sequence's last key.

    Returns:
        [T, H, D of the values].
    """
    packing = VarlenPacking(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    check_arguments(q, k, v, packing, causal)
    return _own().varlen_attention(q, k, v, packing, softmax_scale=softmax_scale, causal=causal)


def rms_norm(x: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """``x / sqrt(mean(x^2) + epsilon) * weight`` along the last dimension, in the dtype of both."""
    _check_norm("rms_norm", x, weight_D, epsilon)
    return _own().rms_norm(x, weight_D, epsilon)


def add_rms_norm(x: Tensor, residual: Tensor, weight_D: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """``rms_norm`` of ``x + residual``, and that sum, in the dtype of all."""
    _check_norm("add_rms_norm", x, weight_D, epsilon)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(f"add_rms_norm takes two summands of one shape and dtype: {_shapes(x=x, residual=residual)}")
    return _own().add_rms_norm(x, residual, weight_D, epsilon)


def _check_norm(name: str, x: Tensor, weight_D: Tensor, epsilon: float) -> None:
    if x.dim() < 2 or weight_D.shape != x.shape[-1:] or weight_D.dtype != x.dtype:
        raise ValueError(f"{name} takes [..., D] and a weight [D] of the same dtype: {_shapes(x=x, weight=weight_D)}")
    if epsilon <= 0:
        raise ValueError(f"{name} needs an epsilon above 0, not {epsilon}")


class _WeightedSwiglu(torch.autograd.Function):
    """Keeps only the input and the weights, and computes the product again for the gradient."""

    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor, weights_T: Tensor) -> Tensor:
        ctx.save_for_backward(gate_and_up, weights_T)
        return (_own().swiglu(gate_and_up) * weights_T[:, None]).to(gate_and_up.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (grad,), (gate_and_up, weights_T) = gradients, ctx.saved_tensors
        # Routers give their weights in float32 whatever the model computes in; so is the gradient, up to its last step.
        dtype = torch.promote_types(grad.dtype, weights_T.dtype)
        with torch.enable_grad():
            wide = gate_and_up.to(dtype).detach().requires_grad_()
            product = _own().swiglu(wide)
        (to_input,) = torch.autograd.grad(product, wide, grad.to(dtype) * weights_T[:, None])
        to_weights_T = (product.detach() * grad).sum(-1)
        return to_input.to(gate_and_up.dtype), to_weights_T.to(weights_T.dtype)


def swiglu(gate_and_up: Tensor, weights_T: Tensor | None = None) -> Tensor:
    """``silu(gate) * up``, times the weight of each row if given: [..., 2 F] -> [..., F].

    Args:
        gate_and_up: the gate first; [T, 2 F] with weights.
        weights_T: of any float dtype; the result keeps the input's.
    """
    if gate_and_up.shape[-1] % 2:
        raise ValueError(f"swiglu takes a gate and as wide an input beside it: {_shapes(x=gate_and_up)}")
    if weights_T is None:
        return _own().swiglu(gate_and_up)
    if gate_and_up.dim() != 2 or weights_T.shape != gate_and_up.shape[:1]:
        raise ValueError(f"swiglu takes one weight for each row: {_shapes(x=gate_and_up, weights=weights_T)}")
    return _WeightedSwiglu.apply(gate_and_up, weights_T)


def rotary(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotary embedding of every head, the first half of its width paired with the second: [T, H, D].

    Args:
        cos_TD, sin_TD: of every token's angles, each half of them repeated; in the dtype of x, without gradient.
    """
    if x_THD.dim() != 3 or x_THD.shape[2] % 2:
        raise ValueError(f"rotary takes [tokens, heads, an even width]: {_shapes(x=x_THD)}")
    expected = (x_THD.shape[0], x_THD.shape[2])
    if any(table.shape != expected or table.dtype != x_THD.dtype for table in (cos_TD, sin_TD)):
        raise ValueError(f"rotary takes tables {list(expected)} like x: {_shapes(x=x_THD, cos=cos_TD, sin=sin_TD)}")
    if cos_TD.requires_grad or sin_TD.requires_grad:
        raise ValueError("rotary has no gradient for its angles")
    return _own().rotary(x_THD, cos_TD, sin_TD)


def grouped_matmul(x_ND: Tensor, weights_FD: Sequence[Tensor], ends_E: Tensor) -> Tensor:
    """The rows up to ``ends_E[0]`` times the first weight transposed, the next by the second, ...: [N, F].

    Args:
        weights_FD: of E experts, as linear layers hold them.
        ends_E: int64 on the device, where the rows of every expert end; the last number is N. Nobody waits for them.
    """
    if not weights_FD or ends_E.shape != (len(weights_FD),) or ends_E.dtype != torch.int64:
        raise ValueError(f"one end for each of {len(weights_FD)} weights, in int64: {_shapes(ends=ends_E)}")
    first = weights_FD[0]
    if x_ND.dim() != 2 or first.dim() != 2 or x_ND.shape[1] != first.shape[1] or x_ND.dtype != first.dtype:
        raise ValueError(f"grouped_matmul takes [N, D], weights [F, D] of its dtype: {_shapes(x=x_ND, weight=first)}")
    if any(weight.shape != first.shape or weight.dtype != first.dtype for weight in weights_FD):
        raise ValueError("the weights of grouped_matmul need one shape and dtype")
    if ends_E.device.type == "cpu":  # elsewhere: a wait
        ends = ends_E.tolist()
        if ends != sorted(ends) or ends[0] < 0 or ends[-1] != x_ND.shape[0]:
            raise ValueError(f"ends must rise from 0 or more to {x_ND.shape[0]}, the number of rows: {ends}")
    return _own().grouped_matmul(x_ND, weights_FD, ends_E)


def permute_tokens(x_TD: Tensor, is_routed_TE: Tensor, experts_per_token: int) -> tuple[Tensor, Tensor]:
    """Copies of the tokens sorted by expert, and their order for ``unpermute_tokens`` of the same platform.

    Args:
        is_routed_TE: bool, ``experts_per_token`` of every row are True.

    Returns:
        [N, D], by expert and then by token, N being ``T * experts_per_token``; and an integer tensor [N].
    """
    _check_routing(x_TD, is_routed_TE)
    if not 1 <= experts_per_token <= is_routed_TE.shape[1]:
        raise ValueError(f"{experts_per_token} experts for every token, of {is_routed_TE.shape[1]}")
    if is_routed_TE.device.type == "cpu" and not bool((is_routed_TE.sum(1) == experts_per_token).all()):
        raise ValueError(f"every row of the routing map must hold {experts_per_token} experts")  # elsewhere: a wait
    return _own().permute_tokens(x_TD, is_routed_TE, experts_per_token)


def unpermute_tokens(rows_ND: Tensor, order_N: Tensor, is_routed_TE: Tensor) -> Tensor:
    """The sum of every token's rows, as ``permute_tokens`` sorted them: [T, D]."""
    if rows_ND.dim() != 2 or order_N.shape != rows_ND.shape[:1] or is_routed_TE.dim() != 2:
        raise ValueError(f"unpermute_tokens takes [N, D] and an order [N]: {_shapes(rows=rows_ND, order=order_N)}")
    num_tokens = is_routed_TE.shape[0]
    if num_tokens == 0 or rows_ND.shape[0] % num_tokens:
        raise ValueError(f"{rows_ND.shape[0]} rows are no whole number for each of {num_tokens} tokens")
    return _own().unpermute_tokens(rows_ND, order_N, is_routed_TE)


def _check_routing(x_TD: Tensor, is_routed_TE: Tensor) -> None:
    if x_TD.dim() != 2 or is_routed_TE.dim() != 2 or is_routed_TE.dtype != torch.bool:
        raise ValueError(f"tokens are [T, D], their routing bool [T, E]: {_shapes(x=x_TD, routing=is_routed_TE)}")
    if x_TD.shape[0] != is_routed_TE.shape[0]:
        raise ValueError(f"one row of the routing map for each token: {_shapes(x=x_TD, routing=is_routed_TE)}")
