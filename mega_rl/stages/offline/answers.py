"""What the present weights say of whole answers, one number each, on every rank."""

from __future__ import annotations

import torch

from mega_rl.algorithms.preference import answer_sums
from mega_rl.algorithms.value import values_at_ends
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.microbatch import Microbatch, Sequence
from mega_rl.parallel.collectives import gather_objects
from mega_rl.stages.run.batch_share import pack_for_rank
from mega_rl.stages.run.job import Job


def summed_logprobs(job: Job, model: MegatronEngine, sequences: list[Sequence]) -> torch.Tensor:
    """[sequences] float64: log-probabilities of the learnt tokens under the present weights, summed. Collective."""
    model.collect_weights()
    microbatches = pack_for_rank(job.share, sequences)
    stats = zip(model.token_stats(microbatches), microbatches, strict=True)
    return _of_all(job, microbatches, [answer_sums(one.logprobs.double(), m) for one, m in stats], len(sequences))


def end_values(job: Job, model: MegatronEngine, sequences: list[Sequence]) -> torch.Tensor:
    """[sequences] float64: the values of their last positions under the present weights. Collective."""
    model.collect_weights()
    microbatches = pack_for_rank(job.share, sequences)
    values = zip(model.policy.token_values(microbatches), microbatches, strict=True)
    return _of_all(job, microbatches, [values_at_ends(values_T, m) for values_T, m in values], len(sequences))


def _of_all(job: Job, microbatches: list[Microbatch], own: list[torch.Tensor], num: int) -> torch.Tensor:
    """[num] float64: every sequence's number, from the ranks that have it."""
    found = torch.zeros(num, dtype=torch.float64)
    places = [place for microbatch in microbatches for place in microbatch.sequence_indices]
    values = [value for numbers_B in own for value in numbers_B.tolist()]
    is_counted = job.share.is_counted and job.share.is_last_stage
    for part in gather_objects(dict(zip(places, values, strict=True)) if is_counted else {}):
        for place, value in part.items():
            found[place] = value
    return found
