"""From scored trajectories to changed weights."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.distributed as dist

from mega_rl.algorithms.advantage import ADVANTAGES, power_sums, whiten, with_penalty_to_go
from mega_rl.algorithms.kl import KL_ESTIMATORS
from mega_rl.algorithms.objective import PolicyObjective
from mega_rl.config import RunConfig
from mega_rl.data.packing import sequence_from_sample
from mega_rl.megatron.engine import LossFunction, MegatronEngine
from mega_rl.megatron.offload import Reference
from mega_rl.observe.metrics import MAXIMA, MEANS
from mega_rl.parallel.collectives import gather_objects
from mega_rl.parallel.schedule import split_even
from mega_rl.rollout.collect import PromptGroup
from mega_rl.stages.parts.batches import Totals, denominators_of, pack_for_rank, totals_of
from mega_rl.stages.parts.gates import Gates
from mega_rl.stages.parts.progress import warn_if_skipped
from mega_rl.stages.parts.session import Session
from mega_rl.types import Microbatch, Sample


def with_advantages(groups: SequenceOf[PromptGroup], advantage: str) -> list[Sample]:
    """Samples in the order of the groups.

    A score that is NaN is unknown: its sample has advantage 0 and no part in its group, and ``update`` leaves it out.
    """
    pairs = [(t, s) for group in groups for t, s in zip(group.trajectories, group.scores, strict=True)]
    rewards = torch.tensor([score.value for _, score in pairs], dtype=torch.float64)
    numbers = torch.tensor([number for number, group in enumerate(groups) for _ in group.trajectories])
    advantages = ADVANTAGES[advantage].function(rewards, numbers).tolist() if pairs else []
    return [Sample(t, s, a) for (t, s), a in zip(pairs, advantages, strict=True)]


def update(
    session: Session,
    actor: MegatronEngine,
    reference: Reference | None,
    objective: PolicyObjective,
    samples: list[Sample],
    gates: Gates | None = None,
    behaviour: AbstractContextManager[None] | None = None,
) -> dict[str, float]:
    """The optimizer steps of one rollout batch; returns their metrics. Collective.

    Samples of unknown reward are left out; without any other there is no optimizer step. ``behaviour`` makes the actor
    the policy that pi_old is; None: it is the actor itself.

    Raises:
        GateFailure: ``gates``, those of the first step, found a difference.
    """
    config = session.config
    samples = [sample for sample in samples if not math.isnan(sample.score.value)]
    if not samples:
        session.say("warning: no sample of this step has a reward that is known, so it learns nothing")
        return {}
    sequences = [sequence_from_sample(sample) for sample in samples]
    parts = split_even(len(sequences), min(config.algorithm.minibatches_per_step, len(sequences)))
    minibatches = [pack_for_rank(session, [sequences[i] for i in part]) for part in parts]
    with session.timers("old_logprobs"), behaviour or nullcontext():
        minibatches = [_with_old_logprobs(session, actor, minibatch) for minibatch in minibatches]
    with session.timers("reference_logprobs"):
        if reference is not None:
            minibatches = [_with_reference_logprobs(reference, minibatch) for minibatch in minibatches]
    minibatches = _shaped(session, minibatches)
    totals: dict[str, float] = {}
    num_skipped = 0
    with session.timers("update"):
        for part, minibatch in zip(parts, minibatches, strict=True):
            denominators = denominators_of([sequences[i] for i in part], config.data.max_response_length)
            loss: LossFunction = partial(objective, denominators=denominators)
            first = gates if part is parts[0] else None
            if first is not None:
                minibatch, loss = first.recompute(actor, minibatch), first.watched(loss)
            found = totals_of(session, actor.forward_backward(minibatch, loss))
            if first is not None:
                ratio_mean = found.sums["ratio"] / denominators.num_tokens
                differing = partial(_differing, reference, actor)
                totals |= first.check(ratio_mean, found.maxima["ratio"], [samples[i] for i in part], differing)
            step = actor.optimizer_step(is_followed=part is not parts[-1])
            warn_if_skipped(session, actor, step)
            num_skipped += step.skipped
            _accumulate(totals, found, denominators.num_tokens, len(parts))
            totals["actor/grad_norm"] = totals.get("actor/grad_norm", 0.0) + step.grad_norm / len(parts)
            totals["actor/lr"] = step.lr
    skipped = {"actor/skipped_steps": num_skipped, "actor/skipped_steps_total": actor.step.skipped.total}
    return totals | {name: float(value) for name, value in skipped.items()}


def _with_old_logprobs(session: Session, actor: MegatronEngine, minibatch: list[Microbatch]) -> list[Microbatch]:
    """pi_old of the objective: the engine's, or that of the weights that stand before the first optimizer step."""
    config = session.config
    if config.aqn.enabled and config.aqn.old_logprobs == "rollout":
        return [microbatch.replace(old_logprobs=microbatch.rollout_logprobs) for microbatch in minibatch]
    is_noisy = config.aqn.enabled and config.aqn.old_logprobs == "recompute_noisy"
    if config.algorithm.minibatches_per_step == 1 and not is_noisy and not _is_kl_in_reward(config):
        return minibatch  # on-policy: the update's own forward pass gives them, detached
    stats = actor.token_stats(minibatch)
    return [m.replace(old_logprobs=s.logprobs) for m, s in zip(minibatch, stats, strict=True)]


def _with_reference_logprobs(reference: Reference, minibatch: list[Microbatch]) -> list[Microbatch]:
    stats = reference.token_stats(minibatch)
    return [m.replace(reference_logprobs=s.logprobs) for m, s in zip(minibatch, stats, strict=True)]


def _is_kl_in_reward(config: RunConfig) -> bool:
    return config.algorithm.kl_in == "reward" and config.algorithm.kl_coefficient != 0


def _shaped(session: Session, minibatches: list[list[Microbatch]]) -> list[list[Microbatch]]:
    """Advantages that differ from token to token: less the KL that is still to come, then whitened. Collective."""
    algorithm = session.config.algorithm
    if _is_kl_in_reward(session.config):
        minibatches = [[_less_kl_to_go(session.config, m) for m in minibatch] for minibatch in minibatches]
    if not ADVANTAGES[algorithm.advantage].is_whitened:
        return minibatches
    everything = [m for minibatch in minibatches for m in minibatch]
    count, total, _ = _power_sums(session, everything, centre=0.0)
    mean = total / count
    _, _, squares = _power_sums(session, everything, centre=mean)
    variance = squares / max(1.0, count - 1)

    def whitened(microbatch: Microbatch) -> Microbatch:
        assert microbatch.advantages is not None
        return microbatch.replace(advantages=whiten(microbatch.advantages, microbatch.loss_mask, mean, variance))

    return [[whitened(m) for m in minibatch] for minibatch in minibatches]


def _less_kl_to_go(config: RunConfig, microbatch: Microbatch) -> Microbatch:
    advantages_T, old_T, reference_T = microbatch.advantages, microbatch.old_logprobs, microbatch.reference_logprobs
    assert advantages_T is not None and old_T is not None and reference_T is not None
    kl_T = KL_ESTIMATORS[config.algorithm.kl_estimator](old_T, reference_T)
    coefficient = config.algorithm.kl_coefficient
    shaped_T = with_penalty_to_go(advantages_T, kl_T, microbatch.loss_mask, microbatch.cu_seqlens, coefficient)
    return microbatch.replace(advantages=shaped_T)


def _power_sums(session: Session, microbatches: list[Microbatch], centre: float) -> list[float]:
    """Count, sum and square sum of all advantages less ``centre``, over the data-parallel ranks too. Collective."""
    own = torch.zeros(3, dtype=torch.float64)
    # every pipeline stage holds the same micro-batches: the last one speaks for all
    if session.layout.is_counted(dist.get_rank()) and session.is_last_stage:
        for microbatch in microbatches:
            assert microbatch.advantages is not None
            own += power_sums(microbatch.advantages, microbatch.loss_mask, centre)
    return [sum(column) for column in zip(*gather_objects(own.tolist()), strict=True)]


def _differing(reference: Reference | None, actor: MegatronEngine) -> str | None:
    """A tensor in which policy and reference differ on some rank. Collective."""
    assert reference is not None, "only a run with a reference compares with one"
    found = gather_objects(reference.differing(actor.policy))
    return next((name for name in found if name is not None), None)


def _accumulate(metrics: dict[str, float], found: Totals, num_tokens: int, num_parts: int) -> None:
    """Add one minibatch: token sums become token means, averaged over the minibatches; maxima stay maxima."""
    for figure, value in found.sums.items():
        metric = MEANS[figure]
        share = value if figure == "loss" else value / num_tokens  # the loss is divided already
        metrics[metric] = metrics.get(metric, 0.0) + share / num_parts
    for figure, value in found.maxima.items():
        metric = MAXIMA[figure]
        metrics[metric] = max(metrics.get(metric, value), value)
