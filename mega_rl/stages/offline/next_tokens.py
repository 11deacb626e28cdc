"""Learning to predict the next token, and how well it is predicted: what pre-training and fine-tuning share."""

from __future__ import annotations

from functools import partial

import torch

from mega_rl.algorithms.objective import SftObjective
from mega_rl.data.stream import Dataset
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.microbatch import Sequence
from mega_rl.stages.models import trainer
from mega_rl.stages.offline.loop import (
    learn,
    loop,
    measured,
    stream_of,
)
from mega_rl.stages.run import progress
from mega_rl.stages.run.batch_share import denominators_of, pack_for_rank
from mega_rl.stages.run.job import Job


def train(job: Job, section: str, dataset: Dataset[Sequence], held_out: list[Sequence]) -> None:
    """The whole run of a stage, whose metrics are named ``section/...``. Collective."""
    stream = stream_of(job, dataset)
    total_steps = progress.total_steps(job.config, stream.steps_per_epoch)
    model = trainer.actor(job, total_steps)
    loop(
        job,
        model,
        stream,
        total_steps,
        update=partial(update, job, model, section),
        validate=partial(validate, job, model, section, held_out) if held_out else None,
        num_tokens=lambda sequence: sequence.loss_mask.numel(),
    )


def update(job: Job, model: MegatronEngine, section: str, batch: list[Sequence], is_read: bool) -> dict[str, float]:
    """One optimizer step; returns its metrics, named ``section/...``. Collective."""
    denominators = denominators_of(batch, job.config.data.max_response_length)
    loss = partial(SftObjective(), denominators=denominators)
    totals, metrics = learn(job, model, pack_for_rank(job.share, batch), loss, is_read)
    metrics["tokens"] = float(denominators.num_tokens)
    metrics["token_accuracy"] = totals.sums["hits"] / denominators.num_tokens
    return {f"{section}/{name}": value for name, value in metrics.items()}


def validate(job: Job, model: MegatronEngine, section: str, sequences: list[Sequence]) -> dict[str, float]:
    """Of the learnt tokens: their mean negative log-likelihood in nats, its exponential, and hits. Collective.

    A hit is a token that no other one is more probable than.
    """
    denominators = denominators_of(sequences, job.config.data.max_response_length)
    loss = partial(SftObjective(), denominators=denominators)
    sums = measured(job, model, pack_for_rank(job.share, sequences), loss).sums
    values = {
        "loss": sums["loss"],
        "perplexity": float(torch.tensor(sums["loss"], dtype=torch.float64).exp()),
        "token_accuracy": sums["hits"] / denominators.num_tokens,
    }
    return {f"{section}/val_{name}": value for name, value in values.items()}
