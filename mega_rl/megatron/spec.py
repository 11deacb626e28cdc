"""What a Megatron model is built from besides its shape, its layout and its weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mega_rl.config.schema import MemoryConfig, ParallelConfig


@dataclass(frozen=True)
class TrainerSpec:
    """One model in the trainer; several that differ can be built in one process.

    Example: ``TrainerSpec(torch.float32, ParallelConfig(), MemoryConfig(), temperature=1.0, chunk_tokens=1024)``
    """

    dtype: torch.dtype  # of parameters and activations
    parallel: ParallelConfig
    memory: MemoryConfig
    temperature: float  # logits are divided by it before they become log-probabilities
    chunk_tokens: int  # bounds the working memory: at most the float32 logits of so many tokens are held at once
