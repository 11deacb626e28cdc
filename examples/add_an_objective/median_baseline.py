"""An advantage of our own: how much better a sample is than the middle one of its group."""

from __future__ import annotations

import torch
from torch import Tensor


def median_baseline(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """``R - median of the group``; one sample of luck moves it less than it moves a mean."""
    advantages_N = torch.zeros_like(rewards_N)
    for group in groups_N.unique():
        known_N = (groups_N == group) & ~rewards_N.isnan()
        if known_N.any():
            advantages_N[known_N] = rewards_N[known_N] - rewards_N[known_N].median()
    return advantages_N
