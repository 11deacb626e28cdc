"""Correction for sampling under another policy than pi_old: another engine, noise, or older weights.

Letters in names: T packed tokens of a micro-batch, B its sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from mega_rl.algorithms.reduce import sequence_sum

MAX_LOG_WEIGHT = 20.0  # e^20 = 4.9e8: a larger weight is outside any bound, and must not overflow on the way there


def token_log_weights(old_logprobs_T: Tensor, rollout_logprobs_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """``logp_old - logp_rollout`` [T], detached: each token by itself, which is biased but of low variance."""
    return (old_logprobs_T - rollout_logprobs_T).detach()


def sequence_log_weights(
    old_logprobs_T: Tensor, rollout_logprobs_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """``sum over learnt tokens of (logp_old - logp_rollout)`` of its sequence, at every token [T], detached.

    The exact weight of a whole response (a product of ratios, not their geometric mean), of high variance.
    """
    return sequence_sum((old_logprobs_T - rollout_logprobs_T).detach(), mask_T, cu_seqlens)


LOG_WEIGHTS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "token": token_log_weights,
    "sequence": sequence_log_weights,
}


def truncated_weights(log_weights_T: Tensor, floor: float, cap: float) -> tuple[Tensor, Tensor]:
    """``min(w, cap)`` [T] with ``w = exp(log weight)``, and where the cap decides; the floor has no part in it.

    Source: Ionides, "Truncated importance sampling" (2008); for a rollout engine that differs from the trainer, "TIS".
    The exponent is capped first, so that it cannot overflow.

    Args:
        log_weights_T: [T], one of `LOG_WEIGHTS`.
        cap: largest weight, > 0.
    """
    assert cap > 0, cap
    return log_weights_T.clamp_max(math.log(cap)).exp(), log_weights_T > math.log(cap)


def masked_weights(log_weights_T: Tensor, floor: float, cap: float) -> tuple[Tensor, Tensor]:
    """``w`` where ``floor <= w <= cap`` and 0 outside [T] with ``w = exp(log weight)``, and where it is outside.

    Source: masked importance sampling, as in IcePop (Ring-1T, arXiv 2510.18855). What is masked still counts in the
    denominators.

    Args:
        log_weights_T: [T], one of `LOG_WEIGHTS`.
        floor, cap: bounds of the weights that are kept, 0 <= floor < cap.
    """
    assert 0 <= floor < cap, (floor, cap)
    is_outside_T = log_weights_T > math.log(cap)
    if floor > 0:
        is_outside_T = is_outside_T | (log_weights_T < math.log(floor))
    weights_T = log_weights_T.clamp_max(MAX_LOG_WEIGHT).exp()
    return torch.where(is_outside_T, 0.0, weights_T), is_outside_T


CORRECTIONS: dict[str, Callable[[Tensor, float, float], tuple[Tensor, Tensor]]] = {
    "truncate": truncated_weights,
    "mask": masked_weights,
}
