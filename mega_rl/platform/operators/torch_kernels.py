"""Every operator of ``platform.operators`` in plain torch, for the CPU and for platforms that have no kernel for it.

Letters: T rows (tokens), S packed keys, H query heads, K key/value heads, D width, F width of a gate, E experts, N rows
sorted by expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_rl.platform.operators.attention import VarlenPacking, sdpa_attention


class _Swiglu(torch.autograd.Function):
    """``silu(gate) * up`` that keeps only its input, with a gradient in three passes."""

    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_and_up)
        gate, up = gate_and_up.chunk(2, -1)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (grad,), (gate_and_up,) = gradients, ctx.saved_tensors
        gate, up = gate_and_up.chunk(2, -1)
        gradient = torch.empty_like(gate_and_up, memory_format=torch.contiguous_format)
        to_gate, to_up = gradient.chunk(2, -1)
        torch.mul(grad, F.silu(gate), out=to_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=to_gate)
        return gradient


class _Permute(torch.autograd.Function):
    """Copies of tokens, with a gradient that adds the copies up in one order, always the same.

    autograd's own gradient adds them by atomic operations on CUDA, in an order that varies from run to run.
    """

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, tokens_N: Tensor, order_N: Tensor) -> Tensor:
        ctx.save_for_backward(order_N)
        ctx.num_tokens = len(x_TD)
        return x_TD.index_select(0, tokens_N)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (order_N,) = ctx.saved_tensors
        return _sums_by_token(gradients[0], order_N, ctx.num_tokens), None, None


class _Unpermute(torch.autograd.Function):
    """The reverse of ``_Permute``, gradient included."""

    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, order_N: Tensor, num_tokens: int) -> Tensor:
        ctx.save_for_backward(order_N)
        return _sums_by_token(rows_ND, order_N, num_tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (order_N,), (grad_TD,) = ctx.saved_tensors, gradients
        tokens_N = torch.empty_like(order_N)
        tokens_N[order_N] = torch.arange(len(order_N), device=order_N.device) // (len(order_N) // len(grad_TD))
        return grad_TD.index_select(0, tokens_N), None, None


def _sums_by_token(rows_ND: Tensor, order_N: Tensor, num_tokens: int) -> Tensor:
    """The sum of every token's rows, which ``order_N`` names token by token, equally many each: [T, D]."""
    return F.embedding_bag(order_N.view(num_tokens, -1), rows_ND, mode="sum")


class TorchOperators:
    """The arguments have been checked by ``platform.operators``, whose docstrings say what each operator means."""

    def varlen_attention(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, packing: VarlenPacking, *, softmax_scale: float, causal: bool
    ) -> Tensor:
        return sdpa_attention(q_THD, k_SKD, v_SKD, packing, softmax_scale=softmax_scale, causal=causal)

    def rms_norm(self, x: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
        return F.rms_norm(x, weight_D.shape, weight_D, epsilon)

    def swiglu(self, gate_and_up: Tensor) -> Tensor:
        return _Swiglu.apply(gate_and_up)

    def rotary(self, x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        first, second = x_THD.chunk(2, -1)
        rotated_THD = torch.cat((-second, first), dim=-1)
        return x_THD * cos_TD[:, None] + rotated_THD * sin_TD[:, None]

    def grouped_matmul(self, x_ND: Tensor, weights_FD: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
        parts = zip(x_ND.split(list(counts)), weights_FD, strict=True)
        return torch.cat([F.linear(part_ND, weight_FD) for part_ND, weight_FD in parts])

    def permute_tokens(self, x_TD: Tensor, is_routed_TE: Tensor, experts_per_token: int) -> tuple[Tensor, Tensor]:
        """The order here is the row of every token's first, second, ... expert."""
        num_tokens, num_experts = is_routed_TE.shape
        is_routed_ET = is_routed_TE.t()
        tokens_ET = torch.arange(num_tokens, device=x_TD.device).expand(num_experts, -1)
        rows_ET = is_routed_ET.flatten().cumsum(0).view(num_experts, num_tokens) - 1
        order_N = rows_ET.t().masked_select(is_routed_TE)
        return _Permute.apply(x_TD, tokens_ET.masked_select(is_routed_ET), order_N), order_N

    def unpermute_tokens(self, rows_ND: Tensor, order_N: Tensor, is_routed_TE: Tensor) -> Tensor:
        return _Unpermute.apply(rows_ND, order_N, is_routed_TE.shape[0])
