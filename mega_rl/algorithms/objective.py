"""The objectives that the trainer is given as callables: per-token terms put together, then reduced once.

An objective returns its share of the loss (already divided by a global denominator, see `reduce`) and `Figures` of the
micro-batch: sums over learnt tokens, for the caller to add over micro-batches and data-parallel ranks and to divide by
the global number of learnt tokens, and maxima. ``observe.metrics.declared`` says under which names they are logged.

Letters in names: T packed tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mega_rl.algorithms.correction import CORRECTIONS, LOG_WEIGHTS, MAX_LOG_WEIGHT
from mega_rl.algorithms.kl import KL_ESTIMATORS
from mega_rl.algorithms.own import PolicyLoss
from mega_rl.algorithms.policy_loss import cispo_loss, gspo_loss, ppo_clip_loss
from mega_rl.algorithms.reduce import REDUCTIONS, Denominators, masked_sum, token_mean
from mega_rl.microbatch import Figures, Microbatch, TokenStats
from mega_rl.own_code import is_own

POOLED = "pooled/"  # begins the names of sums that are added up over all minibatches of a step before they say anything
# The built-in losses of ``algorithm.objective``: functions that keep the contract in `own`.
OBJECTIVES: dict[str, Callable[..., tuple[Tensor, dict[str, Tensor]]]] = {
    "ppo": ppo_clip_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
}


def policy_loss(name: str) -> PolicyLoss:
    """The loss behind a value of ``algorithm.objective``; InputError: a user's own is not there."""
    return PolicyLoss(name, OBJECTIVES.get(name))


@dataclass(frozen=True, kw_only=True)
class PolicyObjective:
    """A clipped policy gradient with a KL term, an entropy bonus and importance weights.

    ``reduce(w * policy_loss + kl_coefficient * kl - entropy_coefficient * entropy)``, where w corrects for tokens that
    were sampled by the engine (log-probabilities ``rollout``) and not by pi_old.
    """

    objective: str = "ppo"  # a key of OBJECTIVES, or the name of a user's function
    clip_low: float  # distance of the lower ratio bound from 1
    clip_high: float  # distance of the upper ratio bound from 1
    dual_clip: float | None  # c > 1, of ppo or a user's function; None: off
    kl_coefficient: float  # of the term in the loss; not 0: the micro-batch must carry reference_logprobs
    kl_estimator: str  # a key of KL_ESTIMATORS
    entropy_coefficient: float
    importance_cap: float | None  # largest importance weight; None: weights are 1. Set: needs rollout_logprobs
    importance_correction: str = "truncate"  # a key of CORRECTIONS: what happens outside the bounds
    importance_level: str = "token"  # a key of LOG_WEIGHTS
    importance_floor: float = 0.0  # smallest weight that "mask" keeps
    reduction: str  # a key of REDUCTIONS
    num_ages: int = 0  # a micro-batch that carries staleness is also told of by it, from 0 to num_ages - 1

    def __post_init__(self) -> None:
        assert self.objective in OBJECTIVES or is_own(self.objective), self.objective
        assert self.dual_clip is None or self.objective not in ("gspo", "cispo"), self
        assert self.kl_estimator in KL_ESTIMATORS, self.kl_estimator
        assert self.importance_correction in CORRECTIONS, self.importance_correction
        assert self.importance_level in LOG_WEIGHTS, self.importance_level
        assert self.reduction in REDUCTIONS, self.reduction

    @cached_property
    def _policy_loss(self) -> PolicyLoss:
        return policy_loss(self.objective)

    def __call__(self, stats: TokenStats, microbatch: Microbatch, denominators: Denominators) -> tuple[Tensor, Figures]:
        """Loss [] with gradient, and figures of the learnt tokens.

        The micro-batch must carry ``advantages``; if its ``old_logprobs`` are None the step is on-policy and pi_old is
        the policy itself. Sums: ``pg_loss`` (with its importance weight), ``entropy``, ``ratio``, ``ppo_kl``
        (``logp_old - logp``), ``clip_fraction``, ``dual_clip_fraction``; ``kl`` if the micro-batch carries
        reference_logprobs; ``importance_weight``, ``importance_bounded`` (1 for a token whose weight a bound decides),
        ``rollout_kl`` (``logp_rollout - logp``) and ``rollout_logprob_abs_diff`` if it carries rollout_logprobs, and as
        `POOLED` figures ``pooled/weight`` and ``pooled/weight_squared`` (uncapped) and, where it carries staleness too,
        ``pooled/tokens/AGE`` and ``pooled/rollout_kl/AGE``.
        A user's own loss may have more, see `own.OWN`.
        Maxima: ``ratio``, and ``rollout_logprob_abs_diff`` if there is one.
        """
        logprobs_T, mask_T = stats.logprobs, microbatch.loss_mask
        assert microbatch.advantages is not None, "a policy objective needs advantages"
        old_logprobs_T = logprobs_T.detach() if microbatch.old_logprobs is None else microbatch.old_logprobs
        pg_loss_T, figures = self._policy_loss(
            {
                "logprobs_T": logprobs_T,
                "old_logprobs_T": old_logprobs_T,
                "rollout_logprobs_T": microbatch.rollout_logprobs,
                "advantages_T": microbatch.advantages,
                "entropy_T": stats.entropy,
                "mask_T": mask_T,
                "cu_seqlens": microbatch.cu_seqlens,
                "clip_low": self.clip_low,
                "clip_high": self.clip_high,
                "dual_clip": self.dual_clip,
            }
        )
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
        sums = {name: masked_sum(values_T.detach(), mask_T) for name, values_T in figures.items()}
        largest = {name: torch.where(mask_T != 0, x_T.detach(), 0.0).amax() for name, x_T in maxima.items()}
        loss = REDUCTIONS[self.reduction](loss_T, mask_T, microbatch.cu_seqlens, denominators)
        return loss, Figures(sums, largest)

    def _importance(
        self, logprobs_T: Tensor, old_logprobs_T: Tensor, microbatch: Microbatch
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Weights [T] (None: all 1), and figures [T] of how far the sampling policy is from the present one."""
        if microbatch.rollout_logprobs is None:
            assert self.importance_cap is None, "importance weights need the engine's log-probabilities"
            return None, {}
        rollout_kl_T = microbatch.rollout_logprobs - logprobs_T
        figures = {"rollout_kl": rollout_kl_T, "rollout_logprob_abs_diff": rollout_kl_T.abs()}
        log_weights_T = LOG_WEIGHTS[self.importance_level](
            old_logprobs_T, microbatch.rollout_logprobs, microbatch.loss_mask, microbatch.cu_seqlens
        )
        uncapped_T = log_weights_T.clamp_max(MAX_LOG_WEIGHT).exp()
        figures |= {f"{POOLED}weight": uncapped_T, f"{POOLED}weight_squared": uncapped_T.square()}
        if microbatch.staleness is not None:
            for age in range(self.num_ages):
                is_of_age_T = (microbatch.staleness == age).to(rollout_kl_T)
                figures[f"{POOLED}tokens/{age}"] = is_of_age_T
                figures[f"{POOLED}rollout_kl/{age}"] = rollout_kl_T * is_of_age_T
        if self.importance_cap is None:
            return None, figures | {"importance_weight": torch.ones_like(old_logprobs_T)}
        correct = CORRECTIONS[self.importance_correction]
        weights_T, is_bounded_T = correct(log_weights_T, self.importance_floor, self.importance_cap)
        return weights_T, figures | {"importance_weight": weights_T, "importance_bounded": is_bounded_T.to(weights_T)}


@dataclass(frozen=True)
class SftObjective:
    """Cross entropy, averaged over the learnt tokens of the global batch."""

    def __call__(self, stats: TokenStats, microbatch: Microbatch, denominators: Denominators) -> tuple[Tensor, Figures]:
        """Loss [] with gradient, and sums over the learnt tokens: ``nll`` and ``entropy``, both nats, and ``hits``."""
        nll_T, mask_T = -stats.logprobs, microbatch.loss_mask
        loss = token_mean(nll_T, mask_T, microbatch.cu_seqlens, denominators)
        values = {"nll": nll_T.detach(), "entropy": stats.entropy.detach()}
        if stats.is_top is not None:
            values["hits"] = stats.is_top.detach()
        return loss, Figures({name: masked_sum(values_T, mask_T) for name, values_T in values.items()})
