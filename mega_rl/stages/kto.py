"""Learning from answers judged one by one (KTO); the loop: ``offline/loop.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from mega_rl.algorithms.preference import KtoObjective, kto_kl
from mega_rl.config import RunConfig
from mega_rl.data.pairs import LabelledAnswer, LabelledDataset
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.stages.models import trainer
from mega_rl.stages.offline.answers import summed_logprobs
from mega_rl.stages.offline.loop import loop, read, stream_of
from mega_rl.stages.offline.method import HeldOutData, PreparedBatch, means
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
    dataset, held_out = read(job, LabelledDataset)
    if dataset.num_dropped:
        job.say(f"data: {dataset.num_dropped} answers longer than the length limits left out")
    stream = stream_of(job, dataset)
    total_steps = progress.total_steps(job.config, stream.steps_per_epoch)
    model = trainer.actor(job, total_steps)
    # The reference is the model as training begins: it is resumed after it.
    method = method_of(job, model, dataset, "train")
    validation = None if held_out is None else HeldOutData(method_of(job, model, held_out, "val"), held_out.items)
    loop(job, model, stream, total_steps, method, validation)


def method_of(job: Job, model: MegatronEngine, dataset: LabelledDataset, name: str) -> KahnemanTverskyOptimization:
    """For the answers of a data set; ``name`` is that of its file of the reference's log-probabilities. Collective."""
    settings = job.config.kto
    loss = KtoObjective(
        beta=settings.beta,
        desirable_weight=settings.desirable_weight,
        undesirable_weight=settings.undesirable_weight,
    )
    return KahnemanTverskyOptimization(job, model, loss, reference_logprobs(job, model, dataset, name))


@dataclass(frozen=True)
class KahnemanTverskyOptimization:
    """The `TrainingMethod` of the stage."""

    job: Job
    model: MegatronEngine
    loss: KtoObjective
    reference: ReferenceLogprobs  # of the data set that the answers are of
    section = "kto"

    def prepared(self, batch: list[LabelledAnswer]) -> PreparedBatch:
        """Finds the batch's KL from the reference, with a pass over mismatched answers."""
        answers_reference, mismatched_reference = self.reference.of(batch).view(-1, 2).unbind(1)
        mismatched = summed_logprobs(self.job, self.model, [judged.mismatched for judged in batch])
        kl = kto_kl(mismatched, mismatched_reference)
        loss = partial(
            self.loss,
            reference_B=answers_reference,
            is_good_B=torch.tensor([judged.is_good for judged in batch]),
            kl=kl,
            num_answers=len(batch),
        )
        return PreparedBatch(pack_for_rank(self.job.share, [judged.answer for judged in batch]), loss, {"kl": kl})

    def figures(self, batch: list[LabelledAnswer], sums: Mapping[str, float]) -> dict[str, float]:
        """Means over the good answers, over the bad ones, or over all; of a kind that the batch lacks there is none."""
        num_good = sum(judged.is_good for judged in batch)
        found = means(sums, ("accuracy",), len(batch))
        for kind, count in (("chosen", num_good), ("rejected", len(batch) - num_good)):
            if count:
                found |= means(sums, (f"{kind}_reward", f"{kind}_logprob"), count)
        return found

    def val_figures(self, held_out: list[LabelledAnswer], sums: Mapping[str, float]) -> dict[str, float]:
        return means(sums, ("accuracy",), len(held_out))

    def num_tokens(self, item: LabelledAnswer) -> int:
        return sum(sequence.loss_mask.numel() for sequence in item.sequences)
