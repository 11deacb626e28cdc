"""The memory of every rank in every phase of a step, from nothing but the configuration and config.json."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from mega_rl.bridge.mapping.megatron import rank_series
from mega_rl.bridge.mapping.tensors import LM_HEAD, embedding_name, full_series, hf_tensors
from mega_rl.bridge.mapping.tuning import tuning_plan
from mega_rl.bridge.mapping.vllm import vllm_series
from mega_rl.bridge.reshard.plan import compile_plan
from mega_rl.bridge.series import Series
from mega_rl.config.checks.validate import validate
from mega_rl.config.schema.sections import RunConfig
from mega_rl.config.schema.stage import WORKERS_PER_RANK, has_whole_experts, needs_reference, samples
from mega_rl.models.mixture import Mixture
from mega_rl.models.shape import ModelShape
from mega_rl.parallel.layout import EngineLayout, ParallelLayout
from mega_rl.planning.activations import ActivationModel, Activations
from mega_rl.planning.companions import Companion, companions
from mega_rl.planning.engine import EngineMemory, engine_memory
from mega_rl.planning.state import TrainerState, UpdateMemory, stage_parameters, trainer_state
from mega_rl.planning.steps import fullest_microbatches
from mega_rl.planning.tower import TowerMemory, tower_memory
from mega_rl.platform.operators.memory import OPERATOR_MEMORY
from mega_rl.types import DTYPES

# How sure a figure is.
EXACT, MODEL, ESTIMATE = "exact", "model", "estimate"
EXPERT_BYTES_PACKED = 2  # of an expert's number in a micro-batch


@dataclass(frozen=True)
class Machine:
    """What a run is planned for."""

    num_devices: int
    device_bytes: int  # memory of one device
    reserve_bytes: int  # part of ``device_bytes`` for what is not counted: driver, communication buffers, fragmentation
    platform: str  # its name


@dataclass(frozen=True)
class Item:
    name: str
    num_bytes: int
    certainty: str  # EXACT | MODEL | ESTIMATE


@dataclass(frozen=True)
class Phase:
    """What lies on one device at the fullest moment of a phase."""

    name: str
    items: tuple[Item, ...]

    @property
    def num_bytes(self) -> int:
        return sum(item.num_bytes for item in self.items)


@dataclass(frozen=True)
class SyncVolume:
    """Bytes of one weight sync."""

    local: int  # copied within ranks, all ranks together
    sent: int
    minimum: int  # bytes that no plan can go below
    largest_received: int  # bytes that the busiest rank receives
    buffers: int  # memory that a rank takes for it


@dataclass(frozen=True)
class _Held:
    """What one rank has, on its device or on its host."""

    state: TrainerState
    activations: Activations
    tower: TowerMemory
    engine: EngineMemory | None
    others: list[Companion]


@dataclass(frozen=True)
class RankMemory:
    rank: int
    stage: int
    state: TrainerState
    activations: Activations
    phases: tuple[Phase, ...]
    host: tuple[Item, ...]

    @property
    def fullest(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.num_bytes)


@dataclass(frozen=True)
class MemoryPlan:
    config: RunConfig
    machine: Machine
    layout: ParallelLayout
    engine: EngineMemory | None  # None: no engine on any device
    sync: SyncVolume | None
    ranks: tuple[RankMemory, ...]

    @cached_property
    def worst(self) -> RankMemory:
        return max(self.ranks, key=lambda rank: rank.fullest.num_bytes)

    @property
    def excess_bytes(self) -> int:
        """What the worst rank lacks in its fullest phase; negative: what it has to spare."""
        return self.worst.fullest.num_bytes + self.machine.reserve_bytes - self.machine.device_bytes

    @property
    def fits(self) -> bool:
        return self.excess_bytes <= 0 and (self.engine is None or self.engine.fits)

    def worst_of(self, phase: str) -> tuple[RankMemory, Phase]:
        """The rank that is fullest in one phase, and what lies there."""
        found = [(rank, one) for rank in self.ranks for one in rank.phases if one.name == phase]
        return max(found, key=lambda pair: pair[1].num_bytes)


def smallest_world(config: RunConfig) -> int:
    """The fewest devices that a configuration can be started on."""
    parallel, rollout = config.parallel, config.rollout
    ranks = parallel.tensor * parallel.context * parallel.pipeline
    experts = parallel.expert * (parallel.expert_tensor or parallel.tensor)
    engine = rollout.tensor_parallel_size if samples(config) and rollout.placement == "colocated" else 1
    limit = ranks * experts * engine
    fitting = (n for n in range(ranks, limit + 1, ranks) if n // parallel.pipeline % experts == 0 and n % engine == 0)
    return next(fitting)


def make_plan(config: RunConfig, shape: ModelShape, machine: Machine, with_sync: bool = True) -> MemoryPlan:
    """Plan a run.

    Args:
        with_sync: also compile the plan of the weight sync, which for hundreds of ranks takes seconds.

    Raises:
        InputError: the configuration, or its model at this layout, could not be trained.
    """
    validate(config, machine.num_devices, has_files=False)
    layout = ParallelLayout.of(config.parallel, machine.num_devices)
    engine = sync = None
    if samples(config) and config.rollout.replay is None:
        is_here = config.rollout.placement == "colocated"
        size = config.rollout.tensor_parallel_size
        num_engines = EngineLayout(machine.num_devices, size).num_replicas if is_here else config.rollout.num_engines
        engine = engine_memory(config, shape, machine.platform, machine.device_bytes, num_engines)
        sync = _sync_volume(config, shape, layout, machine.platform) if with_sync else None
    return MemoryPlan(config, machine, layout, engine, sync, _ranks(config, shape, machine, layout, engine))


def _ranks(
    config: RunConfig, shape: ModelShape, machine: Machine, layout: ParallelLayout, engine: EngineMemory | None
) -> tuple[RankMemory, ...]:
    tuning = tuning_plan(config.tuning, shape, config.model.vision)
    is_under_adapters = bool(tuning.adapters.ranks) and not tuning.trained  # the frozen weights are the reference
    has_reference = samples(config) and config.algorithm.kl_coefficient != 0 and not is_under_adapters
    trains_head = (embedding_name(shape) if shape.tied else LM_HEAD) in tuning.trained
    tokens = fullest_microbatches(config, layout)
    model = ActivationModel(config, shape, layout, OPERATOR_MEMORY[machine.platform], tokens, trains_head)
    others = companions(config, shape, layout, OPERATOR_MEMORY[machine.platform], tokens)
    tower = tower_memory(config, shape, tuning, tokens)
    held = [stage_parameters(config, shape, layout, stage, tuning) for stage in range(layout.pipeline)]
    activations = [model.of_stage(stage) for stage in range(layout.pipeline)]
    ranks = []
    for rank in range(layout.world_size):
        stage = layout.coordinates(rank).pipeline
        state = trainer_state(config, layout, rank, held[stage], has_reference)
        seeing = tower if stage == 0 else TowerMemory()
        of_rank = _Held(state, activations[stage], seeing, engine, others(rank))
        phases = tuple(_phases(config, shape, machine.platform, of_rank))
        host = (
            *_host(config, machine.platform, of_rank),
            *_routing(config, shape.mixture, layout, rank),
            *([Item("features of pictures, at most", seeing.features, ESTIMATE)] if seeing.features else []),
        )
        ranks.append(RankMemory(rank, stage, state, activations[stage], phases, host))
    return tuple(ranks)


def _sleeps(config: RunConfig, platform: str) -> bool:
    """Whether a colocated engine gives its memory back while the trainer works."""
    return platform != "cpu" and bool(config.rollout.vllm.get("enable_sleep_mode", True))


def _reloads(config: RunConfig, shape: ModelShape, platform: str) -> bool:
    """Whether every worker gets whole tensors for the engine's own loader: so it is for experts on Ascend."""
    way = config.rollout.weight_update
    return way == "reload" or (way == "auto" and platform == "npu" and shape.mixture is not None)


def _sync_buffers(config: RunConfig, shape: ModelShape, platform: str) -> int:
    """A bucket; vLLM's loader also keeps whole tensors until those of a layer are together."""
    if not _reloads(config, shape, platform):
        return config.bridge.bucket_bytes
    of_layers: dict[str, int] = {}
    for name, size in hf_tensors(shape).items():
        layer = ".".join(name.split(".")[:3]) if ".layers." in name else name
        of_layers[layer] = of_layers.get(layer, 0) + prod(size)
    item = DTYPES[config.rollout.dtype or config.model.dtype].itemsize
    return config.bridge.bucket_bytes + max(of_layers.values()) * item


def _phases(config: RunConfig, shape: ModelShape, platform: str, held: _Held) -> Iterator[Phase]:
    """The phases in the order in which a step goes through them (``mega_rl/stages/rl.py``)."""
    state, engine, others = held.state, held.engine, held.others
    optimizer = 0 if config.memory.optimizer_on_host else state.optimizer
    away = config.memory.offload if platform != "cpu" else []  # on a CPU the device memory is the host's

    def stays(part: str, size: int) -> int:
        return 0 if part in away else size

    weights, reference = Item("weights", state.weights, EXACT), Item("reference", state.reference, EXACT)
    gradients = Item("gradients", state.gradients, EXACT)
    waiting = {one.name: Item(one.name, one.resident(away), EXACT) for one in others}
    resident = [Item("reference", stays("weights", state.reference), EXACT), *waiting.values()]
    idle = [
        Item("gradients", stays("gradients", state.gradients), EXACT),
        Item("optimizer", stays("optimizer", optimizer), EXACT),
    ]
    awake: list[Item] = []
    if engine is not None and config.rollout.placement == "colocated":
        share = Item("engine", engine.share, EXACT)
        asleep = [*idle, *resident]
        sleeps = _sleeps(config, platform)
        awake = [] if sleeps else [share]
        written = Item("engine", engine.share - engine.cache, EXACT) if sleeps else share  # its cache wakes up later
        buffers = Item("sync buffers", _sync_buffers(config, shape, platform), ESTIMATE)
        yield _phase("sync", [weights, *asleep, written, buffers])
        yield _phase("rollout", [Item("weights", stays("weights", state.weights), EXACT), *asleep, share])
    trainer = [weights, gradients, Item("optimizer", optimizer, EXACT)]
    # Without an engine the optimizer is away whenever there are activations.
    is_between = "optimizer" in away and not samples(config)
    learning = [weights, gradients] if is_between else trainer
    if samples(config) or needs_reference(config):
        forward = Item("activations", held.activations.forward_only, MODEL)
        seeing = Item("vision tower", held.tower.forward_only, ESTIMATE)
        yield _phase("log-probabilities", [*trainer, reference, *waiting.values(), forward, seeing, *awake])
    for one in others:  # what else there is waits meanwhile
        kept = one.activations.kept + one.activations.working if one.is_trained else one.activations.forward_only
        rest = [item for item in resident if item.name != one.name]
        policy = [weights, *idle] if one.is_trained else trainer
        working = [Item(one.name, one.num_bytes, EXACT), Item("activations", kept, MODEL)]
        yield _phase(one.name, [*policy, *rest, *working, *awake])
    own = held.activations
    passing = [Item("activations", own.kept, MODEL), Item("working memory", own.working, MODEL)]
    viewing = Item("vision tower", held.tower.training, ESTIMATE)
    yield _phase("training", [*learning, *resident, *passing, viewing, *awake])
    yield from _after_training([*trainer, *awake], resident, state, others, is_between)


def _after_training(
    trainer: list[Item], resident: list[Item], state: TrainerState, others: list[Companion], is_between: bool
) -> Iterator[Phase]:
    """The optimizer's step, if it has what training has not, and a checkpoint, if there is more than the policy in it.

    Args:
        is_between: the optimizer's state is on the device during its step alone.
    """
    if is_between or state.update != UpdateMemory():
        passing = [
            Item("optimizer windows", state.update.windows, MODEL),
            Item("rounding of moments", state.update.rounding, ESTIMATE),
        ]
        yield _phase("update", [*trainer, *resident, *passing])
    whole = {one.name: Item(one.name, one.num_bytes, EXACT) for one in others if one.is_trained}
    if whole:
        rest = [item for item in resident if item.name not in whole]
        yield _phase("save", [*trainer, *rest, *whole.values()])


def _phase(name: str, items: list[Item]) -> Phase:
    return Phase(name, tuple(item for item in items if item.num_bytes))


def _host(config: RunConfig, platform: str, held: _Held) -> Iterator[Item]:
    """What a rank takes of the host's memory, besides its process and its data."""
    memory, state, engine, others = config.memory, held.state, held.engine, held.others
    if platform != "cpu":
        if "weights" in memory.offload:
            yield Item("weights away", state.weights + state.reference, ESTIMATE)
        if "optimizer" in memory.offload:
            yield Item("optimizer away", state.optimizer, ESTIMATE)
        for one in others:
            if away := one.resident(()) - one.resident(memory.offload) + one.host_bytes:
                yield Item(f"{one.name} away", away, ESTIMATE)
        if memory.optimizer_on_host:
            yield Item("optimizer on host", state.optimizer, ESTIMATE)
        if engine is not None and config.rollout.placement == "colocated" and _sleeps(config, platform):
            yield Item("weights of the sleeping engine", engine.weights, ESTIMATE)
    trained = [state, *(one.state for one in others if one.is_trained)]
    if config.checkpoint.async_save:
        copied = sum(one.weights - one.frozen + one.optimizer for one in trained)
        yield Item("checkpoint under way", copied, ESTIMATE)
    elif memory.optimizer_on_host:  # a checkpoint is written from a copy of what is on the host
        yield Item("checkpoint under way", sum(one.optimizer for one in trained), ESTIMATE)
    if samples(config):
        workers = config.reward_workers
        # Those of the whole node if their number is given: how many ranks share them is not known here.
        name = "reward workers, at most" if workers.num_workers is None else "reward workers of the node, at most"
        yield Item(name, (workers.num_workers or WORKERS_PER_RANK) * workers.memory_bytes, ESTIMATE)


def _routing(config: RunConfig, mixture: Mixture | None, layout: ParallelLayout, rank: int) -> Iterator[Item]:
    """Experts that engines chose: a rank holds those of its samples, also packed into micro-batches, and an engine's
    first rank those of what the engine sampled, twice while they are sent."""
    if mixture is None or not samples(config) or config.rollout.routing_replay != "rollout":
        return
    data, n = config.data, config.rollout.n
    num_tokens = data.train_batch_size * n * (data.max_prompt_length + data.max_response_length - 1)
    per_token = len(mixture.layers) * mixture.experts_per_token
    share = num_tokens // layout.data * per_token * (mixture.expert_bytes + EXPERT_BYTES_PACKED)
    is_separate = config.rollout.placement == "separate"
    engines = EngineLayout(layout.world_size, layout.world_size if is_separate else config.rollout.tensor_parallel_size)
    sampled = num_tokens // engines.num_replicas if engines.tensor_rank(rank) == 0 else 0
    yield Item("experts of the tokens", share + 2 * sampled * per_token * mixture.expert_bytes, ESTIMATE)


def _sync_volume(config: RunConfig, shape: ModelShape, layout: ParallelLayout, platform: str) -> SyncVolume:
    """What moves from the trainer's shards to the engines' in one sync."""
    rollout, world_size = config.rollout, layout.world_size
    size = rollout.tensor_parallel_size
    sources: list[list[Series]] = [rank_series(shape, layout, rank) for rank in range(world_size)]
    if _reloads(config, shape, platform):
        wanted = [full_series(shape)] * world_size
    else:
        by_rank = [vllm_series(shape, size, rank, has_whole_experts(rollout)) for rank in range(size)]
        num_workers = world_size if rollout.placement == "colocated" else rollout.num_engines * size
        wanted = [by_rank[rank % size] for rank in range(num_workers)]
        if rollout.placement == "separate":  # trainer ranks first, then the engines' workers
            sources, wanted = sources + [[]] * num_workers, [[]] * world_size + wanted
    plan = compile_plan(sources, wanted)
    item = DTYPES[rollout.dtype or config.model.dtype].itemsize
    volume = plan.volume()
    received = plan.traffic.sum(0) - np.diag(plan.traffic)
    exchanged = received + plan.traffic.sum(1) - np.diag(plan.traffic)
    return SyncVolume(
        local=volume.local * item,
        sent=volume.sent * item,
        minimum=volume.minimum * item,
        largest_received=int(received.max()) * item,
        buffers=min(config.bridge.bucket_bytes, int(exchanged.max()) * item),
    )
