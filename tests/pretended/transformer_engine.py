"""What Megatron-core's layers for TransformerEngine look like, pretended: that library needs CUDA and is not installed.

Names and shapes of parameters and of the tensors in a checkpoint are the real ones (``TELayerNormColumnParallelLinear``
of Megatron-core 0.16, a ``LayerNormLinear`` of TransformerEngine); what computes is this trainer's own. Nothing here
says anything about the numbers or the speed of TransformerEngine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor

from mega_rl.platform import dispatch as operators


class PretendedNormedLinear(ColumnParallelLinear):
    """A linear layer that norms its input with a weight of its own."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **others: Any) -> None:
        super().__init__(input_size, output_size, config=config, **others)
        self.layer_norm_weight: Any = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel

    def forward(self, input_: Tensor, *others: Any, **keywords: Any) -> Any:
        normed = operators.rms_norm(input_, self.layer_norm_weight, self.config.layernorm_epsilon)
        return super().forward(normed, *others, **keywords)


class PretendedProvider(LocalSpecProvider):
    """In the place of ``TESpecProvider``."""

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return PretendedNormedLinear


@contextmanager
def pretended_engine() -> Iterator[None]:
    """Inside, Megatron-core takes TransformerEngine for installed where it makes the specs of layers."""
    specs: Any = gpt_layer_specs
    assert not specs.HAVE_TE, "it is installed: no need to pretend"
    specs.HAVE_TE, specs.TESpecProvider = True, PretendedProvider
    try:
        yield
    finally:
        specs.HAVE_TE = False
        del specs.TESpecProvider
