"""Learning to predict the next token, and how well it is predicted: what pre-training and fine-tuning share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from mega_rl.algorithms.objective import SftObjective
from mega_rl.algorithms.reduce import Denominators
from mega_rl.data.stream import Dataset
from mega_rl.microbatch import Sequence
from mega_rl.stages.models import trainer
from mega_rl.stages.offline.loop import loop, stream_of
from mega_rl.stages.offline.method import HeldOutData, PreparedBatch
from mega_rl.stages.run import progress
from mega_rl.stages.run.batch_share import denominators_of, pack_for_rank
from mega_rl.stages.run.job import Job


def train(job: Job, section: str, dataset: Dataset[Sequence], held_out: list[Sequence]) -> None:
    """The whole run of a stage, whose metrics are named ``section/...``. Collective."""
    stream = stream_of(job, dataset)
    total_steps = progress.total_steps(job.config, stream.steps_per_epoch)
    model = trainer.actor(job, total_steps)
    method = NextTokenPrediction(job, section)
    loop(job, model, stream, total_steps, method, HeldOutData(method, held_out) if held_out else None)


@dataclass(frozen=True)
class NextTokenPrediction:
    """The `TrainingMethod` of sequences."""

    job: Job
    section: str

    def prepared(self, batch: list[Sequence]) -> PreparedBatch:
        loss = partial(SftObjective(), denominators=self._denominators(batch))
        return PreparedBatch(pack_for_rank(self.job.share, batch), loss)

    def figures(self, batch: list[Sequence], sums: Mapping[str, float]) -> dict[str, float]:
        num_tokens = self._denominators(batch).num_tokens
        return {"tokens": float(num_tokens), "token_accuracy": sums["hits"] / num_tokens}

    def val_figures(self, held_out: list[Sequence], sums: Mapping[str, float]) -> dict[str, float]:
        """Of the learnt tokens: the exponential of their mean negative log-likelihood in nats, and hits.

        A hit is a token that no other one is more probable than.
        """
        return {
            "perplexity": float(torch.tensor(sums["loss"], dtype=torch.float64).exp()),
            "token_accuracy": sums["hits"] / self._denominators(held_out).num_tokens,
        }

    def num_tokens(self, item: Sequence) -> int:
        return item.loss_mask.numel()

    def _denominators(self, batch: list[Sequence]) -> Denominators:
        return denominators_of(batch, self.job.config.data.max_response_length)
