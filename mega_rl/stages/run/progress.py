"""Where a run stands: resuming, saving, and telling the user where things are."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from mega_rl.config import RunConfig
from mega_rl.errors import InputError, shown
from mega_rl.megatron.checkpoint import checkpoint
from mega_rl.megatron.checkpoint.saving import CheckpointWriter, Late
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.megatron.optim.optimizer import OptimizerStats
from mega_rl.observe.heartbeat import HEART
from mega_rl.observe.timers import Timers
from mega_rl.parallel.collectives import is_first, together
from mega_rl.stages.run.state_in_memory import StateInMemory

Validations = dict[str, dict[str, float]]  # "first" and "last" -> validation metrics


class Source(Protocol):
    """What a stage learns from; its state is what a checkpoint needs to go on with the next batch."""

    def state_dict(self) -> dict[str, Any] | Late:
        """The state, whole on rank 0, or what gives it later. Collective."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    step: int = 0  # finished steps
    validations: Validations = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the last step, as far as they are known at its save


def is_due(step: int, frequency: int | None, total_steps: int) -> bool:
    """Whether something done every ``frequency`` steps, and always after the last one, is due after ``step`` steps.

    None: it is never due.
    """
    if frequency is None:
        return False
    return step == total_steps or (frequency > 0 and step % frequency == 0)


def resume(
    directory: Path | None,
    memory: StateInMemory | None,
    actor: MegatronEngine,
    source: Source,
    say: Callable[[str], None],
) -> Progress:
    """Restore a state, if there is one to resume from; returns where the run starts. Collective.

    Args:
        directory: a checkpoint.
        memory: copies in memory, which come first if they have one.
    """
    if memory is not None and memory.step is not None:
        return _resumed(memory.restore(actor), source, "the copy in memory")
    if directory is None:
        return Progress()
    saved = checkpoint.load(directory, actor)
    if saved.get("weights_only"):
        say(f"starting from the weights of {directory}, which has no optimizer state")
        return Progress()
    resumed = _resumed(saved, source, f"checkpoint {directory}")
    say(f"resuming after step {saved['step']} from {directory}")
    return resumed


def _resumed(saved: Mapping[str, Any], source: Source, name: str) -> Progress:
    with together("resuming the data"):
        try:
            source.load_state_dict(saved["data"])
        except (LookupError, TypeError, AttributeError, ArithmeticError, AssertionError) as error:
            raise InputError(
                f"{name} says nothing usable of its place in the data ({shown(error)}); use an older "
                "one, or checkpoint.resume=never"
            ) from error
    return Progress(saved["step"], saved["validations"], saved.get("metrics", {}))  # older checkpoints have none


def total_steps(config: RunConfig, steps_per_epoch: int) -> int:
    """Training steps of the whole run: as configured, or the epochs times the full batches of one epoch."""
    trainer = config.trainer
    if trainer.total_steps is not None:
        return trainer.total_steps
    assert trainer.total_epochs is not None, "validation asks for one of the two"
    return trainer.total_epochs * steps_per_epoch


class Saving(Protocol):
    """What a job saves with."""

    @property
    def checkpoints(self) -> CheckpointWriter: ...

    @property
    def memory(self) -> StateInMemory | None: ...

    @property
    def timers(self) -> Timers: ...


def save_if_due(
    job: Saving, frequency: int | None, actor: MegatronEngine, source: Source, progress: Progress, total_steps: int
) -> None:
    """Write a checkpoint of ``progress`` if one is due, else complete one under way; keep a copy too. Collective."""

    metrics = {name: float(value) for name, value in progress.metrics.items()}
    rest = {"validations": progress.validations, "metrics": metrics}

    def content() -> dict[str, Any]:
        data = source.state_dict()  # only the first rank's is written
        return {"data": data if is_first() else {}, **rest}

    if job.memory is not None:
        with job.timers("save"):
            job.memory.keep_if_due(progress.step, actor, content)
    if not is_due(progress.step, frequency, total_steps):
        job.checkpoints.poll()
        return
    with job.timers("save"), HEART.measured(partial(bytes_written, job.checkpoints.root)):
        job.checkpoints.save(progress.step, actor, {"data": source.state_dict(), **rest})
        if progress.step == total_steps:
            job.checkpoints.finish()


def bytes_written(root: Path) -> int:
    """Bytes of the checkpoints that have no name yet, as the first rank of a node sees them; on other ranks 0.

    For a watch, which wants to see that the number changes: one rank per node is enough.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return 0
    total = 0
    with suppress(OSError):
        for file in root.glob(".step_*/**/*"):
            total += file.stat().st_size
    return total


def warn_if_skipped(say: Callable[[str], None], actor: MegatronEngine, stats: OptimizerStats) -> None:
    """Tell of an optimizer step that changed nothing."""
    if stats.skipped:
        skipped = actor.stepper.skipped
        say(
            f"warning: optimizer step skipped, the gradient of {stats.bad_parameter} is not finite "
            f"({skipped.in_a_row} in a row, {skipped.total} in all)"
        )
