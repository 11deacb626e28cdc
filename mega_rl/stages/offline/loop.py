"""What the stages share that learn from files: the loop, one optimizer step, and figures without a gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, Self, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from mega_rl.algorithms.preference import answer_sums
from mega_rl.algorithms.value import values_at_ends
from mega_rl.config import RunConfig
from mega_rl.config.schema.sections import DataConfig
from mega_rl.data.rows.rows import DataFiles
from mega_rl.data.stream import Dataset, Stream
from mega_rl.megatron.engine import LossFunction, MegatronEngine, ValueLoss
from mega_rl.microbatch import Figures, Microbatch, Sequence
from mega_rl.parallel.collectives import gather_objects, together
from mega_rl.stages.run import progress
from mega_rl.stages.run.batch_share import (
    Totals,
    pack_for_rank,
    totals_of,
)
from mega_rl.stages.run.job import Job
from mega_rl.stages.run.progress import Progress, warn_if_skipped
from mega_rl.stages.weights.export import export_trained

Item = TypeVar("Item")
Data = TypeVar("Data", bound="FromFiles")
Update = Callable[[list[Item], bool], dict[str, float]]  # (batch, is_read) -> metrics; see ``learn``


class FromFiles(Protocol):
    """A data set as a class method of its class reads it."""

    @classmethod
    def from_files(cls, files: DataFiles, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> Self: ...


def read(job: Job, kind: type[Data], options: Callable[[], dict[str, Any]] = dict) -> tuple[Data, Data | None]:
    """The training data and the held-out data, if there is any. Collective.

    Args:
        options: further arguments of ``from_files``; what it raises is raised on every rank.
    """
    data, tokenizer = job.config.data, job.tokenizer
    with together("preparing to read the data"):
        given = options()
    with together("reading the data"):  # what is collective within raises on every rank at once
        from_files: Callable[..., Data] = partial(kind.from_files, **given)
        dataset, held_out = from_files(DataFiles(data.train_files), tokenizer, data), None
        if data.val_files:
            held_out = from_files(DataFiles.validation(data), tokenizer, data)
    return dataset, held_out


def stream_of(job: Job, dataset: Dataset[Item]) -> Stream[Item]:
    """Collective."""
    data = job.config.data
    with together("reading the data"):
        return Stream(dataset, data.train_batch_size, data.shuffle, data.seed)


def loop(
    job: Job,
    model: MegatronEngine,
    stream: Stream[Item],
    total_steps: int,
    update: Update[Item],
    validate: Callable[[], dict[str, float]] | None,
    num_tokens: Callable[[Item], int],
) -> None:
    """Batch, learn, validate, save, in the order in which it is written here; then the export.

    Args:
        update: one optimizer step.
        validate: metrics of the held-out data; None: there is none.
        num_tokens: positions of an item that are computed, for the throughput.
    """
    config, timers, save_freq = job.config, job.timers, job.config.checkpoint.save_freq
    state = progress.resume(job.checkpoint, job.memory, model, stream, job.say)
    with job.observer(state, total_steps) as observer, job.notice() as notice:
        for step in range(state.step, total_steps):
            done = step + 1
            with job.step(done):
                batch = stream.next_batch()
                with timers("update"):
                    metrics = update(batch, weights_are_read(config, done, total_steps)) | model.router_metrics
            if validate is not None and progress.is_due(done, config.validation.test_freq, total_steps):
                with timers("validate"):
                    metrics |= validate()
            metrics["data/epoch"] = stream.epochs
            reached = Progress(done, metrics=metrics)
            freq = 1 if notice.is_given() else save_freq
            progress.save_if_due(job, freq, model, stream, reached, total_steps)
            metrics |= job.device_metrics()
            seconds = timers.collect()
            metrics |= seconds
            speed = sum(map(num_tokens, batch)) / max(seconds["time/step_s"], 1e-9)
            observer.log(done, metrics | {"throughput/tokens_per_s": speed})
            job.stop_if_given(notice, done)

    export_trained(job, model)
    job.say_where()


def weights_are_read(config: RunConfig, done: int, total_steps: int) -> bool:
    """Whether something other than the next step reads the weights that step ``done`` leaves."""
    return any(
        progress.is_due(done, freq, total_steps) for freq in (config.validation.test_freq, config.checkpoint.save_freq)
    )


def learn(
    job: Job,
    model: MegatronEngine,
    microbatches: list[Microbatch],
    loss: LossFunction | ValueLoss,
    is_read: bool,
) -> tuple[Totals, dict[str, float]]:
    """One optimizer step: the figures over all ranks, and metrics by the last parts of their names. Collective.

    With optimizer in ``memory.offload`` its state is on the host while there are activations.

    Args:
        is_read: more than the next forward and backward pass reads the weights.
    """
    model.offload.to_host("optimizer")
    totals = totals_of(job.share, model.forward_backward(microbatches, loss))
    model.offload.to_device("optimizer")
    step = model.optimizer_step(next_is_forward_backward=not is_read)
    warn_if_skipped(job.say, model, step)
    return totals, {
        "loss": totals.sums["loss"],
        "grad_norm": step.grad_norm,
        "lr": step.lr,
        "skipped_steps_total": float(model.stepper.skipped.total),
    }


@torch.no_grad()
def measured(job: Job, model: MegatronEngine, microbatches: list[Microbatch], loss: LossFunction | ValueLoss) -> Totals:
    """What an objective says of the present weights, its loss as one of the sums. Collective."""
    is_of_values = model.policy.shape.head == "value"
    of_all: list[Any] = (model.policy.token_values if is_of_values else model.token_stats)(microbatches)
    found = [loss(one, microbatch) for one, microbatch in zip(of_all, microbatches, strict=True)]
    reports = [Figures({"loss": value, **figures.sums}, figures.maxima) for value, figures in found]
    # Every pipeline stage was given the statistics; they count once.
    return totals_of(job.share, reports if job.share.is_last_stage else [])


def summed_logprobs(job: Job, model: MegatronEngine, sequences: list[Sequence]) -> torch.Tensor:
    """[sequences] float64: log-probabilities of the learnt tokens under the present weights, summed. Collective."""
    microbatches = pack_for_rank(job.share, sequences)
    stats = zip(model.token_stats(microbatches), microbatches, strict=True)
    return _of_all(job, microbatches, [answer_sums(one.logprobs.double(), m) for one, m in stats], len(sequences))


def end_values(job: Job, model: MegatronEngine, sequences: list[Sequence]) -> torch.Tensor:
    """[sequences] float64: the values of their last positions under the present weights. Collective."""
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
