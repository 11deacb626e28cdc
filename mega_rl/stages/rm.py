"""A reward model from pairs of answers (Bradley-Terry); the loop: ``offline/loop.py``.

The score of an answer is the value of its last token, which predicts nothing: a sequence has it once more behind its
end, so that it is among the positions that are computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from mega_rl.algorithms.pairs import AnswersApart
from mega_rl.algorithms.value import PairwiseObjective, values_at_ends
from mega_rl.config import RunConfig
from mega_rl.data.pairs import Pair
from mega_rl.data.tokens.tokenizer import padding_token
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.parallel.collectives import together
from mega_rl.stages.models import trainer
from mega_rl.stages.models.values import open_value_model, scored_at_end
from mega_rl.stages.offline.answers import end_values
from mega_rl.stages.offline.loop import loop, stream_of
from mega_rl.stages.offline.method import HeldOutData, PreparedBatch, means
from mega_rl.stages.offline.pairs import VAL_FIGURES, prepared_pairs, read_pairs
from mega_rl.stages.run import progress
from mega_rl.stages.run.job import Job
from mega_rl.stages.run.opening import open_job

FIGURES = ("accuracy", "margin", "chosen_score", "rejected_score")


def run(config: RunConfig) -> None:
    """Train as ``config`` says; every rank of the job calls it."""
    with open_job(config) as job:
        train(job)


def train(job: Job) -> None:
    config = job.config
    dataset, held_out = read_pairs(job)
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
    method = RewardModelling(job, model, PairwiseObjective(config.reward_model.centre))
    loop(job, model, stream, total_steps, method, None if held_out is None else HeldOutData(method, held_out.items))


@dataclass(frozen=True)
class RewardModelling:
    """The `TrainingMethod` of the stage."""

    job: Job
    model: MegatronEngine
    loss: PairwiseObjective
    section = "rm"

    def prepared(self, batch: list[Pair]) -> PreparedBatch:
        sequences = [scored_at_end(one.token_ids) for pair in batch for one in pair.sequences]
        margins_P = torch.tensor([pair.margin or 0.0 for pair in batch])
        settings: dict[str, Any] = {"margins_P": margins_P, "num_pairs": len(batch)}

        def apart() -> AnswersApart:
            values_B = end_values(self.job, self.model, sequences)
            return AnswersApart(partial(self.loss.of_pairs, **settings), values_B, values_at_ends)

        return prepared_pairs(self.job.share, sequences, partial(self.loss, **settings), apart)

    def figures(self, batch: list[Pair], sums: Mapping[str, float]) -> dict[str, float]:
        return means(sums, FIGURES, len(batch))

    def val_figures(self, held_out: list[Pair], sums: Mapping[str, float]) -> dict[str, float]:
        return means(sums, VAL_FIGURES, len(held_out))

    def num_tokens(self, item: Pair) -> int:
        return sum(sequence.token_ids.numel() for sequence in item.sequences)
