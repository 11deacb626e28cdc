"""Every operator of ``platform.dispatch`` in plain torch, for the CPU and for platforms that have no kernel for it.

Letters: T rows (tokens), S packed keys, H query heads, K key/value heads, D width, F width of a gate, E experts, N rows
sorted by expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

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


def chosen_experts(is_routed_TE: Tensor, experts_per_token: int) -> Tensor:
    """int64 [T, K]: the experts of every token, ascending; the host does not wait for how many there are."""
    num_experts = is_routed_TE.shape[1]
    ranks_E = torch.arange(num_experts, 0, -1, device=is_routed_TE.device, dtype=torch.float32)
    return (is_routed_TE * ranks_E).topk(experts_per_token, dim=1).indices


def _sums_by_token(rows_ND: Tensor, order_N: Tensor, num_tokens: int) -> Tensor:
    """The sum of every token's rows, which ``order_N`` names token by token, equally many each: [T, D]."""
    return F.embedding_bag(order_N.view(num_tokens, -1), rows_ND, mode="sum")


class GroupedProducts(Protocol):
    """The two products of a platform's fused kernel, of which neither has a gradient of its own."""

    def rows(self, x_ND: Tensor, weights_FD: Sequence[Tensor], ends_E: Tensor, is_transposed: bool) -> Tensor:
        """Each expert's rows times its weight or, as linear layers want it, its weight transposed."""
        ...

    def sums(self, grad_NF: Tensor, x_ND: Tensor, ends_E: Tensor) -> Tensor:
        """``grad.t() @ x`` of each expert's rows: [E, F, D]; whatever it likes for experts without rows."""
        ...


class GroupedMatmul(torch.autograd.Function):
    """Keeps the weights as they are: no copy of those of a whole layer lives until the backward pass."""

    @staticmethod
    def forward(ctx: Any, products: GroupedProducts, x_ND: Tensor, ends_E: Tensor, *weights_FD: Tensor) -> Tensor:
        ctx.save_for_backward(x_ND, ends_E, *weights_FD)
        ctx.products = products
        if len(x_ND) == 0:
            return x_ND.new_zeros(0, weights_FD[0].shape[0])
        return products.rows(x_ND, weights_FD, ends_E, is_transposed=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad_NF,), (x_ND, ends_E, *weights_FD) = gradients, ctx.saved_tensors
        if len(x_ND) == 0:
            return None, torch.zeros_like(x_ND), None, *(torch.zeros_like(weight_FD) for weight_FD in weights_FD)
        grad_NF, grad_x_ND = grad_NF.contiguous(), None
        if ctx.needs_input_grad[1]:
            grad_x_ND = ctx.products.rows(grad_NF, weights_FD, ends_E, is_transposed=False)
        if not any(ctx.needs_input_grad[3:]):
            return None, grad_x_ND, None, *(None for _ in weights_FD)
        parts_EFD = ctx.products.sums(grad_NF, x_ND, ends_E)
        # Nothing says what the kernels write for an expert without rows.
        is_idle_E = ends_E == torch.cat([ends_E.new_zeros(1), ends_E[:-1]])
        return None, grad_x_ND, None, *parts_EFD.masked_fill_(is_idle_E[:, None, None], 0.0).unbind()


class TorchOperators:
    """The arguments have been checked by ``platform.dispatch``, whose docstrings say what each operator means."""

    def varlen_attention(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, packing: VarlenPacking, *, softmax_scale: float, causal: bool
    ) -> Tensor:
        return sdpa_attention(q_THD, k_SKD, v_SKD, packing, softmax_scale=softmax_scale, causal=causal)

    def rms_norm(self, x: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
        return F.rms_norm(x, weight_D.shape, weight_D, epsilon)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight_D: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        total = residual + x
        return self.rms_norm(total, weight_D, epsilon), total

    def swiglu(self, gate_and_up: Tensor) -> Tensor:
        return _Swiglu.apply(gate_and_up)

    def rotary(self, x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        first, second = x_THD.chunk(2, -1)
        rotated_THD = torch.cat((-second, first), dim=-1)
        return x_THD * cos_TD[:, None] + rotated_THD * sin_TD[:, None]

    def grouped_matmul(self, x_ND: Tensor, weights_FD: Sequence[Tensor], ends_E: Tensor) -> Tensor:
        counts = [end - start for start, end in pairwise([0, *ends_E.tolist()])]
        parts = zip(x_ND.split(counts), weights_FD, strict=True)
        return torch.cat([F.linear(part_ND, weight_FD) for part_ND, weight_FD in parts])

    def permute_tokens(self, x_TD: Tensor, is_routed_TE: Tensor, experts_per_token: int) -> tuple[Tensor, Tensor]:
        """The order here is the row of every token's first, second, ... expert."""
        num_tokens, num_experts = is_routed_TE.shape
        rows_ET = is_routed_TE.t().flatten().cumsum(0).view(num_experts, num_tokens) - 1
        order_N = rows_ET.t().gather(1, chosen_experts(is_routed_TE, experts_per_token)).flatten()
        tokens_N = torch.empty_like(order_N)
        tokens_N[order_N] = torch.arange(len(order_N), device=x_TD.device) // experts_per_token
        return _Permute.apply(x_TD, tokens_N, order_N), order_N

    def unpermute_tokens(self, rows_ND: Tensor, order_N: Tensor, is_routed_TE: Tensor) -> Tensor:
        return _Unpermute.apply(rows_ND, order_N, is_routed_TE.shape[0])
