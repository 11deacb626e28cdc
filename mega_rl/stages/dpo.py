"""Learning from pairs of answers, DPO and its family: data, update, validation; the loop: ``offline/loop.py``."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from mega_rl.algorithms.pairs import AnswersApart
from mega_rl.algorithms.preference import PreferenceObjective, answer_sums
from mega_rl.config import RunConfig
from mega_rl.config.schema.sections import PreferenceConfig
from mega_rl.data.pairs import Pair, PairDataset
from mega_rl.megatron.engine import LossFunction, MegatronEngine
from mega_rl.microbatch import Microbatch
from mega_rl.stages.models import trainer
from mega_rl.stages.offline.loop import (
    learn,
    loop,
    measured,
    read,
    stream_of,
    summed_logprobs,
)
from mega_rl.stages.offline.reference_logprobs import ReferenceLogprobs, reference_logprobs
from mega_rl.stages.run import progress
from mega_rl.stages.run.batch_share import fits, pack_for_rank
from mega_rl.stages.run.job import Job
from mega_rl.stages.run.opening import open_job

FIGURES = ("chosen_reward", "rejected_reward", "accuracy", "margin", "chosen_logprob", "rejected_logprob")


def run(config: RunConfig) -> None:
    """Train as ``config`` says; every rank of the job calls it."""
    with open_job(config) as job:
        train(job)


def train(job: Job) -> None:
    dataset, held_out = pairs(job)
    stream = stream_of(job, dataset)
    total_steps = progress.total_steps(job.config, stream.steps_per_epoch)
    model = trainer.actor(job, total_steps)
    loss = objective(job.config.preference)
    # The reference is the model as training begins: it is resumed after it.
    reference = reference_logprobs(job, model, dataset, "train") if loss.needs_reference else None
    validation = None
    if held_out is not None:
        held_out_reference = reference_logprobs(job, model, held_out, "val") if loss.needs_reference else None
        validation = partial(validate, job, model, loss, held_out_reference, held_out.items)
    loop(
        job,
        model,
        stream,
        total_steps,
        update=partial(update, job, model, loss, reference),
        validate=validation,
        num_tokens=lambda pair: sum(sequence.loss_mask.numel() for sequence in pair.sequences),
    )


def pairs(job: Job) -> tuple[PairDataset, PairDataset | None]:
    """The training and the held-out pairs. Collective."""
    dataset, held_out = read(job, PairDataset)
    if dataset.num_dropped:
        job.say(f"data: {dataset.num_dropped} pairs with an answer longer than the length limits left out")
    return dataset, held_out


def objective(settings: PreferenceConfig) -> PreferenceObjective:
    return PreferenceObjective(
        loss=settings.loss,
        beta=settings.beta,
        label_smoothing=settings.label_smoothing,
        simpo_gamma=settings.simpo_gamma,
        sft_coefficient=settings.sft_coefficient,
    )


def update(
    job: Job,
    model: MegatronEngine,
    loss: PreferenceObjective,
    reference: ReferenceLogprobs | None,
    batch: list[Pair],
    is_read: bool,
) -> dict[str, float]:
    """One optimizer step; returns its metrics. Collective."""
    microbatches, loss_function = prepared(job, model, loss, reference, batch)
    totals, metrics = learn(job, model, microbatches, loss_function, is_read)
    metrics |= {name: totals.sums[name] / len(batch) for name in FIGURES}
    return {f"dpo/{name}": value for name, value in metrics.items()}


def validate(
    job: Job,
    model: MegatronEngine,
    loss: PreferenceObjective,
    reference: ReferenceLogprobs | None,
    held_out: list[Pair],
) -> dict[str, float]:
    """Loss and figures of held-out pairs. Collective."""
    sums = measured(job, model, *prepared(job, model, loss, reference, held_out)).sums
    means = {name: sums[name] / len(held_out) for name in ("accuracy", "margin")}
    return {"dpo/val_loss": sums["loss"]} | {f"dpo/val_{name}": value for name, value in means.items()}


def prepared(
    job: Job,
    model: MegatronEngine,
    loss: PreferenceObjective,
    reference: ReferenceLogprobs | None,
    batch: list[Pair],
) -> tuple[list[Microbatch], LossFunction]:
    """This rank's micro-batches of a global batch, and their loss. Collective.

    Both answers of a pair lie in one micro-batch; if there is no room for those of every pair, no two need to, which
    takes a forward pass more.
    """
    sequences = [one for pair in batch for one in pair.sequences]
    num_tokens_B = torch.stack([one.loss_mask.sum() for one in sequences])
    reference_B = None if reference is None else reference.of(batch)
    counts: dict[str, Any] = {"num_pairs": len(batch), "num_chosen_tokens": int(num_tokens_B[::2].sum())}
    if fits(job.share, sequences, unit=2):
        return pack_for_rank(job.share, sequences, unit=2), partial(loss, reference_B=reference_B, **counts)
    model.collect_weights()
    shares_of = partial(
        loss.of_pairs,
        num_tokens_P2=num_tokens_B.view(-1, 2),
        reference_P2=None if reference_B is None else reference_B.view(-1, 2),
        **counts,
    )
    sums_B = summed_logprobs(job, model, sequences)
    apart = AnswersApart(shares_of, sums_B, lambda stats, microbatch: answer_sums(stats.logprobs, microbatch))
    return pack_for_rank(job.share, sequences), apart
