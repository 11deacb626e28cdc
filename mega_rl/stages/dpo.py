"""Learning from pairs of answers, DPO and its family; the loop: ``offline/loop.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mega_rl.algorithms.pairs import AnswersApart
from mega_rl.algorithms.preference import PreferenceObjective, answer_sums
from mega_rl.config import RunConfig
from mega_rl.config.schema.learning import PreferenceConfig
from mega_rl.data.pairs import Pair, PairDataset
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.stages.models import trainer
from mega_rl.stages.offline.answers import summed_logprobs
from mega_rl.stages.offline.loop import loop, stream_of
from mega_rl.stages.offline.method import HeldOutData, PreparedBatch, means
from mega_rl.stages.offline.pairs import VAL_FIGURES, prepared_pairs, read_pairs
from mega_rl.stages.offline.reference_logprobs import ReferenceLogprobs, reference_logprobs
from mega_rl.stages.run import progress
from mega_rl.stages.run.job import Job
from mega_rl.stages.run.opening import open_job

FIGURES = ("chosen_reward", "rejected_reward", "accuracy", "margin", "chosen_logprob", "rejected_logprob")


def run(config: RunConfig) -> None:
    """Train as ``config`` says; every rank of the job calls it."""
    with open_job(config) as job:
        train(job)


def train(job: Job) -> None:
    dataset, held_out = read_pairs(job)
    stream = stream_of(job, dataset)
    total_steps = progress.total_steps(job.config, stream.steps_per_epoch)
    model = trainer.actor(job, total_steps)
    # The reference is the model as training begins: it is resumed after it.
    method = method_of(job, model, dataset, "train")
    validation = None if held_out is None else HeldOutData(method_of(job, model, held_out, "val"), held_out.items)
    loop(job, model, stream, total_steps, method, validation)


def method_of(job: Job, model: MegatronEngine, dataset: PairDataset, name: str) -> PreferenceOptimization:
    """For the pairs of a data set; ``name`` is that of its file of the reference's log-probabilities. Collective."""
    loss = objective(job.config.preference)
    reference = reference_logprobs(job, model, dataset, name) if loss.needs_reference else None
    return PreferenceOptimization(job, model, loss, reference)


def objective(settings: PreferenceConfig) -> PreferenceObjective:
    return PreferenceObjective(
        loss=settings.loss,
        beta=settings.beta,
        label_smoothing=settings.label_smoothing,
        simpo_gamma=settings.simpo_gamma,
        sft_coefficient=settings.sft_coefficient,
    )


@dataclass(frozen=True)
class PreferenceOptimization:
    """The `TrainingMethod` of the stage."""

    job: Job
    model: MegatronEngine
    loss: PreferenceObjective
    reference: ReferenceLogprobs | None  # of the data set that the pairs are of
    section = "dpo"

    def prepared(self, batch: list[Pair]) -> PreparedBatch:
        sequences = [one for pair in batch for one in pair.sequences]
        num_tokens_B = torch.stack([one.loss_mask.sum() for one in sequences])
        reference_B = None if self.reference is None else self.reference.of(batch)
        counts: dict[str, Any] = {"num_pairs": len(batch), "num_chosen_tokens": int(num_tokens_B[::2].sum())}

        def apart() -> AnswersApart:
            shares_of = partial(
                self.loss.of_pairs,
                num_tokens_P2=num_tokens_B.view(-1, 2),
                reference_P2=None if reference_B is None else reference_B.view(-1, 2),
                **counts,
            )
            sums_B = summed_logprobs(self.job, self.model, sequences)
            return AnswersApart(shares_of, sums_B, lambda stats, microbatch: answer_sums(stats.logprobs, microbatch))

        return prepared_pairs(self.job.share, sequences, partial(self.loss, reference_B=reference_B, **counts), apart)

    def figures(self, batch: list[Pair], sums: Mapping[str, float]) -> dict[str, float]:
        return means(sums, FIGURES, len(batch))

    def val_figures(self, held_out: list[Pair], sums: Mapping[str, float]) -> dict[str, float]:
        return means(sums, VAL_FIGURES, len(held_out))

    def num_tokens(self, item: Pair) -> int:
        return sum(sequence.loss_mask.numel() for sequence in item.sequences)
