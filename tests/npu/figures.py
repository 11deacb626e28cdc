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
    host_reads: dict[str, int] = field(default_factory=dict)  # of rank 0 in one forward and backward pass
    num_microbatches: int = 0  # of rank 0, a step
    has_mindspeed: bool = False  # MindSpeed has patched Megatron-core


@dataclass
class Routing:
    """The experts of trainer and engine for the same tokens, in one dtype; (token, layer) pairs are counted."""

    pairs: int
    differing: dict[str, int]  # "replayed" or "free" -> pairs for which the trainer's router prefers other experts
    missed: float  # the largest distance in the trainer's logits of an expert of the engine's from being chosen
    margin: float  # the median distance in logits of the last expert that is chosen from the first that is not
    largest: dict[str, float]  # "replayed" or "free" -> difference of log-probabilities, nats
    mean: dict[str, float]
