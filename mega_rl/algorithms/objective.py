"""The objectives that the trainer is given as callables: per-token terms put together, then reduced once.

An objective returns its share of the loss (already divided by a global denominator, see `reduce`) and metrics of the
micro-batch: detached sums over learnt tokens, for the caller to add over micro-batches and data-parallel ranks and to
divide by the global number of learnt tokens. A metric whose name ends in ``_max`` is combined by the maximum instead.

Letters in names: T packed tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.algorithms.correction import CORRECTIONS, LOG_WEIGHTS
from mega_rl.algorithms.kl import KL_ESTIMATORS
from mega_rl.algorithms.policy_loss import cispo_loss, gspo_loss, ppo_clip_loss
from mega_rl.algorithms.reduce import REDUCTIONS, Denominators, masked_sum, token_mean
from mega_rl.types import Microbatch, TokenStats

OBJECTIVES = ("ppo", "gspo", "cispo")
MAX_SUFFIX = "_max"  # ends the name of a metric that is combined by the maximum, not the sum; none of them is negative


@dataclass(frozen=True, kw_only=True)
class PolicyObjective:
    """A clipped policy gradient with a KL term, an entropy bonus and importance weights.

    ``reduce(w * policy_loss + kl_coefficient * kl - entropy_coefficient * entropy)``, where w corrects for tokens that
    were sampled by the engine (log-probabilities ``rollout``) and not by pi_old.
    """

    objective: str = "ppo"  # one of OBJECTIVES
    clip_low: float  # distance of the lower ratio bound from 1
    clip_high: float  # distance of the upper ratio bound from 1
    dual_clip: float | None  # c > 1, ppo only; None: off
    kl_coefficient: float  # of the term in the loss; not 0: the micro-batch must carry reference_logprobs
    kl_estimator: str  # a key of KL_ESTIMATORS
    entropy_coefficient: float
    importance_cap: float | None  # largest importance weight; None: weights are 1. Set: needs rollout_logprobs
    importance_correction: str = "truncate"  # a key of CORRECTIONS: what happens outside the bounds
    importance_level: str = "token"  # a key of LOG_WEIGHTS
    importance_floor: float = 0.0  # smallest weight that "mask" keeps
    reduction: str  # a key of REDUCTIONS

    def __post_init__(self) -> None:
        assert self.objective in OBJECTIVES, self.objective
        assert self.dual_clip is None or self.objective == "ppo", self
        assert self.kl_estimator in KL_ESTIMATORS, self.kl_estimator
        assert self.importance_correction in CORRECTIONS, self.importance_correction
        assert self.importance_level in LOG_WEIGHTS, self.importance_level
        assert self.reduction in REDUCTIONS, self.reduction

    def __call__(
        self, stats: TokenStats, microbatch: Microbatch, denominators: Denominators
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [] with gradient, and detached metrics [] that are sums over the learnt tokens.

        The micro-batch must carry ``advantages``; where its ``old_logprobs`` are None the step is on-policy and pi_old
        is the policy itself. Metrics: ``pg_loss`` (with its importance weight), ``entropy``, ``ratio``, ``ppo_kl``
        (``logp_old - logp``), ``clip_fraction``, ``dual_clip_fraction``, ``ratio_max``; ``kl`` where the micro-batch
        carries reference_logprobs; ``importance_weight``, ``importance_bounded`` (1 where a bound decides the weight),
        ``rollout_kl`` (``logp_rollout - logp``), ``rollout_logprob_abs_diff`` and its maximum where it carries
        rollout_logprobs.
        """
        logprobs_T, mask_T = stats.logprobs, microbatch.loss_mask
        assert microbatch.advantages is not None, "a policy objective needs advantages"
        old_logprobs_T = logprobs_T.detach() if microbatch.old_logprobs is None else microbatch.old_logprobs
        pg_loss_T, figures = self._policy_loss(logprobs_T, old_logprobs_T, microbatch.advantages, microbatch)
        maxima = {"ratio": figures["ratio"]}

        weights_T, mismatch = self._importance(logprobs_T.detach(), old_logprobs_T, microbatch)
        figures.update(mismatch)
        if "rollout_logprob_abs_diff" in mismatch:
            maxima["rollout_logprob_abs_diff"] = mismatch["rollout_logprob_abs_diff"]
        if weights_T is not None:
            pg_loss_T = weights_T * pg_loss_T

        loss_T = pg_loss_T
        if microbatch.reference_logprobs is not None:
            kl_T = KL_ESTIMATORS[self.kl_estimator](logprobs_T, microbatch.reference_logprobs)
            figures["kl"] = kl_T
            if self.kl_coefficient != 0:
                loss_T = loss_T + self.kl_coefficient * kl_T
        else:
            assert self.kl_coefficient == 0, "a KL term needs reference log-probabilities"
        if self.entropy_coefficient != 0:
            loss_T = loss_T - self.entropy_coefficient * stats.entropy

        figures |= {"pg_loss": pg_loss_T, "entropy": stats.entropy}
        metrics = {name: masked_sum(values_T.detach(), mask_T) for name, values_T in figures.items()}
        for name, values_T in maxima.items():
            metrics[name + MAX_SUFFIX] = torch.where(mask_T != 0, values_T.detach(), 0.0).amax()
        loss = REDUCTIONS[self.reduction](loss_T, mask_T, microbatch.cu_seqlens, denominators)
        return loss, metrics

    def _policy_loss(
        self, logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, microbatch: Microbatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        bounds = (self.clip_low, self.clip_high)
        match self.objective:
            case "gspo":
                mask_T, cu_seqlens = microbatch.loss_mask, microbatch.cu_seqlens
                return gspo_loss(logprobs_T, old_logprobs_T, advantages_T, mask_T, cu_seqlens, *bounds)
            case "cispo":
                return cispo_loss(logprobs_T, old_logprobs_T, advantages_T, *bounds)
        return ppo_clip_loss(logprobs_T, old_logprobs_T, advantages_T, *bounds, self.dual_clip)

    def _importance(
        self, logprobs_T: Tensor, old_logprobs_T: Tensor, microbatch: Microbatch
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Weights [T] (None: all 1), and figures [T] of how far the sampling policy is from the present one."""
        if microbatch.rollout_logprobs is None:
            assert self.importance_cap is None, "importance weights need the engine's log-probabilities"
            return None, {}
        rollout_kl_T = microbatch.rollout_logprobs - logprobs_T
        figures = {"rollout_kl": rollout_kl_T, "rollout_logprob_abs_diff": rollout_kl_T.abs()}
        if self.importance_cap is None:
            return None, figures | {"importance_weight": torch.ones_like(old_logprobs_T)}
        log_weights_T = LOG_WEIGHTS[self.importance_level](
            old_logprobs_T, microbatch.rollout_logprobs, microbatch.loss_mask, microbatch.cu_seqlens
        )
        correct = CORRECTIONS[self.importance_correction]
        weights_T, is_bounded_T = correct(log_weights_T, self.importance_floor, self.importance_cap)
        return weights_T, figures | {"importance_weight": weights_T, "importance_bounded": is_bounded_T.to(weights_T)}


@dataclass(frozen=True)
class SftObjective:
    """Cross entropy, averaged over the learnt tokens of the global batch."""

    def __call__(
        self, stats: TokenStats, microbatch: Microbatch, denominators: Denominators
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [] with gradient, and detached sums [] over the learnt tokens: ``nll`` and ``entropy``, both nats."""
        nll_T, mask_T = -stats.logprobs, microbatch.loss_mask
        loss = token_mean(nll_T, mask_T, microbatch.cu_seqlens, denominators)
        metrics = {"nll": nll_T.detach(), "entropy": stats.entropy.detach()}
        return loss, {name: masked_sum(values_T, mask_T) for name, values_T in metrics.items()}
