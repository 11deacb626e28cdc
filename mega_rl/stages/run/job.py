"""What every stage needs before its loop: processes, platform, layout, tokenizer, output directory, observer.

What sampling needs besides is in `mega_rl.stages.run.sampling_job`, which no other stage imports.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from mega_rl import platform
from mega_rl.bridge.files.huggingface import HFReader
from mega_rl.bridge.mapping.tensors import hf_tensors
from mega_rl.config import RunConfig
from mega_rl.config.schema.stage import ADAPTER, EXPORT, exports_adapter
from mega_rl.data.pictures.picture_set import PictureSet
from mega_rl.errors import Stopped
from mega_rl.megatron.checkpoint import checkpoint
from mega_rl.megatron.checkpoint.saving import CheckpointWriter
from mega_rl.models.flops import pass_flops
from mega_rl.models.shape import ModelShape
from mega_rl.observe.heartbeat import HEART
from mega_rl.observe.observer import Observer
from mega_rl.observe.run_log import RUN_LOG
from mega_rl.observe.sinks.tensorboard import PAGE
from mega_rl.observe.timers import Timers
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.planning.steps import budget_of
from mega_rl.stages.run.batch_share import BatchShare
from mega_rl.stages.run.notice import Notice
from mega_rl.stages.run.output import CHECKPOINTS
from mega_rl.stages.run.profiling import Profiling
from mega_rl.stages.run.progress import Progress
from mega_rl.stages.run.speed import LoadWatch, RankReport, device_metrics, reports_of_step
from mega_rl.stages.run.state_in_memory import StateInMemory


@dataclass(frozen=True)
class Job:
    """One running stage on this rank."""

    config: RunConfig
    device: torch.device
    layout: ParallelLayout
    shape: ModelShape
    weights: HFReader  # of model.path, checked against the shape
    tokenizer: PreTrainedTokenizerBase
    output_dir: Path
    checkpoint: Path | None  # to resume from
    memory: StateInMemory | None  # copies of the state, to resume from before any checkpoint
    checkpoints: CheckpointWriter
    timers: Timers
    store: dist.Store  # of all ranks
    profiling: Profiling
    load: LoadWatch

    @property
    def is_main(self) -> bool:
        return dist.get_rank() == 0

    @cached_property
    def share(self) -> BatchShare:
        """This rank's share of every batch."""
        config = self.config
        return BatchShare(
            self.layout,
            dist.get_rank(),
            max_tokens=budget_of(config),
            pad_multiple=self.layout.tensor if config.parallel.sequence else 1,
            pad_token_id=int(self.tokenizer.pad_token_id or 0),
            attention_slope=pass_flops(self.shape, hf_tensors(self.shape)).attention_slope,
            picture_set=self.picture_set,
        )

    @property
    def picture_set(self) -> PictureSet | None:
        """The pictures of the prompts, for a job that samples."""
        return None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """The block is this training step, from 1."""
        HEART.step = number
        with self.profiling.step(number), self.timers("step"):
            yield

    def reports_of_step(self) -> list[RankReport]:
        """What every rank tells of the step that ends, on rank 0; before the timers are collected. Collective."""
        return reports_of_step(self.timers, self.layout, self.load)

    def device_metrics(self, reports: Sequence[RankReport]) -> dict[str, float]:
        """Speed and memory of the devices in a step, of the reports of all ranks; without reports nothing."""
        given = self.config.platform.peak_tflops
        peak = platform.current().peak_flops() if given is None else given * 1e12
        return device_metrics(reports, peak)

    @property
    def export_dir(self) -> Path:
        return self.output_dir / EXPORT

    @property
    def adapter_dir(self) -> Path:
        return self.output_dir / ADAPTER

    def observer(self, state: Progress, total_steps: int) -> Observer:
        """What this run logs to; rows of an earlier run that will be logged again are dropped.

        A run that was killed between a checkpoint and the row of its step gets that row now, without times.
        """
        first = state.step + 1 if state.step else 0
        settings = dataclasses.asdict(self.config)
        observer = Observer.create(self.config.logging, self.output_dir, self.is_main, first, total_steps, settings)
        own = (self.output_dir / CHECKPOINTS).resolve()
        is_of_memory = self.memory is not None and self.memory.step is not None
        is_of_here = self.checkpoint is not None and self.checkpoint.resolve().parent == own
        if state.metrics and (is_of_memory or is_of_here):
            observer.log_if_missing(state.step, state.metrics)
        return observer

    def notice(self) -> Notice:
        """Listens for the signals that ask this run to end."""
        return Notice(self.config.checkpoint.grace_s, self.say)

    def stop_if_given(self, notice: Notice, step: int) -> None:
        """End the run after ``step``, whose checkpoint is written, if it was asked to. Collective."""
        if notice.answer is not None:
            self.checkpoints.finish()
            raise Stopped(
                f"stopped after step {step} because of {notice.answer.name}: its checkpoint is written, and the same "
                "command goes on from there"
            )

    def say(self, sentence: str) -> None:
        if self.is_main:
            RUN_LOG.say(sentence)
            print(sentence, flush=True)

    def say_where(self) -> None:
        """Tell where checkpoint, weights and dashboard are."""
        newest = checkpoint.all_checkpoints(self.output_dir / CHECKPOINTS)
        if newest:
            self.say(f"checkpoint: {newest[0]}")
        if self.config.checkpoint.export_hf:
            self.say(f"Hugging Face weights: {self.export_dir}")
        if self.config.checkpoint.export_hf and exports_adapter(self.config.tuning):
            self.say(f"adapter, as PEFT has it: {self.adapter_dir}")
        if self.config.logging.tensorboard:
            self.say(f"dashboard: tensorboard --logdir {self.output_dir}, then http://localhost:6006/{PAGE}")
