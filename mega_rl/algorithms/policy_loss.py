"""Policy-gradient losses, per token: PPO's clip, GSPO's sequence ratio, CISPO's clipped weight.

Every one returns the loss [T], unmasked, and detached per-token figures [T]: ``ratio``, ``ppo_kl``
(``logp_old - logp``), ``clip_fraction`` (1 where the clip decides the loss or its weight) and ``dual_clip_fraction``
(likewise for the dual clip). Reduction and masking come after, see `reduce`.

Letters in names: T packed tokens of a micro-batch, B its sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mega_rl.algorithms.reduce import sequence_sum

# e^20 = 4.9e8: finite in every dtype we compute in, and far outside any clip range. Without the bound, an infinite
# ratio multiplied by the zero gradient of the branch that the minimum did not take would be NaN.
MAX_LOG_RATIO = 20.0
FIGURES = ("ratio", "ppo_kl", "clip_fraction", "dual_clip_fraction")


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
    return loss_T, _figures(ratio_T, log_ratio_T, clipped_T, dual_clipped_T)


def gspo_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)`` with ``s = exp(mean over tokens of (logp - logp_old))``.

    Source: GSPO, arXiv 2507.18071, equations 5 to 7. The loss of a sequence stands at each of its tokens, so that
    `sequence_mean` of it is the paper's objective. ``ratio`` is s.

    Args:
        mask_T: [T], 1 on the learnt tokens, over which the mean is taken.
        cu_seqlens: [B+1] cumulative lengths with the leading 0; no sequence is cut.

    The other arguments are those of `ppo_clip_loss`.
    """
    log_ratio_T = logprobs_T - old_logprobs_T
    num_tokens_T = sequence_sum(torch.ones_like(mask_T), mask_T, cu_seqlens).clamp_min(1.0)
    log_s_T = sequence_sum(log_ratio_T, mask_T, cu_seqlens) / num_tokens_T
    s_T = log_s_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    free_loss_T = -s_T * advantages_T
    bound_loss_T = -s_T.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_T
    clipped_T = bound_loss_T > free_loss_T
    loss_T = torch.maximum(free_loss_T, bound_loss_T)
    return loss_T, _figures(s_T, log_ratio_T, clipped_T, torch.zeros_like(clipped_T))


def cispo_loss(
    logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """``-stopgrad(clip(r, 1 - clip_low, 1 + clip_high)) A logp`` with ``r = exp(logp - logp_old)``, per token.

    Source: CISPO, MiniMax-M1, arXiv 2506.13585, equations 4 and 5: a token outside the bounds keeps its gradient, with
    the bound as weight. ``clip_low`` 1 means no lower bound. Arguments as `ppo_clip_loss`.
    """
    log_ratio_T = (logprobs_T - old_logprobs_T).detach()
    ratio_T = log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weights_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_T = -weights_T * advantages_T * logprobs_T
    return loss_T, _figures(ratio_T, log_ratio_T, weights_T != ratio_T, torch.zeros_like(weights_T))


def figures_of(logprobs_T: Tensor, old_logprobs_T: Tensor) -> dict[str, Tensor]:
    """The figures of a loss that tells none: its ratios, none of them clipped."""
    log_ratio_T = (logprobs_T - old_logprobs_T).detach()
    never_T = torch.zeros_like(log_ratio_T)
    return _figures(log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), log_ratio_T, never_T, never_T)


def _figures(ratio_T: Tensor, log_ratio_T: Tensor, clipped_T: Tensor, dual_clipped_T: Tensor) -> dict[str, Tensor]:
    clips = clipped_T.to(ratio_T.dtype), dual_clipped_T.to(ratio_T.dtype)
    return dict(zip(FIGURES, (ratio_T.detach(), -log_ratio_T.detach(), *clips), strict=True))
