"""Where a run stands: resuming, saving, and telling the user where things are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from mega_rl.megatron import checkpoint
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.megatron.optimizer import OptimizerStats
from mega_rl.parallel.collectives import together
from mega_rl.stages.parts.session import Session

Validations = dict[str, dict[str, float]]  # "first" and "last" -> validation metrics


class Source(Protocol):
    """What a stage learns from, and what a checkpoint must know to go on with the next of it."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Progress:
    """What a run starts from."""

    step: int = 0  # finished steps
    validations: Validations = field(default_factory=dict)


def is_due(step: int, frequency: int, total_steps: int) -> bool:
    """Whether something done every ``frequency`` steps, and always after the last one, is due after ``step`` steps."""
    return step == total_steps or (frequency > 0 and step % frequency == 0)


def resume(session: Session, actor: MegatronEngine, source: Source) -> Progress:
    """Restore the session's checkpoint, where it has one. Collective."""
    if session.checkpoint is None:
        return Progress()
    saved = checkpoint.load(session.checkpoint, actor)
    if saved.get("weights_only"):
        session.say(f"starting from the weights of {session.checkpoint}, which has no optimizer state")
        return Progress()
    with together("resuming the data"):
        source.load_state_dict(saved["data"])
    session.say(f"resuming after step {saved['step']} from {session.checkpoint}")
    return Progress(step=saved["step"], validations=saved["validations"])


def save_if_due(
    session: Session,
    actor: MegatronEngine,
    source: Source,
    step: int,
    total_steps: int,
    validations: Validations,
) -> None:
    """Write the checkpoint after ``step`` steps where it is time for one, and complete one under way. Collective."""
    if not is_due(step, session.config.checkpoint.save_freq, total_steps):
        session.checkpoints.poll()
        return
    with session.timers("save"):
        content = {"data": source.state_dict(), "validations": validations}
        session.checkpoints.save(step, actor, content)
        if step == total_steps:
            session.checkpoints.finish()


def warn_if_skipped(session: Session, actor: MegatronEngine, stats: OptimizerStats) -> None:
    """Tell of an optimizer step that changed nothing."""
    if stats.skipped:
        skipped = actor.step.skipped
        session.say(
            f"warning: optimizer step skipped, the gradient of {stats.bad_parameter} is not finite "
            f"({skipped.in_a_row} in a row, {skipped.total} in all)"
        )


def say_where(session: Session) -> None:
    """Tell where checkpoint, weights and dashboard are."""
    newest = checkpoint.all_checkpoints(session.checkpoints_dir)
    if newest:
        session.say(f"checkpoint: {newest[0]}")
    if session.config.checkpoint.export_hf:
        session.say(f"Hugging Face weights: {session.export_dir}")
    if session.config.logging.tensorboard:
        session.say(f"dashboard: tensorboard --logdir {session.output_dir}")
