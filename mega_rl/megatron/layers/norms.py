"""The norms of the layers, and how a layer adds the attention's output and normalises the sum by one operator.

Megatron's layer has three places in its spec for that: ``self_attn_bda`` adds, ``pre_mlp_layernorm`` normalises the
sum, ``mlp_bda`` adds the MLP's output to the sum. Here the first only notes what is to be added; the second adds and
normalises at once; the third takes the sum from the note. Between them Megatron hands the note on as its hidden states.

A layer's other sum, that with the MLP's output, leaves the layer as a tensor: Megatron makes it viewless, sends it to
the next pipeline stage and keeps it for recomputation, and features of pictures are added to it. Its norm is in the
next layer, or behind the last one. So this sum and its norm are two operators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mega_rl.platform import dispatch as operators

WithBias = tuple[Tensor, Tensor | None]


class RMSNorm(torch.nn.Module):
    """RMSNorm for the local spec: Megatron's own wrapper refuses sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Megatron sums the gradients of marked parameters over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return operators.rms_norm(x, self.weight, self.eps)


@dataclass
class PendingSum:
    """The hidden states between attention and MLP: at first the two parts of a sum, then the sum."""

    parts: tuple[Tensor, Tensor] | None
    total: Tensor | None = None


class SumNorm(RMSNorm):
    """``pre_mlp_layernorm``: adds the parts, notes their sum and returns its norm."""

    def forward(self, pending: PendingSum) -> Tensor:  # type: ignore[override]
        assert pending.parts is not None
        normed, pending.total = operators.add_rms_norm(*pending.parts, self.weight, self.eps)
        pending.parts = None  # their memory is free while the MLP runs
        return normed


def note_parts(training: bool, fused: bool) -> Callable[[WithBias, Tensor, float], PendingSum]:
    """``self_attn_bda``."""
    return _note_parts


def _note_parts(output_with_bias: WithBias, residual: Tensor, dropout: float) -> PendingSum:
    output, bias = output_with_bias
    assert bias is None and dropout == 0.0, "these models have neither here"
    return PendingSum((output, residual))


def add_to_total(training: bool, fused: bool) -> Callable[[WithBias, PendingSum, float], Tensor]:
    """``mlp_bda``."""
    add = get_bias_dropout_add(training, fused)
    return lambda output_with_bias, pending, dropout: add(output_with_bias, pending.total, dropout)


def use_in_layer(layer: Any) -> None:
    """Let a layer's submodules add and normalise before the MLP by one operator."""
    layer.self_attn_bda, layer.pre_mlp_layernorm, layer.mlp_bda = note_parts, SumNorm, add_to_total
