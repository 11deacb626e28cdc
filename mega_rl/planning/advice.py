"""What to change where a plan does not fit, in the order in which it costs least.

Every saving is the difference of two plans. Each change is tried on top of those before it, and kept where the worst
rank needs less memory with it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from mega_rl.bridge.shape import ModelShape
from mega_rl.planning.engine import engine_share
from mega_rl.planning.plan import Machine, MemoryPlan, make_plan
from mega_rl.types import InputError

SHARE_STEP = 0.05  # of gpu_memory_utilization
MIN_SHARE = 0.1
OFFLOAD = ("gradients", "optimizer", "weights")
MAX_DOUBLINGS = 6  # of devices


@dataclass(frozen=True)
class Change:
    """One step of the advice."""

    keys: tuple[str, ...]  # overrides as ``tools/train.py`` takes them; or --devices
    cost: str
    saved_bytes: int  # in the fullest phase of the worst rank, after the changes before it
    plan: MemoryPlan  # with it


Candidate = tuple[dict[str, Any], int, str]  # keys to set, devices, what it costs
Proposal = Callable[[MemoryPlan], Iterator[Candidate]]


def advise(plan: MemoryPlan, shape: ModelShape) -> list[Change]:
    """Changes, each on top of the ones before it, until the plan fits or nothing is left to try."""
    changes: list[Change] = []
    for propose in PROPOSALS:
        if plan.fits:
            break
        for keys, devices, cost in propose(plan):
            found = _try(plan, shape, keys, devices)
            if found is None or not _is_better(found, plan):
                continue
            saved = plan.excess_bytes - found.excess_bytes
            shown = [f"--devices {devices}"] if devices != plan.machine.num_devices else []
            shown += [f"{key}={_text(value)}" for key, value in keys.items()]
            changes.append(Change(tuple(shown), cost, saved, found))
            plan = found
            if plan.fits:
                break
    return changes


def _is_better(found: MemoryPlan, plan: MemoryPlan) -> bool:
    has_room = found.engine is None or found.engine.fits
    lacked_room = plan.engine is not None and not plan.engine.fits
    return (found.excess_bytes < plan.excess_bytes and (has_room or lacked_room)) or (lacked_room and has_room)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(value)}]" if isinstance(value, list) else str(value)


def _try(plan: MemoryPlan, shape: ModelShape, keys: dict[str, Any], devices: int) -> MemoryPlan | None:
    """The plan with other keys; None where they do not go with the rest of the configuration."""
    config = copy.deepcopy(plan.config)
    for key, value in keys.items():
        *sections, name = key.split(".")
        target: Any = config
        for section in sections:
            target = target[section] if isinstance(target, dict) else getattr(target, section)
        if isinstance(target, dict):
            target[name] = value
        else:
            setattr(target, name, value)
    machine: Machine = replace(plan.machine, num_devices=devices)
    try:
        return make_plan(config, shape, machine, with_sync=False)
    except InputError:
        return None


# --- proposals, cheapest first ---------------------------------------------------------------------------------------


def _engine_share(plan: MemoryPlan) -> Iterator[Candidate]:
    """The largest share that leaves the trainer enough, or the least that holds one sequence."""
    machine, config = plan.machine, plan.config
    if plan.engine is None or config.rollout.placement != "colocated" or machine.platform == "cpu":
        return
    if "kv_cache_memory_bytes" in config.rollout.vllm:
        return
    share = engine_share(config)
    beside = max(
        phase.num_bytes - plan.engine.share
        for rank in plan.ranks
        for phase in rank.phases
        if any(item.name == "engine" for item in phase.items)
    )
    room = (machine.device_bytes - machine.reserve_bytes - beside) / machine.device_bytes
    least = (plan.engine.weights + plan.engine.working) / machine.device_bytes
    wanted = math.floor(room / SHARE_STEP) * SHARE_STEP
    if not plan.engine.fits:  # too little for a single sequence
        longest = config.data.max_prompt_length + config.data.max_response_length
        needed = least + 2 * longest * plan.engine.bytes_per_token / machine.device_bytes
        wanted = math.ceil(needed / SHARE_STEP) * SHARE_STEP
    for value in (wanted, math.ceil(least / SHARE_STEP) * SHARE_STEP):
        if MIN_SHARE <= value < 1 and not math.isclose(value, share):
            yield (
                {"rollout.vllm.gpu_memory_utilization": round(value, 2)},
                machine.num_devices,
                "fewer sequences at a time" if value < share else "less memory for the trainer",
            )


def _microbatch(plan: MemoryPlan) -> Iterator[Candidate]:
    longest = plan.config.data.max_prompt_length + plan.config.data.max_response_length
    budget = plan.config.trainer.max_tokens_per_microbatch
    while budget > longest:
        budget = max(longest, budget // 2)
        keys = {"trainer.max_tokens_per_microbatch": budget}
        yield keys, plan.machine.num_devices, "smaller matrix products, more of them"


def _length(plan: MemoryPlan) -> Iterator[Candidate]:
    data = plan.config.data
    response = data.max_response_length // 2
    while response >= 256:
        longest = data.max_prompt_length + response
        budget = min(plan.config.trainer.max_tokens_per_microbatch, longest)
        keys = {"data.max_response_length": response, "trainer.max_tokens_per_microbatch": budget}
        yield keys, plan.machine.num_devices, "shorter responses: changes what is learnt"
        return


def _recompute(plan: MemoryPlan) -> Iterator[Candidate]:
    memory, devices = plan.config.memory, plan.machine.num_devices
    if memory.recompute == "none":
        yield {"memory.recompute": "selective"}, devices, "the MLPs' forward passes once more"
    if memory.recompute != "full" or memory.recompute_num_layers is not None:
        keys = {"memory.recompute": "full", "memory.recompute_modules": None, "memory.recompute_num_layers": None}
        yield keys, devices, "every forward pass once more, about a third of the training time"


def _offload(plan: MemoryPlan) -> Iterator[Candidate]:
    memory = plan.config.memory
    parts = list(memory.offload)
    for part in OFFLOAD:
        if part not in parts:
            parts = [*parts, part]
            yield {"memory.offload": parts}, plan.machine.num_devices, "copies over the host's bus at every step"


def _loss_chunk(plan: MemoryPlan) -> Iterator[Candidate]:
    chunk = plan.config.trainer.logprob_chunk_tokens
    if chunk > 256:
        keys = {"trainer.logprob_chunk_tokens": max(256, chunk // 4)}
        yield keys, plan.machine.num_devices, "smaller tiles of the loss"


def _sequence_parallel(plan: MemoryPlan) -> Iterator[Candidate]:
    parallel = plan.config.parallel
    if parallel.tensor > 1 and not parallel.sequence:
        yield {"parallel.sequence": True}, plan.machine.num_devices, "nothing: the same bytes are sent"


def _layout(plan: MemoryPlan) -> Iterator[Candidate]:
    """Shards over more ranks of the same devices."""
    parallel, devices = plan.config.parallel, plan.machine.num_devices
    more = {"parallel.tensor": parallel.tensor * 2, "parallel.sequence": True}
    yield more, devices, "more traffic between neighbours, half the data parallelism"
    yield {"parallel.pipeline": parallel.pipeline * 2}, devices, "idle stages at both ends of a step"
    experts: dict[str, Any] = {"parallel.expert": parallel.expert * 2}
    if parallel.expert_tensor is None and parallel.tensor > 1:
        experts["parallel.expert_tensor"] = 1
    yield experts, devices, "more traffic between experts"
    if plan.config.rollout.placement == "colocated":
        size = plan.config.rollout.tensor_parallel_size * 2
        yield {"rollout.tensor_parallel_size": size}, devices, "half as many engines"
    if parallel.context == 1:
        yield {"parallel.context": 2}, devices, "keys and values gathered in every layer"


def _devices(plan: MemoryPlan) -> Iterator[Candidate]:
    devices = plan.machine.num_devices
    parallel = plan.config.parallel
    for _ in range(MAX_DOUBLINGS):
        devices *= 2
        yield {}, devices, "more devices"
        yield {"parallel.pipeline": parallel.pipeline * 2}, devices, "more devices"


PROPOSALS: tuple[Proposal, ...] = (
    _engine_share,
    _sequence_parallel,
    _microbatch,
    _recompute,
    _offload,
    _loss_chunk,
    _engine_share,
    _layout,
    _layout,
    _length,
    _devices,
    _engine_share,
)
