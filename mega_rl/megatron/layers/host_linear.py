"""Megatron's linear layers on a CPU, with the matrix products of ``platform.operators.products``.

Letters: T rows (tokens), D inputs, F outputs of a layer.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mega_rl.platform.operators import products


def _gathered(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The rows of all tensor-parallel ranks, which are split along the first dimension."""
    whole = part.new_empty(part.shape[0] * group.size(), *part.shape[1:])
    dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
    return whole


class _HostLinear(torch.autograd.Function):
    """What Megatron's ``LinearWithGradAccumulationAndAsyncCommunication`` computes."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_FD: Tensor,
        bias_F: Tensor | None,
        sums_input_gradient: bool,
        sequence_parallel: bool,
        group: Any,
    ) -> Tensor:
        ctx.save_for_backward(x, weight_FD)
        ctx.sums_input_gradient, ctx.sequence_parallel, ctx.group = sums_input_gradient, sequence_parallel, group
        rows = _gathered(x, group) if sequence_parallel else x
        output = products.outputs(rows.flatten(0, -2), weight_FD).view(*rows.shape[:-1], len(weight_FD))
        return output if bias_F is None else output + bias_F

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_FD = ctx.saved_tensors
        grad = gradients[0].contiguous()
        grad_TF = grad.flatten(0, -2)
        to_x, to_weight, to_bias, waiting = None, None, None, None
        if ctx.needs_input_grad[0]:
            to_x = products.input_gradient(grad_TF, weight_FD).view(*grad.shape[:-1], weight_FD.shape[1])
            if ctx.sums_input_gradient:
                waiting = dist.all_reduce(to_x, group=ctx.group, async_op=True)
            elif ctx.sequence_parallel:
                whole, to_x = to_x, torch.empty_like(x)
                waiting = dist.reduce_scatter_tensor(to_x, whole, group=ctx.group, async_op=True)
        if ctx.needs_input_grad[1]:
            rows = _gathered(x, ctx.group) if ctx.sequence_parallel else x
            to_weight = products.weight_gradient(grad_TF, rows.flatten(0, -2))
        if ctx.needs_input_grad[2]:
            to_bias = grad_TF.sum(0)
        if waiting is not None:
            waiting.wait()
        return to_x, to_weight, to_bias, None, None, None


def install(layers: Any) -> None:
    """Put it in the place of both linear functions of Megatron's module ``tensor_parallel.layers``.

    A frozen weight has no gradient either way. Products into the gradient buffer (``gradient_accumulation_fusion``) and
    gradients that are computed later stay Megatron's.
    """
    original = layers.linear_with_grad_accumulation_and_async_allreduce

    @functools.wraps(original)
    def linear(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        grad_output_buffer: list[Tensor] | None = None,
        wgrad_deferral_limit: int | None = 0,
        tp_group: Any = None,
    ) -> Any:
        if grad_output_buffer is None and not (gradient_accumulation_fusion and weight.requires_grad):
            group = layers.get_tensor_model_parallel_group_if_none(tp_group)
            return _HostLinear.apply(input, weight, bias, allreduce_dgrad, sequence_parallel, group)
        switches = (gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel)
        return original(input, weight, bias, *switches, grad_output_buffer, wgrad_deferral_limit, tp_group=tp_group)

    layers.linear_with_grad_accumulation_and_async_allreduce = layers.linear_with_frozen_weight = linear
