"""Learning from answers judged one by one (KTO): data, update, validation; the loop: ``offline/loop.py``."""

from __future__ import annotations

from functools import partial

import torch

from mega_rl.algorithms.preference import KtoObjective, kto_kl
from mega_rl.config import RunConfig
from mega_rl.data.pairs import LabelledAnswer, LabelledDataset
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
from mega_rl.stages.run.batch_share import pack_for_rank
from mega_rl.stages.run.job import Job
from mega_rl.stages.run.opening import open_job


def run(config: RunConfig) -> None:
    """Train as ``config`` says; every rank of the job calls it."""
    with open_job(config) as job:
        train(job)


def train(job: Job) -> None:
    config = job.config
    dataset, held_out = read(job, LabelledDataset)
    if dataset.num_dropped:
        job.say(f"data: {dataset.num_dropped} answers longer than the length limits left out")
    stream = stream_of(job, dataset)
    total_steps = progress.total_steps(config, stream.steps_per_epoch)
    model = trainer.actor(job, total_steps)
    loss = KtoObjective(
        beta=config.kto.beta,
        desirable_weight=config.kto.desirable_weight,
        undesirable_weight=config.kto.undesirable_weight,
    )
    # The reference is the model as training begins: it is resumed after it.
    reference = reference_logprobs(job, model, dataset, "train")
    validation = None
    if held_out is not None:
        held_out_reference = reference_logprobs(job, model, held_out, "val")
        validation = partial(validate, job, model, loss, held_out_reference, held_out.items)
    loop(
        job,
        model,
        stream,
        total_steps,
        update=partial(update, job, model, loss, reference),
        validate=validation,
        num_tokens=lambda judged: sum(sequence.loss_mask.numel() for sequence in judged.sequences),
    )


def update(
    job: Job,
    model: MegatronEngine,
    loss: KtoObjective,
    reference: ReferenceLogprobs,
    batch: list[LabelledAnswer],
    is_read: bool,
) -> dict[str, float]:
    """One optimizer step; returns its metrics. Collective."""
    microbatches, loss_function, kl = prepared(job, model, loss, reference, batch)
    # The pass over mismatched answers of the next step reads the weights too, whatever ``is_read`` says.
    totals, metrics = learn(job, model, microbatches, loss_function, is_read=True)
    metrics |= means(batch, totals.sums) | {"kl": kl}
    return {f"kto/{name}": value for name, value in metrics.items()}


def validate(
    job: Job,
    model: MegatronEngine,
    loss: KtoObjective,
    reference: ReferenceLogprobs,
    held_out: list[LabelledAnswer],
) -> dict[str, float]:
    """Loss and figures of held-out answers. Collective."""
    microbatches, loss_function, kl = prepared(job, model, loss, reference, held_out)
    sums = measured(job, model, microbatches, loss_function).sums
    figures = means(held_out, sums)
    found = {"loss": sums["loss"], "accuracy": figures["accuracy"], "kl": kl}
    return {f"kto/val_{name}": value for name, value in found.items()}


def prepared(
    job: Job,
    model: MegatronEngine,
    loss: KtoObjective,
    reference: ReferenceLogprobs,
    batch: list[LabelledAnswer],
) -> tuple[list[Microbatch], LossFunction, float]:
    """This rank's micro-batches of a global batch, their loss, and the batch's KL from the reference. Collective."""
    answers_reference, mismatched_reference = reference.of(batch).view(-1, 2).unbind(1)
    kl = kto_kl(summed_logprobs(job, model, [judged.mismatched for judged in batch]), mismatched_reference)
    loss_function = partial(
        loss,
        reference_B=answers_reference,
        is_good_B=torch.tensor([judged.is_good for judged in batch]),
        kl=kl,
        num_answers=len(batch),
    )
    return pack_for_rank(job.share, [judged.answer for judged in batch]), loss_function, kl


def means(batch: list[LabelledAnswer], sums: dict[str, float]) -> dict[str, float]:
    """Means over the good answers, over the bad ones, or over all; of a kind that the batch lacks there is none."""
    num_good = sum(judged.is_good for judged in batch)
    found = {"accuracy": sums["accuracy"] / len(batch)}
    for kind, count in (("chosen", num_good), ("rejected", len(batch) - num_good)):
        if count:
            found |= {f"{kind}_{name}": sums[f"{kind}_{name}"] / count for name in ("reward", "logprob")}
    return found
