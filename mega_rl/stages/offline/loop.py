"""What the stages share that learn from files: how the data is read, and the loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, Self, TypeVar

from transformers import PreTrainedTokenizerBase

from mega_rl.config import RunConfig
from mega_rl.config.schema.sections import DataConfig
from mega_rl.data.rows.rows import DataFiles
from mega_rl.data.stream import Dataset, Stream
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.parallel.collectives import together
from mega_rl.stages.offline.method import HeldOutData, Item, TrainingMethod, update, validate
from mega_rl.stages.run import progress
from mega_rl.stages.run.job import Job
from mega_rl.stages.run.progress import Progress
from mega_rl.stages.weights.export import export_trained

Data = TypeVar("Data", bound="FromFiles")


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
    method: TrainingMethod[Item],
    held_out: HeldOutData[Item] | None,
) -> None:
    """Batch, learn, validate, save, in the order in which it is written here; then the export."""
    config, timers, save_freq = job.config, job.timers, job.config.checkpoint.save_freq
    state = progress.resume(job.checkpoint, job.memory, model, stream, job.say)
    with job.observer(state, total_steps) as observer, job.notice() as notice:
        for step in range(state.step, total_steps):
            done = step + 1
            with job.step(done):
                batch = stream.next_batch()
                with timers("update"):
                    is_read = weights_are_read(config, done, total_steps)
                    metrics = update(job, model, method, batch, is_read) | model.router_metrics
            if held_out is not None and progress.is_due(done, config.validation.test_freq, total_steps):
                with timers("validate"):
                    metrics |= validate(job, model, held_out)
            metrics["data/epoch"] = stream.epochs
            reached = Progress(done, metrics=metrics)
            freq = 1 if notice.is_given() else save_freq
            progress.save_if_due(job, freq, model, stream, reached, total_steps)
            metrics |= job.device_metrics(job.reports_of_step())
            seconds = timers.collect()
            metrics |= seconds
            speed = sum(map(method.num_tokens, batch)) / max(seconds["time/step_s"], 1e-9)
            observer.log(done, metrics | {"throughput/tokens_per_s": speed})
            job.stop_if_given(notice, done)

    export_trained(job, model)
    job.say_where()


def weights_are_read(config: RunConfig, done: int, total_steps: int) -> bool:
    """Whether something other than the next step reads the weights that step ``done`` leaves."""
    return any(
        progress.is_due(done, freq, total_steps) for freq in (config.validation.test_freq, config.checkpoint.save_freq)
    )
