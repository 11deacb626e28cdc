"""Pairs of answers, read and packed: what the stages share that learn which of two answers is better."""

from __future__ import annotations

from collections.abc import Callable

from mega_rl.algorithms.pairs import AnswersApart
from mega_rl.data.pairs import PairDataset
from mega_rl.megatron.engine import LossFunction, ValueLoss
from mega_rl.microbatch import Sequence
from mega_rl.stages.offline.loop import read
from mega_rl.stages.offline.method import PreparedBatch
from mega_rl.stages.run.batch_share import BatchShare, fits, pack_for_rank
from mega_rl.stages.run.job import Job

VAL_FIGURES = ("accuracy", "margin")


def read_pairs(job: Job) -> tuple[PairDataset, PairDataset | None]:
    """The training and the held-out pairs. Collective."""
    dataset, held_out = read(job, PairDataset)
    if dataset.num_dropped:
        job.say(f"data: {dataset.num_dropped} pairs with an answer longer than the length limits left out")
    return dataset, held_out


def prepared_pairs(
    share: BatchShare, sequences: list[Sequence], loss: LossFunction | ValueLoss, apart: Callable[[], AnswersApart]
) -> PreparedBatch:
    """Both answers of a pair lie in one micro-batch; if there is no room for those of every pair, no two need to.

    Args:
        apart: the loss of answers that lie in different micro-batches, which takes a forward pass more. Collective.
    """
    if fits(share, sequences, unit=2):
        return PreparedBatch(pack_for_rank(share, sequences, unit=2), loss)
    return PreparedBatch(pack_for_rank(share, sequences), apart())
