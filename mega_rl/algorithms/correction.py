"""Correction for sampling under another policy than pi_old: another engine, noise, or older weights.

Letters in names: T packed tokens.
"""

from __future__ import annotations

import math

from torch import Tensor


def truncated_importance_weights(old_logprobs_T: Tensor, rollout_logprobs_T: Tensor, cap: float) -> Tensor:
    """``min(exp(logp_old - logp_rollout), cap)`` [T], detached; the exponent is capped first, so it cannot overflow.

    Source: truncated importance sampling for a mismatched rollout engine, as in decoupled PPO (arXiv 2110.00641) with
    the truncation of Ionides (2008).

    Args:
        old_logprobs_T: [T] nats under pi_old, as the trainer computes it.
        rollout_logprobs_T: [T] nats, as the engine reported when it sampled.
        cap: largest weight, > 0.
    """
    assert cap > 0, cap
    return (old_logprobs_T - rollout_logprobs_T).detach().clamp_max(math.log(cap)).exp()
