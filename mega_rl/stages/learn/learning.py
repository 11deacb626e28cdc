"""From scored trajectories to changed weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence as SequenceOf
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from mega_rl.algorithms.advantage import advantage_of, power_sums, turn_advantages, whiten, with_penalty_to_go
from mega_rl.algorithms.kl import KL_ESTIMATORS
from mega_rl.algorithms.objective import PolicyObjective
from mega_rl.algorithms.reduce import Denominators
from mega_rl.algorithms.trial import check_own
from mega_rl.config import RunConfig
from mega_rl.config.schema.sections import AlgorithmConfig
from mega_rl.data.packing import sequence_of
from mega_rl.megatron.engine import LossFunction, MegatronEngine
from mega_rl.megatron.reference import Reference
from mega_rl.microbatch import Microbatch, Sequence
from mega_rl.parallel.collectives import column_sums, gather_objects, reduced, together
from mega_rl.parallel.schedule import split_even
from mega_rl.rollout.collect.collect import GroupSummary
from mega_rl.stages.learn.critic import Critic
from mega_rl.stages.learn.gates import Gates
from mega_rl.stages.learn.update_metrics import Gradients, UpdateStep, pass_metrics, step_metrics
from mega_rl.stages.run.batch_share import BatchShare, pack_brought, totals_of
from mega_rl.stages.run.progress import warn_if_skipped
from mega_rl.stages.run.sampling_job import SamplingJob
from mega_rl.types import Sample, Score, TokenSource, TrajectorySummary, TrajectoryTokens


def with_advantages(groups: SequenceOf[GroupSummary], algorithm: AlgorithmConfig) -> list[Sample]:
    """Samples in the order of the groups.

    A score that is NaN is unknown: its sample has advantage 0 and no part in its group, and ``update`` leaves it out.
    """
    pairs = [pair for group in groups for pair in zip(group.summaries, group.scores, strict=True)]
    numbers = [number for number, group in enumerate(groups) for _ in group.summaries]
    function = advantage_of(algorithm.advantage).function
    if algorithm.credit == "turn":
        rewards = [rewards_of_turns(len(summary.turn_sizes), score) for summary, score in pairs]
        of_turns = turn_advantages(function, rewards, numbers, algorithm.turn_discount)
        return [Sample(*pair, _mean_of(pair[0], own), tuple(own)) for pair, own in zip(pairs, of_turns, strict=True)]
    values = torch.tensor([score.value for _, score in pairs], dtype=torch.float64)
    advantages = function(values, torch.tensor(numbers)).tolist() if pairs else []
    return [Sample(*pair, advantage) for pair, advantage in zip(pairs, advantages, strict=True)]


def rewards_of_turns(num_turns: int, score: Score) -> list[float]:
    """What every turn of the model earned; the last one has what the end was rewarded with. NaN if it is unknown."""
    if not score.is_known or not num_turns:
        return [math.nan] * num_turns
    rewards = list(score.turn_rewards) or [0.0] * num_turns
    rewards[-1] += score.value - sum(score.turn_rewards)
    return rewards


def _mean_of(summary: TrajectorySummary, advantages: SequenceOf[float]) -> float:
    """Over the sampled tokens."""
    total = sum(size * advantage for size, advantage in zip(summary.turn_sizes, advantages, strict=True))
    return total / max(1, summary.num_sampled)


def pack_samples(
    share: BatchShare, samples: SequenceOf[Sample], source: TokenSource, step: int | None = None
) -> list[Microbatch]:
    """This rank's share of the samples, with the tokens of no others. Collective.

    Args:
        step: that learns from them, counted from 0, by which their staleness is told; None: it is not.
    """

    def sequence(place: int, tokens: TrajectoryTokens) -> Sequence:
        staleness = None if step is None else samples[place].summary.staleness(step)
        made = sequence_of(tokens, samples[place].token_advantages, staleness)
        return (
            made if share.picture_set is None else share.picture_set.seeing(made, samples[place].summary.prompt_index)
        )

    summaries = [sample.summary for sample in samples]
    return pack_brought(share, summaries, [summary.num_tokens - 1 for summary in summaries], source, sequence)


@dataclass(frozen=True)
class Minibatch:
    """What one optimizer step learns from."""

    samples: list[Sample]  # on all ranks, in the order of the packed sequences
    denominators: Denominators
    microbatches: list[Microbatch]  # of this rank


class Learner:
    """Changes the actor's weights by scored samples.

    Args:
        job: its trajectory store has the samples' tokens, of which this rank takes those of its share. Of the
            configuration only ``algorithm``, ``aqn``, ``rollout.mode``, ``rollout.routing_replay`` and
            ``data.max_response_length`` are read.
        actor: what learns.
        reference: None if the objective needs none.
        critic: None if the advantage needs none.
    """

    def __init__(
        self,
        job: SamplingJob,
        actor: MegatronEngine,
        reference: Reference | None,
        critic: Critic | None = None,
    ) -> None:
        config = job.config
        self._algorithm, self._aqn = config.algorithm, config.aqn
        # In the other modes the tokens of a step have the same age, but for groups that were carried; and with
        # ``rollout.oversample`` there is no limit to an age, which the objective must know to tell of each.
        self._tells_ages = config.rollout.mode == "in_flight"
        self._records_experts = config.rollout.routing_replay == "recompute"
        self._max_response_tokens = config.data.max_response_length
        self._share, self._source, self._timers, self._say = job.share, job.trajectory_store, job.timers, job.say
        self._actor, self._reference, self._critic = actor, reference, critic
        self._objective = objective_of(config)

    def update(
        self,
        samples: list[Sample],
        gates: Gates | None = None,
        behaviour: AbstractContextManager[None] | None = None,
    ) -> dict[str, float]:
        """The optimizer steps of one rollout batch; returns their metrics. Collective.

        Samples of unknown reward are left out; if no other samples remain there is no optimizer step. Inside
        ``behaviour`` the actor is the policy pi_old; None: pi_old is the actor itself.

        Raises:
            GateFailure: ``gates``, those of this step, found a difference.
        """
        known = [sample for sample in samples if sample.score.is_known]
        if not known:
            self._say("warning: no sample of this step has a reward that is known, so it learns nothing")
            return {}
        trained = gates.version if self._tells_ages and gates is not None else None
        minibatches = self._with_logprobs(self._packed(known, trained), behaviour)
        minibatches = self._with_token_advantages(minibatches)
        policy_learns = self._critic is None or not self._critic.learns_alone  # before the critic's steps, which count
        critic_metrics = self._critic_update(minibatches)
        if gates is not None and policy_learns:
            for minibatch in minibatches[1:]:
                gates.expect(minibatch.microbatches, minibatch.samples)
        passes: list[Gradients] = []
        steps: list[UpdateStep] = []
        with self._timers("update"):
            # A policy that stays as it is has one pass, for what the gates and the metrics say of it.
            for minibatch in minibatches if policy_learns else minibatches[:1]:
                passes.append(self._gradients(minibatch, None if passes else gates))
                if policy_learns:
                    steps.append(self._step(is_last=minibatch is minibatches[-1]))
        skipped_total = self._actor.stepper.skipped.total
        return critic_metrics | pass_metrics(passes) | step_metrics(steps, skipped_total)

    def _packed(self, samples: list[Sample], step: int | None) -> list[Minibatch]:
        """The samples cut into minibatches, with their tokens; ``step`` as in ``pack_samples``. Collective."""
        cuts = split_even(len(samples), min(self._algorithm.minibatches_per_step, len(samples)))
        parts = [[samples[i] for i in cut] for cut in cuts]
        return [
            Minibatch(part, self._denominators(part), pack_samples(self._share, part, self._source, step))
            for part in parts
        ]

    def _denominators(self, samples: list[Sample]) -> Denominators:
        num_tokens = sum(sample.summary.num_sampled for sample in samples)
        return Denominators(num_tokens, len(samples), self._max_response_tokens)

    def _with_logprobs(
        self, minibatches: list[Minibatch], behaviour: AbstractContextManager[None] | None
    ) -> list[Minibatch]:
        """With what pi_old and the reference give the tokens, as far as the objective reads it. Collective."""
        with self._timers("old_logprobs"), behaviour or nullcontext():
            minibatches = [replace(m, microbatches=self._with_old_logprobs(m.microbatches)) for m in minibatches]
        with self._timers("reference_logprobs"):
            if self._reference is None:
                return minibatches
            of_reference = partial(_with_reference_logprobs, self._reference)
            return [replace(m, microbatches=of_reference(m.microbatches)) for m in minibatches]

    def _with_old_logprobs(self, microbatches: list[Microbatch]) -> list[Microbatch]:
        """pi_old of the objective: the engine's, or that of the weights before the first optimizer step."""
        if self._aqn.enabled and self._aqn.old_logprobs == "rollout":
            return [microbatch.replace(old_logprobs=microbatch.rollout_logprobs) for microbatch in microbatches]
        is_noisy = self._aqn.enabled and self._aqn.old_logprobs == "recompute_noisy"
        if self._algorithm.minibatches_per_step == 1 and not is_noisy and not self._is_kl_in_reward:
            return microbatches  # on-policy: the update's own forward pass gives them, detached
        stats = self._actor.token_stats(microbatches, self._records_experts)
        pairs = zip(microbatches, stats, strict=True)
        return [m.replace(old_logprobs=s.logprobs, own_experts=s.own_experts) for m, s in pairs]

    @property
    def _is_kl_in_reward(self) -> bool:
        return self._algorithm.kl_in == "reward" and self._algorithm.kl_coefficient != 0

    def _with_token_advantages(self, minibatches: list[Minibatch]) -> list[Minibatch]:
        """Advantages per token: those of the critic, or less the KL that is to come; then whitened. Collective."""
        packed = [minibatch.microbatches for minibatch in minibatches]
        penalty = partial(_kl_penalty, self._algorithm) if self._is_kl_in_reward else None
        if self._critic is not None:
            packed = self._critic.with_advantages(packed, penalty)
        elif penalty is not None:
            packed = [[_less_penalty_to_go(m, penalty) for m in microbatches] for microbatches in packed]
        if advantage_of(self._algorithm.advantage).is_whitened:
            packed = _whitened(self._share, packed)
        return [replace(m, microbatches=own) for m, own in zip(minibatches, packed, strict=True)]

    def _critic_update(self, minibatches: list[Minibatch]) -> dict[str, float]:
        if self._critic is None:
            return {}
        return self._critic.update([(m.microbatches, m.denominators) for m in minibatches])

    def _gradients(self, minibatch: Minibatch, gates: Gates | None) -> Gradients:
        """Forward and backward pass. Collective."""
        num_tokens = minibatch.denominators.num_tokens
        microbatches = minibatch.microbatches
        loss: LossFunction = partial(self._objective, denominators=minibatch.denominators)
        if gates is not None:
            microbatches, loss = gates.recompute(self._actor, microbatches), gates.watched(loss)
        totals = totals_of(self._share, self._actor.forward_backward(microbatches, loss))
        if gates is None:
            return Gradients(totals, num_tokens, {})
        ratio_mean = totals.sums["ratio"] / num_tokens
        differing = partial(_differing, self._reference, self._actor)
        checked = gates.check(ratio_mean, totals.maxima["ratio"], minibatch.samples, differing)
        return Gradients(totals, num_tokens, checked)

    def _step(self, is_last: bool) -> UpdateStep:
        """Change the weights by the gradients; after the last step of a batch all of them are read. Collective."""
        stats = self._actor.optimizer_step(next_is_forward_backward=not is_last)
        warn_if_skipped(self._say, self._actor, stats)
        return UpdateStep(stats, self._actor.router_metrics)


def _with_reference_logprobs(reference: Reference, microbatches: list[Microbatch]) -> list[Microbatch]:
    stats = reference.token_stats(microbatches)
    return [m.replace(reference_logprobs=s.logprobs) for m, s in zip(microbatches, stats, strict=True)]


def _less_penalty_to_go(microbatch: Microbatch, penalty: Callable[[Microbatch], Tensor]) -> Microbatch:
    assert microbatch.advantages is not None
    penalty_T, mask_T = penalty(microbatch), microbatch.loss_mask
    shaped_T = with_penalty_to_go(microbatch.advantages, penalty_T, mask_T, microbatch.cu_seqlens, 1.0)
    return microbatch.replace(advantages=shaped_T)


def _kl_penalty(algorithm: AlgorithmConfig, microbatch: Microbatch) -> Tensor:
    old_T, reference_T = microbatch.old_logprobs, microbatch.reference_logprobs
    assert old_T is not None and reference_T is not None
    return algorithm.kl_coefficient * KL_ESTIMATORS[algorithm.kl_estimator](old_T, reference_T)


def _whitened(share: BatchShare, packed: list[list[Microbatch]]) -> list[list[Microbatch]]:
    """By mean and variance of all advantages of the batch. Collective."""
    everything = [m for microbatches in packed for m in microbatches]
    count, total, _ = _power_sums(share, everything, centre=0.0)
    mean = total / count
    _, _, squares = _power_sums(share, everything, centre=mean)
    variance = squares / max(1.0, count - 1)

    def whitened(microbatch: Microbatch) -> Microbatch:
        assert microbatch.advantages is not None
        return microbatch.replace(advantages=whiten(microbatch.advantages, microbatch.loss_mask, mean, variance))

    return [[whitened(m) for m in microbatches] for microbatches in packed]


def _power_sums(share: BatchShare, microbatches: list[Microbatch], centre: float) -> list[float]:
    """Count, sum and square sum of all advantages minus ``centre``, over the data-parallel ranks too. Collective."""
    own = torch.zeros(3, dtype=torch.float64)
    # every pipeline stage holds the same micro-batches: the last one speaks for all
    if share.is_counted and share.is_last_stage:
        for microbatch in microbatches:
            assert microbatch.advantages is not None
            own += power_sums(microbatch.advantages, microbatch.loss_mask, centre)
    return reduced(own.tolist(), column_sums, len(own))


def _differing(reference: Reference | None, actor: MegatronEngine) -> str | None:
    """A tensor in which policy and reference differ on some rank. Collective."""
    assert reference is not None, "only a run with a reference compares with one"
    found = gather_objects(reference.differing(actor.policy))
    return next((name for name in found if name is not None), None)


def check_algorithm(config: RunConfig, device: torch.device) -> None:
    """Raises InputError on every rank for a loss or an advantage of the user's that cannot be learnt by. Collective."""
    with together("trying algorithm.objective and algorithm.advantage"):
        check_own(config.algorithm, device)


def objective_of(config: RunConfig) -> PolicyObjective:
    """What the policy learns by."""
    algorithm = config.algorithm
    # If the engine's own log-probabilities are pi_old, or its noise is ignored as published, nothing is corrected.
    is_corrected = not config.aqn.enabled or config.aqn.old_logprobs in ("decoupled", "recompute_noisy")
    return PolicyObjective(
        objective=algorithm.objective,
        clip_low=algorithm.clip_ratio_low,
        clip_high=algorithm.clip_ratio_high,
        dual_clip=algorithm.dual_clip,
        kl_coefficient=algorithm.kl_coefficient if algorithm.kl_in == "loss" else 0.0,
        kl_estimator=algorithm.kl_estimator,
        entropy_coefficient=algorithm.entropy_coefficient,
        importance_cap=algorithm.importance_cap if is_corrected else None,
        importance_correction=algorithm.importance_correction,
        importance_level=algorithm.importance_level,
        importance_floor=algorithm.importance_floor,
        reduction=algorithm.loss_reduction,
        num_ages=config.rollout.max_staleness + 1,
    )
