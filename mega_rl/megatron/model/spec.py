"""What a Megatron model is built from besides its shape, its layout and its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mega_rl.config.schema.device import Layers
from mega_rl.config.schema.learning import RouterConfig, TuningConfig, VisionConfig
from mega_rl.config.schema.sections import MemoryConfig, ParallelConfig


@dataclass(frozen=True)
class TrainerSpec:
    """One model in the trainer; several that differ can be built in one process.

    Example: ``TrainerSpec(torch.float32, ParallelConfig(), MemoryConfig(), temperature=1.0, chunk_tokens=1024)``
    """

    dtype: torch.dtype  # of parameters and activations
    parallel: ParallelConfig
    memory: MemoryConfig
    temperature: float  # logits are divided by it before they become log-probabilities
    chunk_tokens: int  # bounds the float32 logits, in tokens: what is held at once, also kept for the backward pass
    fields: Mapping[str, Any] = field(default_factory=dict)  # more fields of Megatron's configuration, checked ones
    tuning: TuningConfig = field(default_factory=TuningConfig)  # which weights are trained
    router: RouterConfig = field(default_factory=RouterConfig)  # what routers of experts learn besides
    vision: VisionConfig = field(default_factory=VisionConfig)  # which weights of a tower are trained with the rest
    seed: int = 0  # of the first values of adapters
    layers: Layers = "local"
    entropy_has_gradient: bool = True  # False: the loss does not differentiate the entropy, which spares a pass
