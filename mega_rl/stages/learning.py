"""From scored completions to changed weights."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from mega_rl.algorithms.advantage import ADVANTAGES
from mega_rl.algorithms.objective import PolicyObjective
from mega_rl.data.packing import sequence_from_sample
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.megatron.offload import Reference
from mega_rl.parallel.schedule import split_even
from mega_rl.stages.batches import denominators_of, pack_for_rank, total_sums
from mega_rl.stages.progress import warn_if_skipped
from mega_rl.stages.session import Session
from mega_rl.types import Completion, Microbatch, Sample, Score

METRIC_NAMES = {  # the objective's sums over learnt tokens -> what they are logged as
    "pg_loss": "actor/pg_loss",
    "kl": "actor/kl",
    "entropy": "actor/entropy",
    "ratio": "actor/ratio_mean",
    "ratio_max": "actor/ratio_max",
    "clip_fraction": "actor/clip_fraction",
    "dual_clip_fraction": "actor/dual_clip_fraction",
    "ppo_kl": "actor/ppo_kl",
    "importance_weight": "actor/importance_weight",
    "rollout_kl": "rollout/kl",
    "rollout_logprob_abs_diff": "rollout/logprob_diff_mean",
    "rollout_logprob_abs_diff_max": "rollout/logprob_diff_max",
}


def with_advantages(completions: SequenceOf[Completion], scores: SequenceOf[Score], algorithm: str) -> list[Sample]:
    """Samples in the order of the completions; the group of a completion is its prompt."""
    rewards = torch.tensor([score.value for score in scores], dtype=torch.float64)
    groups = torch.tensor([completion.prompt.index for completion in completions])
    advantages = ADVANTAGES[algorithm](rewards, groups).tolist()
    return [Sample(c, s, a) for c, s, a in zip(completions, scores, advantages, strict=True)]


def update(
    session: Session,
    actor: MegatronEngine,
    reference: Reference | None,
    objective: PolicyObjective,
    samples: list[Sample],
    behaviour: AbstractContextManager[None] | None = None,
) -> dict[str, float]:
    """The optimizer steps of one rollout batch; returns their metrics. Collective.

    ``behaviour`` makes the actor the policy that pi_old is; None: it is the actor itself.
    """
    config = session.config
    sequences = [sequence_from_sample(sample) for sample in samples]
    parts = split_even(len(sequences), config.algorithm.minibatches_per_step)
    minibatches = [pack_for_rank(session, [sequences[i] for i in part]) for part in parts]
    with session.timers("old_logprobs"), behaviour or nullcontext():
        minibatches = [_with_old_logprobs(session, actor, minibatch) for minibatch in minibatches]
    with session.timers("reference_logprobs"):
        if reference is not None:
            minibatches = [_with_reference_logprobs(reference, minibatch) for minibatch in minibatches]
    totals: dict[str, float] = {}
    num_skipped = 0
    with session.timers("update"):
        for part, minibatch in zip(parts, minibatches, strict=True):
            denominators = denominators_of([sequences[i] for i in part], config.data.max_response_length)
            reports = actor.forward_backward(minibatch, partial(objective, denominators=denominators))
            step = actor.optimizer_step(is_followed=part is not parts[-1])
            warn_if_skipped(session, actor, step)
            num_skipped += step.skipped
            _accumulate(totals, total_sums(session, reports), denominators.num_tokens, len(parts))
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
    if config.algorithm.minibatches_per_step == 1 and not is_noisy:
        return minibatch  # on-policy: the update's own forward pass gives them, detached
    stats = actor.token_stats(minibatch)
    return [m.replace(old_logprobs=s.logprobs) for m, s in zip(minibatch, stats, strict=True)]


def _with_reference_logprobs(reference: Reference, minibatch: list[Microbatch]) -> list[Microbatch]:
    stats = reference.token_stats(minibatch)
    return [m.replace(reference_logprobs=s.logprobs) for m, s in zip(minibatch, stats, strict=True)]


def _accumulate(totals: dict[str, float], sums: dict[str, float], num_tokens: int, num_parts: int) -> None:
    """Add one minibatch: token sums become token means, averaged over the minibatches; maxima stay maxima."""
    for name, value in sums.items():
        if name == "loss":
            totals["actor/loss"] = totals.get("actor/loss", 0.0) + value / num_parts
        elif name.endswith("_max"):
            totals[METRIC_NAMES[name]] = max(totals.get(METRIC_NAMES[name], value), value)
        else:
            metric = METRIC_NAMES[name]
            totals[metric] = totals.get(metric, 0.0) + value / num_tokens / num_parts
