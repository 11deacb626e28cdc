"""Rounding that keeps the mean: up with the probability of the part that is cut off."""

from __future__ import annotations

import torch
from torch import Tensor

NUM_BITS = 16  # of a float32 that bfloat16 cuts off


def round_stochastically(values: Tensor, bits: Tensor) -> Tensor:
    """Finite float32 to bfloat16: add random bits, int32 in [0, 2^16), to those that are cut off, then truncate."""
    kept = (values.contiguous().view(torch.int32) + bits) & -(1 << NUM_BITS)
    return kept.view(torch.float32).to(torch.bfloat16)
