"""A loss of our own: PPO's hard clip replaced by a gate that closes gradually."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # no ratio is infinite


def soft_gate(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    tau_good: float = 1.0,
    tau_bad: float = 1.05,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``-4 / tau * sigmoid(tau (r - 1)) * A`` with ``r = exp(logp - logp_old)``, per token.

    Source: SAPO, arXiv 2511.20347. At r = 1 the gradient is that of the policy gradient, and it falls to 0 as r moves
    away, faster the larger tau is, which is ``tau_good`` where A is positive and ``tau_bad`` elsewhere.
    """
    ratio_T = (logprobs_T - old_logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    tau_T = torch.where(advantages_T > 0, tau_good, tau_bad)
    gate_T = torch.sigmoid(tau_T * (ratio_T - 1.0))
    openness_T = 4.0 * gate_T * (1.0 - gate_T)  # 1 at r = 1
    return -4.0 / tau_T * gate_T * advantages_T, {"openness": openness_T}
