"""What a configuration leaves to the plan of its memory: recomputation, tokens of a micro-batch, overlap."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Literal

from mega_rl.config.schema.sections import TOKENS_PER_MICROBATCH, RunConfig
from mega_rl.config.schema.stage import reads_weights_first, samples, sequences_per_row
from mega_rl.models.shape import ModelShape
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.planning.memory_plan import Machine, make_plan

Way = Literal["none", "selective", "full"]
WAYS: tuple[Way, ...] = ("none", "selective", "full")  # of recomputation, from the fastest to the smallest
HEADROOM = 0.1  # of a device's memory that is left over: as far as peaks of activations were from the plan
RESERVE_BYTES = 4 << 30  # of a device, for what no plan counts: driver, communication buffers, fragmentation
GIB = 1 << 30


def automatic(config: RunConfig, shape: ModelShape, machine: Machine) -> tuple[RunConfig, list[str]]:
    """The configuration with a value in the place of each that is left to the plan, and a sentence on each.

    The first of these that leaves ``HEADROOM`` free is taken: no recomputation, with micro-batches as long as by
    default and then half as long; the same with more of it; at last, with the most, ever shorter ones down to the
    longest row. If none does it is the last one. Recomputing everything costs a forward pass, a third of the time;
    micro-batches of half the length cost one more pass over the gradients and less full kernels.
    """
    found, lines = copy.deepcopy(config), []
    if found.parallel.overlap_grad_reduce is None:
        found.parallel.overlap_grad_reduce = _overlaps(found, machine)
        if found.parallel.overlap_grad_reduce:
            lines.append("parallel.overlap_grad_reduce: gradients are summed while the backward pass runs")
    if found.parallel.overlap_param_gather is None:
        found.parallel.overlap_param_gather = _gathers_late(found, machine)
        if found.parallel.overlap_param_gather:
            lines.append("parallel.overlap_param_gather: new weights are collected while the next forward pass runs")
    asks_way, asks_budget = found.memory.recompute == "auto", found.trainer.max_tokens_per_microbatch is None
    if asks_way or asks_budget:
        room = _choose(found, shape, machine)
        way, budget = found.memory.recompute, found.trainer.max_tokens_per_microbatch
        lines += [f"memory.recompute auto: {way}; {room}"] if asks_way else []
        lines += [f"trainer.max_tokens_per_microbatch null: {budget}; {room}"] if asks_budget else []
    return found, lines


def _choose(config: RunConfig, shape: ModelShape, machine: Machine) -> str:
    """Set both keys of ``config``; returns why."""
    ways = _ways(config, shape) if config.memory.recompute == "auto" else (config.memory.recompute,)
    budgets = list(_budgets(config))
    long = [budget for budget in budgets if budget >= TOKENS_PER_MICROBATCH // 2] or budgets[:1]
    tries = [(way, budget) for way in ways for budget in long] + [(ways[-1], budget) for budget in budgets[len(long) :]]
    if machine.platform == "cpu":  # its memory is the host's, which is not planned for
        config.memory.recompute, config.trainer.max_tokens_per_microbatch = tries[0]
        return "as always on a CPU"
    taken = ""
    for way, budget in tries:
        config.memory.recompute, config.trainer.max_tokens_per_microbatch = way, budget
        plan = make_plan(config, shape, machine, with_sync=False)
        num_bytes = plan.worst.fullest.num_bytes
        taken = f"by the plan {num_bytes / GIB:.1f} of {machine.device_bytes / GIB:.1f} GiB of a device are taken"
        if plan.fits and -plan.excess_bytes >= HEADROOM * machine.device_bytes:
            return taken
    return f"{taken}, and nothing smaller was left to try: see tools/plan.py"


def _ways(config: RunConfig, shape: ModelShape) -> tuple[Way, ...]:
    """Selective recomputation begins in the middle of a layer, where dropout does not know its tokens.

    What a vision tower takes is an estimate only, so that a model with one always recomputes.
    """
    if shape.tower is not None:
        return ("full",)
    has_dropout = config.tuning.method == "lora" and config.tuning.adapter.dropout > 0
    return tuple(way for way in WAYS if not (has_dropout and way == "selective"))


def _overlaps(config: RunConfig, machine: Machine) -> bool:
    """Whether gradients are summed while the backward pass runs; gathering weights in the next pass needs it."""
    return bool(config.parallel.overlap_param_gather) or _has_overlap(config, machine)


def _gathers_late(config: RunConfig, machine: Machine) -> bool:
    """Whether new weights are collected in the next forward pass, if nothing else reads them before.

    The weight sync does so after every step of stage rl, and would only wait for them; in stage kto the estimate of
    the divergence does, before every step.
    """
    steps_follow = config.algorithm.minibatches_per_step > 1 if samples(config) else not reads_weights_first(config)
    return bool(config.parallel.overlap_grad_reduce) and steps_follow and _has_overlap(config, machine)


def _has_overlap(config: RunConfig, machine: Machine) -> bool:
    """On accelerators, with more than one replica.

    Where weights are frozen, or a tower is trained that not every micro-batch passes, a bucket may wait for gradients
    in vain.
    """
    layout = ParallelLayout.of(config.parallel, machine.num_devices)
    vision = config.model.vision
    has_all = config.tuning.method == "full" and vision.freeze and vision.freeze_merger
    return machine.platform != "cpu" and layout.data * layout.context > 1 and has_all


def _budgets(config: RunConfig) -> Iterator[int]:
    """Tokens of a micro-batch to try, longest first."""
    if (given := config.trainer.max_tokens_per_microbatch) is not None:
        yield given
        return
    longest = sequences_per_row(config) * (config.data.max_prompt_length + config.data.max_response_length)
    budget = max(TOKENS_PER_MICROBATCH, longest)
    while budget > longest:
        yield budget
        budget //= 2
    yield longest
