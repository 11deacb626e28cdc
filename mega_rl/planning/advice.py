"""What to change if a plan does not fit, in the order in which it costs least, or if it leaves memory over.

Every saving is the difference of two plans. Each change is tried on top of those before it, and kept if the worst
rank needs less memory with it, or, where memory is spent, if the plan still fits with some to spare.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from mega_rl.config import samples
from mega_rl.config.schema.sections import OffloadPart
from mega_rl.config.schema.stage import sequences_per_row
from mega_rl.errors import InputError
from mega_rl.models.shape import ModelShape
from mega_rl.planning.automatic import HEADROOM
from mega_rl.planning.engine import engine_share
from mega_rl.planning.memory_plan import Machine, MemoryPlan, make_plan
from mega_rl.planning.steps import budget_of

SHARE_STEP = 0.05  # by which gpu_memory_utilization is lowered at a time
MIN_SHARE = 0.1
OFFLOAD: tuple[OffloadPart, ...] = ("gradients", "optimizer", "weights")
MIN_SEQUENCES = 2  # sequences of the greatest length that an engine should hold
MIN_RESPONSE = 256  # tokens
MIN_CHUNK = 256  # tokens
MAX_DOUBLINGS = 6  # of the number of devices, or of the tokens of a micro-batch
MAX_SPENDING = 2048  # layers x devices up to which memory is spent: it takes a dozen plans, each seconds beyond that


@dataclass(frozen=True)
class Candidate:
    """A change to try."""

    keys: dict[str, Any]  # configuration keys and their new values
    num_devices: int
    cost: str
    is_last_resort: bool = False  # left out again wherever the other changes are enough


@dataclass(frozen=True)
class Change:
    """One step of the advice."""

    keys: tuple[str, ...]  # overrides as ``tools/train.py`` takes them; or --devices
    cost: str
    saved_bytes: int  # bytes saved in the fullest phase of the worst rank, after the changes before it
    plan: MemoryPlan  # the plan with this change


Proposal = Callable[[MemoryPlan], Iterator[Candidate]]


def advise(plan: MemoryPlan, shape: ModelShape) -> list[Change]:
    """Changes, each on top of the ones before it, until the plan fits or nothing is left to try."""
    chosen: list[Candidate] = []
    reached = plan
    for candidate in (one for propose in PROPOSALS for one in propose(reached)):  # to what is reached by then
        found = _try(reached, shape, candidate)
        if found is not None and _is_better(found, reached):
            is_repeated = chosen and chosen[-1].keys.keys() == candidate.keys.keys() != set()
            chosen = [*(chosen[:-1] if is_repeated else chosen), candidate]
            reached = found
        if reached.fits:
            break
    if reached.fits:
        chosen = _needed(plan, shape, chosen)
    return _changes(plan, shape, chosen)


def spend(plan: MemoryPlan, shape: ModelShape) -> list[Change]:
    """Changes that make a run faster with memory that its plan leaves over, each on top of the ones before it.

    None for a large run (``MAX_SPENDING``), whose plans take long.
    """
    if shape.num_layers * plan.machine.num_devices > MAX_SPENDING:
        return []
    chosen: list[Candidate] = []
    reached = plan
    for propose in SPENDING:
        for candidate in propose(reached):
            found = _try(reached, shape, candidate)
            if found is not None and found.fits and -found.excess_bytes >= HEADROOM * found.machine.device_bytes:
                chosen.append(candidate)
                reached = found
                break
    return _changes(plan, shape, chosen)


def _needed(plan: MemoryPlan, shape: ModelShape, chosen: list[Candidate]) -> list[Candidate]:
    """Without the changes that turn out not to be needed beside the others, last resorts first."""
    for candidate in sorted(chosen, key=lambda one: not one.is_last_resort):
        others = [one for one in chosen if one is not candidate]
        changes = _changes(plan, shape, others)
        if others and len(changes) == len(others) and changes[-1].plan.fits:
            chosen = others
    return chosen


def _changes(plan: MemoryPlan, shape: ModelShape, chosen: list[Candidate]) -> list[Change]:
    """What each of them saves on top of those before it; without any that does not go with the others."""
    changes = []
    for candidate in chosen:
        found = _try(plan, shape, candidate)
        if found is None:
            continue
        is_moved = candidate.num_devices != plan.machine.num_devices
        shown = [f"--devices {candidate.num_devices}"] if is_moved else []
        shown += [f"{key}={_text(value)}" for key, value in candidate.keys.items()]
        changes.append(Change(tuple(shown), candidate.cost, plan.excess_bytes - found.excess_bytes, found))
        plan = found
    return changes


def _is_better(found: MemoryPlan, plan: MemoryPlan) -> bool:
    """Whether less is lacking, without taking the engine's last sequence, or whether the engine gets its first."""
    has_room = found.engine is None or found.engine.fits
    lacked_room = plan.engine is not None and not plan.engine.fits
    return (found.excess_bytes < plan.excess_bytes and (has_room or lacked_room)) or (lacked_room and has_room)


def _text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(value)}]" if isinstance(value, list) else str(value)


def _try(plan: MemoryPlan, shape: ModelShape, candidate: Candidate) -> MemoryPlan | None:
    """The plan with other keys; None if they do not go with the rest of the configuration."""
    config = copy.deepcopy(plan.config)
    for key, value in candidate.keys.items():
        *sections, name = key.split(".")
        target: Any = config
        for section in sections:
            target = target[section] if isinstance(target, dict) else getattr(target, section)
        if isinstance(target, dict):
            target[name] = value
        else:
            setattr(target, name, value)
    machine: Machine = replace(plan.machine, num_devices=candidate.num_devices)
    try:
        return make_plan(config, shape, machine, with_sync=False)
    except InputError:
        return None


# --- proposals, in their order ---------------------------------------------------------------------------------------


def _engine_share(plan: MemoryPlan) -> Iterator[Candidate]:
    """The largest share that leaves the trainer enough, or the least that holds a few sequences."""
    machine, config, engine = plan.machine, plan.config, plan.engine
    if engine is None or not engine.has_share or config.rollout.placement != "colocated":
        return
    share = engine_share(config)
    beside = max(
        phase.num_bytes - engine.share
        for rank in plan.ranks
        for phase in rank.phases
        if any(item.name == "engine" for item in phase.items)
    )
    room = (machine.device_bytes - machine.reserve_bytes - beside) / machine.device_bytes
    longest = config.data.max_prompt_length + config.data.max_response_length
    least = engine.weights + engine.working + MIN_SEQUENCES * longest * engine.bytes_per_token
    smallest = math.ceil(least / machine.device_bytes / SHARE_STEP) * SHARE_STEP
    largest = math.floor(room / SHARE_STEP) * SHARE_STEP
    for value in (largest, smallest) if engine.fits else (smallest,):
        if MIN_SHARE <= value < 1 and not math.isclose(value, share):
            keys = {"rollout.vllm.gpu_memory_utilization": round(value, 2)}
            cost = "fewer sequences at a time" if value < share else "less memory for the trainer"
            yield Candidate(keys, machine.num_devices, cost)


def _microbatch(plan: MemoryPlan) -> Iterator[Candidate]:
    longest = plan.config.data.max_prompt_length + plan.config.data.max_response_length
    together = sequences_per_row(plan.config) * longest
    budget = budget_of(plan.config)
    while budget > longest:
        budget = max(together if budget > together else longest, budget // 2)
        keys = {"trainer.max_tokens_per_microbatch": budget}
        cost = "smaller matrix products, more of them"
        apart = "; pairs are split, which takes a forward pass more" if budget < together else ""
        yield Candidate(keys, plan.machine.num_devices, cost + apart)


def _length(plan: MemoryPlan) -> Iterator[Candidate]:
    data, response = plan.config.data, plan.config.data.max_response_length // 2
    if response >= MIN_RESPONSE:
        longest = sequences_per_row(plan.config) * (data.max_prompt_length + response)
        budget = min(budget_of(plan.config), longest)
        keys = {"data.max_response_length": response, "trainer.max_tokens_per_microbatch": budget}
        cost = "responses are cut: changes what is learnt"
        yield Candidate(keys, plan.machine.num_devices, cost, is_last_resort=True)


def _sequence_parallel(plan: MemoryPlan) -> Iterator[Candidate]:
    parallel = plan.config.parallel
    if parallel.tensor > 1 and not parallel.sequence:
        yield Candidate({"parallel.sequence": True}, plan.machine.num_devices, "nothing: as many bytes are sent")


def _recompute(plan: MemoryPlan) -> Iterator[Candidate]:
    memory, devices = plan.config.memory, plan.machine.num_devices
    if memory.recompute == "none":
        yield Candidate({"memory.recompute": "selective"}, devices, "the MLPs' forward passes a second time")
    if memory.recompute != "full" or memory.recompute_num_layers is not None:
        keys: dict[str, Any] = {"memory.recompute": "full"}
        keys |= {"memory.recompute_modules": None} if memory.recompute_modules is not None else {}
        keys |= {"memory.recompute_num_layers": None} if memory.recompute_num_layers is not None else {}
        yield Candidate(keys, devices, "every forward pass a second time")


def _offload(plan: MemoryPlan) -> Iterator[Candidate]:
    memory = plan.config.memory
    parts = list(memory.offload)
    for part in OFFLOAD if samples(plan.config) else ("optimizer",):
        is_there = part in parts or (part == "optimizer" and memory.optimizer_on_host)
        if not is_there and plan.machine.platform != "cpu":
            parts = [*parts, part]
            keys = {"memory.offload": parts}
            yield Candidate(keys, plan.machine.num_devices, "host memory, and copies at every step")


def _optimizer_on_host(plan: MemoryPlan) -> Iterator[Candidate]:
    memory = plan.config.memory
    if not memory.optimizer_on_host and plan.machine.platform != "cpu":
        keys: dict[str, Any] = {"memory.optimizer_on_host": True}
        if "optimizer" in memory.offload:
            keys["memory.offload"] = [part for part in memory.offload if part != "optimizer"]
        yield Candidate(
            keys, plan.machine.num_devices, "host memory, and the state's way to the device at every update"
        )


def _loss_tiles(plan: MemoryPlan) -> Iterator[Candidate]:
    chunk = plan.config.trainer.logprob_chunk_tokens
    if chunk > MIN_CHUNK:
        keys = {"trainer.logprob_chunk_tokens": max(MIN_CHUNK, chunk // 4)}
        yield Candidate(keys, plan.machine.num_devices, "smaller tiles of the loss")


def _layout(plan: MemoryPlan) -> Iterator[Candidate]:
    """Shards over more ranks of the same devices."""
    parallel, devices = plan.config.parallel, plan.machine.num_devices
    more = {"parallel.tensor": parallel.tensor * 2, "parallel.sequence": True}
    yield Candidate(more, devices, "more traffic between neighbours, half the data parallelism")
    yield Candidate({"parallel.pipeline": parallel.pipeline * 2}, devices, "stages idle at both ends of a step")
    experts: dict[str, Any] = {"parallel.expert": parallel.expert * 2}
    if parallel.expert_tensor is None and parallel.tensor > 1:
        experts["parallel.expert_tensor"] = 1
    yield Candidate(experts, devices, "more traffic between experts")
    if plan.engine is not None and plan.config.rollout.placement == "colocated":
        size = plan.config.rollout.tensor_parallel_size * 2
        yield Candidate({"rollout.tensor_parallel_size": size}, devices, "half as many engines")
    if parallel.context == 1:
        yield Candidate({"parallel.context": 2}, devices, "keys and values gathered in every layer")


def _devices(plan: MemoryPlan) -> Iterator[Candidate]:
    devices, stages = plan.machine.num_devices, plan.config.parallel.pipeline
    for _ in range(MAX_DOUBLINGS):
        devices *= 2
        yield Candidate({}, devices, "more devices")
        yield Candidate({"parallel.pipeline": stages * 2}, devices, "more devices")


PROPOSALS: tuple[Proposal, ...] = (
    _engine_share,
    _microbatch,
    _length,
    _sequence_parallel,
    _recompute,
    _offload,
    _loss_tiles,
    _optimizer_on_host,
    _engine_share,
    _layout,
    _layout,
    _devices,
    _engine_share,
)


# --- what memory that is left over can buy: the proposals of each function best first -------------------------------


def _less_recompute(plan: MemoryPlan) -> Iterator[Candidate]:
    memory, devices = plan.config.memory, plan.machine.num_devices
    modules: dict[str, Any] = {"memory.recompute_modules": None} if memory.recompute_modules is not None else {}
    layers: dict[str, Any] = {"memory.recompute_num_layers": None} if memory.recompute_num_layers is not None else {}
    if memory.recompute != "none":
        keys = {"memory.recompute": "none"} | modules | layers
        yield Candidate(keys, devices, "no forward pass a second time")
    if memory.recompute == "full":
        yield Candidate({"memory.recompute": "selective"} | layers, devices, "only the MLPs' passes a second time")


def _less_offload(plan: MemoryPlan) -> Iterator[Candidate]:
    parts = plan.config.memory.offload
    if plan.config.memory.optimizer_on_host:
        keys = {"memory.optimizer_on_host": False}
        yield Candidate(keys, plan.machine.num_devices, "the optimizer's state stays on the device")
    for kept in range(len(parts)):
        yield Candidate({"memory.offload": parts[:kept]}, plan.machine.num_devices, "fewer copies at every step")


def _more_cache(plan: MemoryPlan) -> Iterator[Candidate]:
    """A larger share for the engine while it cannot hold all that it is to sample."""
    engine = plan.engine
    if engine is None or not engine.has_share or engine.num_sequences >= engine.sequences_per_engine:
        return
    share = engine_share(plan.config)
    for step in range(round((1 - share) / SHARE_STEP) - 1, 0, -1):
        keys = {"rollout.vllm.gpu_memory_utilization": round(share + step * SHARE_STEP, 2)}
        yield Candidate(keys, plan.machine.num_devices, "more sequences at a time")


def _larger_microbatch(plan: MemoryPlan) -> Iterator[Candidate]:
    """Up to all tokens of a data-parallel rank's share of a step."""
    data, config = plan.config.data, plan.config
    longest = data.max_prompt_length + data.max_response_length
    sequences = data.train_batch_size * (config.rollout.n if samples(config) else sequences_per_row(config))
    most = longest * math.ceil(sequences / (plan.layout.data * config.algorithm.minibatches_per_step))
    budget = budget_of(config)
    for doubling in range(MAX_DOUBLINGS, 0, -1):
        if budget << doubling <= most:
            keys = {"trainer.max_tokens_per_microbatch": budget << doubling}
            yield Candidate(keys, plan.machine.num_devices, "larger matrix products, fewer of them")


SPENDING: tuple[Proposal, ...] = (_less_recompute, _more_cache, _less_offload, _larger_microbatch)
