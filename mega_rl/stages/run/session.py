"""What every stage needs before its loop: processes, platform, layout, tokenizer, output directory, observer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from mega_rl import platform
from mega_rl.bridge.files.huggingface import HFReader
from mega_rl.bridge.mapping.tensors import hf_tensors
from mega_rl.config import RunConfig, samples
from mega_rl.config.checks.model import check_model
from mega_rl.config.schema.stage import (
    ADAPTER,
    EXPORT,
    exports_adapter,
)
from mega_rl.data.pictures.image_processor import picture_reader
from mega_rl.data.pictures.picture_set import PictureSet
from mega_rl.data.tokens.tokenizer import load_tokenizer
from mega_rl.errors import Stopped
from mega_rl.megatron.checkpoint import checkpoint
from mega_rl.megatron.checkpoint.saving import CheckpointWriter
from mega_rl.megatron.policy import initialize_groups
from mega_rl.models.flops import pass_flops
from mega_rl.models.shape import ModelShape
from mega_rl.observe import run_log
from mega_rl.observe.heartbeat import HEART
from mega_rl.observe.observer import Observer
from mega_rl.observe.run_log import RUN_LOG
from mega_rl.observe.sinks.sinks import replace_file
from mega_rl.observe.sinks.tensorboard import PAGE
from mega_rl.observe.timers import Timers
from mega_rl.parallel.collectives import gather_objects, is_first, own_name, together
from mega_rl.parallel.layout import EngineLayout, ParallelLayout
from mega_rl.parallel.rendezvous import Rendezvous
from mega_rl.parallel.store import shared_store
from mega_rl.parallel.watch.process import join
from mega_rl.parallel.watch.watch import watched
from mega_rl.planning.automatic import RESERVE_BYTES, automatic
from mega_rl.planning.memory_plan import Machine
from mega_rl.planning.steps import budget_of
from mega_rl.platform.contract.versions import installed
from mega_rl.rollout.collect.trajectory_store import TrajectoryStore
from mega_rl.rollout.episodes.episode_tokens import EpisodePlan
from mega_rl.stages.run.batch_share import BatchShare
from mega_rl.stages.run.episodes import plan_of
from mega_rl.stages.run.notice import Notice
from mega_rl.stages.run.output import (
    CHECKPOINTS,
    take_output,
    writing_to,
)
from mega_rl.stages.run.profiling import Profiling
from mega_rl.stages.run.progress import Progress
from mega_rl.stages.run.speed import LoadWatch, device_metrics
from mega_rl.stages.run.state_in_memory import StateInMemory, state_in_memory

ENVIRONMENT = "environment.txt"  # under the output directory: versions, variables and ranks
STACKS = "stacks"  # under the output directory: where every rank was when the watch ended a run


@dataclass(frozen=True)
class Session:
    """One running stage on this rank."""

    config: RunConfig
    device: torch.device
    layout: ParallelLayout
    engine_layout: EngineLayout
    shape: ModelShape
    weights: HFReader  # of model.path, checked against the shape
    tokenizer: PreTrainedTokenizerBase
    output_dir: Path
    checkpoint: Path | None  # to resume from
    memory: StateInMemory | None  # copies of the state, to resume from before any checkpoint
    checkpoints: CheckpointWriter
    timers: Timers
    rendezvous: Rendezvous  # of all ranks
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

    @cached_property
    def picture_set(self) -> PictureSet | None:
        """The pictures of the prompts, where the model sees any. All ranks ask for it together for the first time."""
        tower, config = self.shape.tower, self.config
        if tower is None or not samples(config):
            return None
        with together("opening the image processor"):
            return PictureSet(picture_reader(config.model.path, tower, self.tokenizer, config.data))

    @cached_property
    def trajectory_store(self) -> TrajectoryStore:
        """The tokens of what is sampled. All ranks ask for it together for the first time."""
        return TrajectoryStore.open(self.layout, self.config.trainer.collective_timeout_s)

    @cached_property
    def plan(self) -> EpisodePlan | None:
        """How episodes go on, if there is an environment. All ranks ask for it together for the first time."""
        with together("making an environment"):
            return plan_of(self.config, self.tokenizer)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """The block is this training step, from 1."""
        HEART.step = number
        with self.profiling.step(number), self.timers("step"):
            yield

    def device_metrics(self) -> dict[str, float]:
        """Speed and memory of the devices in the step that ends; before the timers are collected. Collective."""
        given = self.config.platform.peak_tflops
        peak = platform.current().peak_flops() if given is None else given * 1e12
        return device_metrics(self.timers, self.layout, self.load, peak)

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


def take_peaks() -> dict[str, int]:
    """Peak memory of this rank since the last call, in bytes, of host and device as far as each is measured."""
    here = platform.current()
    stats = here.memory()
    is_host_measured = here.reset_peak_memory()
    peaks = {"host": stats.host_peak_bytes} if is_host_measured else {}
    return peaks | ({"device": stats.device_peak_bytes} if stats.device_total_bytes else {})


def describe(session: Session, found: Sequence[str]) -> None:
    """Say what was found so far, and leave what the run has to work with in a file, for the report."""
    here = platform.current()
    for line in found:
        session.say(line)
    if session.config.memory.offload and not here.has_own_memory:
        session.say(f"memory.offload does nothing on the {here.name} platform: its device memory is the host's")
    if session.config.memory.optimizer_on_host and not here.has_own_memory:
        session.say(
            f"memory.optimizer_on_host saves nothing on the {here.name} platform: its device memory is the host's"
        )
    ranks = gather_objects(own_name())
    if session.is_main:
        versions = [f"  {name} {version}" for name, version in installed().items() if version is not None]
        lines = [*platform.environment_report(), "versions", *versions, "ranks", *(f"  {rank}" for rank in ranks)]
        replace_file(session.output_dir / ENVIRONMENT, "\n".join(lines) + "\n")


@contextmanager
def open_session(config: RunConfig) -> Iterator[Session]:
    """Join the process group, keep the watch over all ranks, check what is on disk, and clean up afterwards.

    Raises:
        InputError: on every rank, for anything on any rank that a user can fix.
    """
    device, limits = join(config), config.trainer
    store = shared_store(limits.collective_timeout_s)
    stacks = Path(limits.output_dir).absolute() / STACKS
    watch = watched(store, stacks, limits.stall_timeout_s, limits.collective_timeout_s)
    with watch, _opened(config, device, store) as session:
        yield session
    # After an exception the other ranks may be anywhere: the process ends without these collectives.
    dist.barrier()  # rank 0 serves the store until no rank needs it
    dist.destroy_process_group()


@contextmanager
def _opened(config: RunConfig, device: torch.device, store: dist.Store) -> Iterator[Session]:
    """The session between the joining of the ranks and their parting; collective."""
    here = platform.current()
    with together("opening the session"):
        shape = check_model(config, dist.get_world_size())
        layout = ParallelLayout.of(config.parallel, dist.get_world_size())
        engine_size = config.rollout.tensor_parallel_size if samples(config) else 1
        if samples(config) and config.rollout.placement == "separate":
            engine_size = dist.get_world_size()  # all ranks together use the engines in other processes
        engine_layout = EngineLayout(dist.get_world_size(), engine_size)
        weights = HFReader(config.model.path)
        weights.check(shape)
        tokenizer = load_tokenizer(config.model.path)
    device_bytes = min(gather_objects(here.memory().device_total_bytes))
    machine = Machine(dist.get_world_size(), device_bytes, RESERVE_BYTES, here.name)
    config, chosen = automatic(config, shape, machine)
    initialize_groups(layout, config.trainer.seed, config.trainer.collective_timeout_s)
    here.seed(config.trainer.seed)
    output_dir = Path(config.trainer.output_dir)
    memory = state_in_memory(config, shape, lambda sentence: print(sentence, flush=True) if is_first() else None)
    # The lock is held to the end of its process if the run fails.
    lock, resume, warnings = take_output(config, layout, memory.step if memory is not None else None)
    settings = config.checkpoint
    writer = CheckpointWriter(output_dir / CHECKPOINTS, settings.keep_checkpoints, settings.async_save)
    profiling = Profiling(config.trainer.profile, output_dir, dist.get_rank(), partial(print, flush=True))
    timers = Timers(memory=take_peaks, within=profiling.phase)
    rendezvous = Rendezvous(store, dist.get_rank(), dist.get_world_size())
    session = Session(
        config,
        device,
        layout,
        engine_layout,
        shape,
        weights,
        tokenizer,
        output_dir,
        resume,
        memory,
        writer,
        timers,
        rendezvous,
        profiling,
        LoadWatch(here.load),
    )
    with writing_to(output_dir), RUN_LOG.opened(output_dir / run_log.FILE, dist.get_rank(), dist.get_world_size()):
        describe(session, [*platform.prepare(), *warnings, *chosen])
        yield session
        session.checkpoints.finish()
        session.load.end()
    with HEART.waiting("the other ranks to end"):
        dist.barrier()
    if lock is not None:
        lock.release()
