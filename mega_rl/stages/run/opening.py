"""Opening a job: joining the ranks, the watch over them, what is on disk, and cleaning up afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from mega_rl import platform
from mega_rl.bridge.files.huggingface import HFReader
from mega_rl.config import RunConfig
from mega_rl.config.checks.model import check_model
from mega_rl.data.tokens.tokenizer import load_tokenizer
from mega_rl.megatron.checkpoint.saving import CheckpointWriter
from mega_rl.megatron.policy import initialize_groups
from mega_rl.observe import run_log
from mega_rl.observe.heartbeat import HEART
from mega_rl.observe.run_log import RUN_LOG
from mega_rl.observe.sinks.sinks import replace_file
from mega_rl.observe.timers import Timers
from mega_rl.parallel.collectives import gather_objects, is_first, own_name, together
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.parallel.store import shared_store
from mega_rl.parallel.watch.process import join
from mega_rl.parallel.watch.watch import watched
from mega_rl.planning.automatic import RESERVE_BYTES, automatic
from mega_rl.planning.memory_plan import Machine
from mega_rl.platform.contract.versions import installed
from mega_rl.stages.run.job import Job
from mega_rl.stages.run.output import CHECKPOINTS, take_output, writing_to
from mega_rl.stages.run.profiling import Profiling
from mega_rl.stages.run.speed import LoadWatch
from mega_rl.stages.run.state_in_memory import state_in_memory

ENVIRONMENT = "environment.txt"  # under the output directory: versions, variables and ranks
STACKS = "stacks"  # under the output directory: where every rank was when the watch ended a run


def take_peaks() -> dict[str, int]:
    """Peak memory of this rank since the last call, in bytes, of host and device as far as each is measured."""
    here = platform.current()
    stats = here.memory()
    is_host_measured = here.reset_peak_memory()
    peaks = {"host": stats.host_peak_bytes} if is_host_measured else {}
    return peaks | ({"device": stats.device_peak_bytes} if stats.device_total_bytes else {})


def describe(job: Job, found: Sequence[str]) -> None:
    """Say what was found so far, and leave what the run has to work with in a file, for the report."""
    here = platform.current()
    for line in found:
        job.say(line)
    if job.config.memory.offload and not here.has_own_memory:
        job.say(f"memory.offload does nothing on the {here.name} platform: its device memory is the host's")
    if job.config.memory.optimizer_on_host and not here.has_own_memory:
        job.say(f"memory.optimizer_on_host saves nothing on the {here.name} platform: its device memory is the host's")
    ranks = gather_objects(own_name())
    if job.is_main:
        versions = [f"  {name} {version}" for name, version in installed().items() if version is not None]
        prepared = [f"  {line}" for line in platform.prepare()]
        parts = {
            "Megatron-core and fused operators": prepared,
            "versions": versions,
            "ranks": [f"  {r}" for r in ranks],
        }
        lines = [
            *platform.environment_report(),
            *(line for name in parts if parts[name] for line in (name, *parts[name])),
        ]
        replace_file(job.output_dir / ENVIRONMENT, "\n".join(lines) + "\n")


@contextmanager
def open_job(config: RunConfig) -> Iterator[Job]:
    """Join the process group, keep the watch over all ranks, check what is on disk, and clean up afterwards.

    Raises:
        InputError: on every rank, for anything on any rank that a user can fix.
    """
    device, limits = join(config), config.trainer
    store = shared_store(limits.collective_timeout_s)
    stacks = Path(limits.output_dir).absolute() / STACKS
    watch = watched(store, stacks, limits.stall_timeout_s, limits.collective_timeout_s)
    with watch, _opened(config, device, store) as job:
        yield job
    # After an exception the other ranks may be anywhere: the process ends without these collectives.
    dist.barrier()  # rank 0 serves the store until no rank needs it
    dist.destroy_process_group()


@contextmanager
def _opened(config: RunConfig, device: torch.device, store: dist.Store) -> Iterator[Job]:
    """The job between the joining of the ranks and their parting; collective."""
    here = platform.current()
    with together("opening the job"):
        shape = check_model(config, dist.get_world_size())
        layout = ParallelLayout.of(config.parallel, dist.get_world_size())
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
    job = Job(
        config,
        device,
        layout,
        shape,
        weights,
        tokenizer,
        output_dir,
        resume,
        memory,
        writer,
        timers,
        store,
        profiling,
        LoadWatch(here.load),
    )
    with writing_to(output_dir), RUN_LOG.opened(output_dir / run_log.FILE, dist.get_rank(), dist.get_world_size()):
        describe(job, [*platform.prepare(), *warnings, *chosen])
        yield job
        job.checkpoints.finish()
        job.load.end()
    with HEART.waiting("the other ranks to end"):
        dist.barrier()
    if lock is not None:
        lock.release()
