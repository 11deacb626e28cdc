"""A reward model from pairs of answers (Bradley-Terry): update and validation; the loop: ``offline/loop.py``.

The score of an answer is the value of its last token, which predicts nothing: a sequence has it once more behind its
end, so that it is among the positions that are computed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mega_rl.algorithms.pairs import AnswersApart
from mega_rl.algorithms.value import PairwiseObjective, values_at_ends
from mega_rl.config import RunConfig
from mega_rl.data.pairs import Pair
from mega_rl.data.tokens.tokenizer import padding_token
from mega_rl.megatron.engine import MegatronEngine, ValueLoss
from mega_rl.microbatch import Microbatch
from mega_rl.parallel.collectives import together
from mega_rl.stages.dpo import pairs
from mega_rl.stages.models import trainer
from mega_rl.stages.models.values import open_value_model, scored_at_end
from mega_rl.stages.offline.loop import (
    end_values,
    learn,
    loop,
    measured,
    stream_of,
)
from mega_rl.stages.run import progress
from mega_rl.stages.run.batch_share import fits, pack_for_rank
from mega_rl.stages.run.job import Job
from mega_rl.stages.run.opening import open_job

FIGURES = ("accuracy", "margin", "chosen_score", "rejected_score")


def run(config: RunConfig) -> None:
    """Train as ``config`` says; every rank of the job calls it."""
    with open_job(config) as job:
        train(job)


def train(job: Job) -> None:
    config = job.config
    dataset, held_out = pairs(job)
    stream = stream_of(job, dataset)
    with together("reading the model"):
        shape, weights = open_value_model(config.model.path, "model.path", config.trainer.seed)
    if config.checkpoint.export_hf and padding_token(job.tokenizer, shape.vocab_size) is None:
        job.say(
            "warning: the tokenizer has no padding token of its own, so the exported config.json names none: "
            "transformers then scores one sequence at a time"
        )
    total_steps = progress.total_steps(config, stream.steps_per_epoch)
    spec = replace(trainer.companion_spec(config), router=config.router)
    model = trainer.trainer(job, spec, config.optimizer, (shape, weights), total_steps)
    loop(
        job,
        model,
        stream,
        total_steps,
        update=partial(update, job, model),
        validate=None if held_out is None else partial(validate, job, model, held_out.items),
        num_tokens=lambda pair: sum(sequence.token_ids.numel() for sequence in pair.sequences),
    )


def update(job: Job, model: MegatronEngine, batch: list[Pair], is_read: bool) -> dict[str, float]:
    """One optimizer step; returns its metrics. Collective."""
    microbatches, loss = prepared(job, model, batch)
    totals, metrics = learn(job, model, microbatches, loss, is_read)
    metrics |= {name: totals.sums[name] / len(batch) for name in FIGURES}
    return {f"rm/{name}": value for name, value in metrics.items()}


def validate(job: Job, model: MegatronEngine, held_out: list[Pair]) -> dict[str, float]:
    """Loss and figures of held-out pairs. Collective."""
    sums = measured(job, model, *prepared(job, model, held_out)).sums
    return {"rm/val_loss": sums["loss"]} | {f"rm/val_{n}": sums[n] / len(held_out) for n in ("accuracy", "margin")}


def prepared(job: Job, model: MegatronEngine, batch: list[Pair]) -> tuple[list[Microbatch], ValueLoss]:
    """This rank's micro-batches of a global batch, and their loss, as ``dpo.prepared``. Collective."""
    sequences = [scored_at_end(one.token_ids) for pair in batch for one in pair.sequences]
    loss = PairwiseObjective(job.config.reward_model.centre)
    margins_P = torch.tensor([pair.margin or 0.0 for pair in batch])
    settings: dict[str, Any] = {"margins_P": margins_P, "num_pairs": len(batch)}
    if fits(job.share, sequences, unit=2):
        return pack_for_rank(job.share, sequences, unit=2), partial(loss, **settings)
    model.collect_weights()
    values_B = end_values(job, model, sequences)
    return pack_for_rank(job.share, sequences), AnswersApart(
        partial(loss.of_pairs, **settings), values_B, values_at_ends
    )
