"""Updated weights that the data-parallel ranks collect from each other while the next forward pass already runs.

Megatron waits for a weight where the module that holds it is called. Some weights are read without such a call, which
for a model of several buckets would be too early, or, for experts, never: these are waited for here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from mega_rl.megatron.layers.fused import GroupedExperts
from mega_rl.megatron.model.transformer import PolicyModel


def wait_before_reading(wrapped: DistributedDataParallel, model: PolicyModel) -> None:
    """Have the experts, and the output layer that the head multiplies with, complete before they are read."""
    wait = wrapped._make_forward_pre_hook()
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            module.register_forward_pre_hook(partial(_wait_for, wait, list(module.local_experts.modules())))
    if model.post_process:
        readers = [model.output_layer]
        model.decoder.final_layernorm.register_forward_pre_hook(partial(_wait_for, wait, readers))


def _wait_for(wait: Callable[[Any], None], holders: Sequence[torch.nn.Module], *_: Any) -> None:
    for module in holders:
        wait(module)
