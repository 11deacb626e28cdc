"""Per-token estimators of KL(policy || reference) from samples of the policy.

Source of k1, k2, k3: J. Schulman, "Approximating KL divergence" (2020). Letters in names: T packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MAX_EXPONENT = 20.0  # e^20 = 4.9e8; beyond it k3 stays constant, with zero gradient, instead of overflowing


def k1(logprobs_T: Tensor, reference_logprobs_T: Tensor) -> Tensor:
    """``logp - logp_ref`` [T], nats: unbiased, of either sign."""
    return logprobs_T - reference_logprobs_T


def k2(logprobs_T: Tensor, reference_logprobs_T: Tensor) -> Tensor:
    """``(logp - logp_ref)^2 / 2`` [T], nats: biased, never negative; its gradient is that of the KL itself."""
    return k1(logprobs_T, reference_logprobs_T).square() / 2


def k3(logprobs_T: Tensor, reference_logprobs_T: Tensor) -> Tensor:
    """``exp(-k1) + k1 - 1`` [T], nats: unbiased, never negative, of low variance.

    ``expm1`` keeps the digits that ``exp(-k1) - 1`` loses when policy and reference nearly agree.
    """
    difference_T = k1(logprobs_T, reference_logprobs_T).clamp_min(-MAX_EXPONENT)
    return (torch.expm1(-difference_T) + difference_T).clamp_min(0.0)


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
