"""The clipped policy-gradient loss, per token.

Letters in names: T packed tokens of a micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

# e^20 = 4.9e8: finite in every dtype we compute in, and far outside any clip range. Without the bound, an infinite
# ratio multiplied by the zero gradient of the branch that the minimum did not take would be NaN.
MAX_LOG_RATIO = 20.0


def ppo_clip_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` with ``r = exp(logp - logp_old)``, per token.

    Source: PPO, arXiv 1707.06347, equation 7; separate bounds ("clip-higher") as in DAPO, arXiv 2503.14476.
    With ``dual_clip = c > 1`` the loss of a token with a negative advantage is at most ``-c A`` (arXiv 1912.09729).

    Args:
        logprobs_T: [T] nats, with gradient.
        old_logprobs_T: [T] nats, without gradient: pi_old.
        advantages_T: [T].
        clip_low, clip_high: distances from 1, both >= 0.
        dual_clip: c, or None for off.

    Returns:
        The loss [T], unmasked, and detached per-token figures [T]: ``ratio``, ``ppo_kl`` (``logp_old - logp``),
        ``clip_fraction`` (1 where the clip decides the loss) and ``dual_clip_fraction`` (likewise for the dual clip).
    """
    log_ratio_T = logprobs_T - old_logprobs_T
    ratio_T = log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    free_loss_T = -ratio_T * advantages_T
    bound_loss_T = -ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_T
    loss_T = torch.maximum(free_loss_T, bound_loss_T)
    clipped_T = bound_loss_T > free_loss_T
    dual_clipped_T = torch.zeros_like(clipped_T)
    if dual_clip is not None:
        assert dual_clip > 1.0, dual_clip
        ceiling_T = -dual_clip * advantages_T
        dual_clipped_T = (advantages_T < 0) & (loss_T > ceiling_T)
        loss_T = torch.where(dual_clipped_T, ceiling_T, loss_T)
    figures = {
        "ratio": ratio_T.detach(),
        "ppo_kl": -log_ratio_T.detach(),
        "clip_fraction": clipped_T.to(loss_T.dtype),
        "dual_clip_fraction": dual_clipped_T.to(loss_T.dtype),
    }
    return loss_T, figures
