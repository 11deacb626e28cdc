"""What a stage says of how it learns from files: one optimizer step, and figures of held-out items, follow from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch

from mega_rl.megatron.engine import LossFunction, MegatronEngine, ValueLoss
from mega_rl.microbatch import Figures, Microbatch
from mega_rl.stages.run.batch_share import Totals, totals_of
from mega_rl.stages.run.job import Job
from mega_rl.stages.run.progress import warn_if_skipped

Item = TypeVar("Item")


@dataclass(frozen=True)
class PreparedBatch:
    """A global batch as a pass takes it."""

    microbatches: list[Microbatch]  # of this rank
    loss: LossFunction | ValueLoss
    figures: dict[str, float] = field(default_factory=dict)  # found in preparing it, for the metrics


class TrainingMethod(Protocol[Item]):
    """How items become a loss, and how the sums that the loss returns become metrics."""

    @property
    def section(self) -> str:
        """The metrics are named ``section/...`` and, of held-out items, ``section/val_...``."""

    def prepared(self, batch: list[Item]) -> PreparedBatch:
        """Collective."""

    def figures(self, batch: list[Item], sums: Mapping[str, float]) -> dict[str, float]:
        """The metrics of an optimizer step on a batch, besides the loss."""

    def val_figures(self, held_out: list[Item], sums: Mapping[str, float]) -> dict[str, float]:
        """The metrics of held-out items, besides the loss."""

    def num_tokens(self, item: Item) -> int:
        """Positions of an item that are computed, for the throughput."""


@dataclass(frozen=True)
class HeldOutData(Generic[Item]):
    """Items that are not learnt from, with the method that tells how well they are predicted."""

    method: TrainingMethod[Item]
    items: list[Item]


def update(
    job: Job, model: MegatronEngine, method: TrainingMethod[Item], batch: list[Item], is_read: bool
) -> dict[str, float]:
    """One optimizer step; returns its metrics. Collective."""
    prepared = method.prepared(batch)
    totals, metrics = learn(job, model, prepared, is_read)
    metrics |= method.figures(batch, totals.sums) | prepared.figures
    return {f"{method.section}/{name}": value for name, value in metrics.items()}


def validate(job: Job, model: MegatronEngine, held_out: HeldOutData[Item]) -> dict[str, float]:
    """Metrics of the held-out items. Collective."""
    method, items = held_out.method, held_out.items
    prepared = method.prepared(items)
    sums = measured(job, model, prepared).sums
    metrics = {"loss": sums["loss"]} | method.val_figures(items, sums) | prepared.figures
    return {f"{method.section}/val_{name}": value for name, value in metrics.items()}


def means(sums: Mapping[str, float], names: Collection[str], count: int) -> dict[str, float]:
    return {name: sums[name] / count for name in names}


def learn(job: Job, model: MegatronEngine, prepared: PreparedBatch, is_read: bool) -> tuple[Totals, dict[str, float]]:
    """One optimizer step: the figures over all ranks, and metrics by the last parts of their names. Collective.

    With optimizer in ``memory.offload`` its state is on the host while there are activations.

    Args:
        is_read: more than the next forward and backward pass reads the weights.
    """
    model.offload.to_host("optimizer")
    totals = totals_of(job.share, model.forward_backward(prepared.microbatches, prepared.loss))
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
def measured(job: Job, model: MegatronEngine, prepared: PreparedBatch) -> Totals:
    """What the loss says of the present weights, itself as one of the sums. Collective."""
    is_of_values = model.policy.shape.head == "value"
    pass_of = model.policy.token_values if is_of_values else model.token_stats
    outputs: list[Any] = pass_of(prepared.microbatches)
    found = [prepared.loss(output, m) for output, m in zip(outputs, prepared.microbatches, strict=True)]
    reports = [Figures({"loss": value, **figures.sums}, figures.maxima) for value, figures in found]
    # Every pipeline stage was given the statistics; they count once.
    return totals_of(job.share, reports if job.share.is_last_stage else [])
