"""What a training launch writes down, for a process that does not import Megatron (which would choose its platform)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

NUM_STEPS = 4


@dataclass
class Figures:
    """Of one family at one layout."""

    logprobs: list[list[torch.Tensor]]  # rank -> micro-batch -> [T] under the starting weights
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)  # rank -> local name -> after the last step
    operators: dict[str, int] = field(default_factory=dict)  # of rank 0 in forward, backward and steps; {} on the CPU
    num_microbatches: int = 0  # of rank 0, a step
    has_mindspeed: bool = False  # MindSpeed has patched Megatron-core
