"""Carrying out a tuning plan on a model: adapters are put on, and everything that is not trained is frozen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mega_rl.bridge.mapping.megatron import chunk_prefix, chunk_series, own_name
from mega_rl.bridge.mapping.tensors import hf_tensors
from mega_rl.bridge.mapping.tuning import TuningPlan
from mega_rl.bridge.series import slices_of
from mega_rl.megatron.tuning.adapter import Adapter, attach
from mega_rl.models.shape import ModelShape
from mega_rl.parallel.layout import ParallelLayout


def tune(
    chunks: Sequence[torch.nn.Module], plan: TuningPlan, shape: ModelShape, layout: ParallelLayout, seed: int
) -> dict[str, Adapter]:
    """Freeze what the plan does not train and attach its adapters; before Megatron's wrapper looks for parameters.

    Returns:
        Local weight -> its adapter.
    """
    adapters: dict[str, Adapter] = {}
    if plan.is_full:
        return adapters
    sizes = hf_tensors(shape)
    for number, chunk in enumerate(chunks):
        series = chunk_series(shape, layout, dist.get_rank(), number)
        trained = {piece.local_name for piece in slices_of(series) if piece.hf_name in plan.trained}
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(own_name(name) in trained)
        own = attach(chunk, series, plan.adapters, sizes, seed)
        adapters |= {chunk_prefix(layout, number) + name: adapter for name, adapter in own.items()}
        _let_recomputation_differentiate(chunk)
    return adapters


def _let_recomputation_differentiate(chunk: Any) -> None:
    """Megatron's recomputation gives no gradient at all to a block whose input needs none, without a word.

    So with a frozen embedding its output claims to need one. Later pipeline stages get inputs that do.
    """
    if chunk.config.recompute_granularity is None or not chunk.pre_process:
        return
    if not any(parameter.requires_grad for parameter in chunk.embedding.parameters()):
        chunk.embedding.register_forward_hook(_claim_gradient)


def _claim_gradient(_: torch.nn.Module, __: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output
