"""The parts of a stage, each made from the configuration only."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from mega_rl import platform
from mega_rl.bridge.files.huggingface import HFReader
from mega_rl.bridge.mapping.adapter import adapter_tensors
from mega_rl.bridge.mapping.tensors import hf_tensors, roles
from mega_rl.bridge.mapping.tuning import AdapterPlan, critic_tuning
from mega_rl.bridge.mapping.vllm_slots import Slots
from mega_rl.bridge.outgoing.noise import AqnNoise, AqnTransform
from mega_rl.bridge.outgoing.quantize import SimulatedQuantization
from mega_rl.bridge.outgoing.transform import Transform
from mega_rl.bridge.reshard.proof import LoadProof, Proof, Sizes
from mega_rl.bridge.series import Series, slices_of
from mega_rl.bridge.slices import Box
from mega_rl.config import RunConfig, has_critic, samples, workers_rewards
from mega_rl.config.checks.model import REWARD_KEY
from mega_rl.config.schema.sections import (
    OptimizerConfig,
    ParallelConfig,
    RewardConfig,
    RouterConfig,
    TuningConfig,
)
from mega_rl.config.schema.stage import (
    critic_parallel,
    has_whole_experts,
    model_directory,
    reward_model,
)
from mega_rl.data.prompts import PromptDataset, PromptStream
from mega_rl.data.rows.rows import DataFiles
from mega_rl.data.stream import Stream
from mega_rl.errors import InputError
from mega_rl.megatron.engine import MegatronEngine, Optimization
from mega_rl.megatron.groups import Groups
from mega_rl.megatron.model.spec import TrainerSpec
from mega_rl.megatron.model.value import NewScore
from mega_rl.megatron.offload import PARTS
from mega_rl.megatron.policy import MegatronPolicy
from mega_rl.megatron.reference import Frozen, FrozenCopy, Reference, StartingAdapters, WithoutAdapters
from mega_rl.models.shape import VALUE, ModelShape
from mega_rl.parallel.collectives import gather_objects, together
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.rewards.scorer import Scorer, WeightedReward
from mega_rl.rollout.collect.replay import ReplayEngine
from mega_rl.rollout.engine import ProbedSampler
from mega_rl.rollout.remote.engine_process import EngineSpec
from mega_rl.rollout.remote.engines import RemoteEngines
from mega_rl.rollout.remote.sink import remote_layout, remote_sink
from mega_rl.rollout.sinks import (
    SentWeights,
    WeightSink,
    colocated_layout,
    colocated_sink,
)
from mega_rl.rollout.vllm.engine import VLLMEngine
from mega_rl.rollout.vllm.start.options import engine_settings, num_loading_engines
from mega_rl.rollout.vllm.start.seeing import Sight
from mega_rl.stages.learn.critic import Critic
from mega_rl.stages.learn.learning import Learner, objective_of
from mega_rl.stages.run.batch_share import BatchShare
from mega_rl.stages.run.session import Session
from mega_rl.stages.score.reward_model import RewardModel
from mega_rl.stages.score.scoring import rows_need_truth, scorer_of_node
from mega_rl.stages.score.values import check_same_tokenizer, open_value_model
from mega_rl.stages.weights import adapters
from mega_rl.stages.weights.weight_sync import (
    RecordedSync,
    Sync,
    WeightSync,
)
from mega_rl.types import DTYPES


def prompt_stream(session: Session) -> PromptStream:
    data = session.config.data
    dataset = PromptDataset.from_files(
        DataFiles(data.train_files),
        session.tokenizer,
        data,
        needs_truth=rows_need_truth(session.config),
        tools=() if session.plan is None else session.plan.tools,
        picture_set=session.picture_set,
    )
    if session.picture_set is not None:
        session.picture_set.learn_from(dataset.prompts)
    if dataset.num_dropped:
        session.say(f"data: {dataset.num_dropped} prompts longer than {data.max_prompt_length} tokens left out")
    with together("making batches of the prompts"):
        return Stream(dataset, data.train_batch_size, data.shuffle, data.seed)


def validation_prompts(session: Session) -> PromptDataset | None:
    data = session.config.data
    if not data.val_files or session.config.rollout.replay is not None:
        return None
    return PromptDataset.from_files(
        DataFiles.validation(data),
        session.tokenizer,
        data,
        needs_truth=rows_need_truth(session.config),
        tools=() if session.plan is None else session.plan.tools,
        picture_set=session.picture_set,
    )


def total_steps(config: RunConfig, steps_per_epoch: int) -> int:
    """Training steps of the whole run: as configured, or the epochs times the full batches of one epoch."""
    trainer = config.trainer
    if trainer.total_steps is not None:
        return trainer.total_steps
    assert trainer.total_epochs is not None, "validation asks for one of the two"
    return trainer.total_epochs * steps_per_epoch


def trainer_spec(config: RunConfig) -> TrainerSpec:
    """The trainer's models; a stage that samples computes the log-probabilities at the temperature it samples at."""
    return TrainerSpec(
        dtype=DTYPES[config.model.dtype],
        parallel=config.parallel,
        memory=config.memory,
        temperature=config.rollout.temperature if samples(config) else 1.0,
        chunk_tokens=config.trainer.logprob_chunk_tokens,
        fields=config.trainer.megatron,
        tuning=config.tuning,
        router=config.router,
        vision=config.model.vision,
        seed=config.trainer.seed,
        layers=config.platform.layers,
        entropy_has_gradient=samples(config) and config.algorithm.entropy_coefficient != 0,
    )


def companion_spec(config: RunConfig) -> TrainerSpec:
    """The further models of a run: ``tuning`` and ``router`` are of the policy."""
    return replace(trainer_spec(config), tuning=TuningConfig(), router=RouterConfig())


def actor(session: Session, num_optimizer_steps: int) -> MegatronEngine:
    """The policy that is trained, with the adapter that it goes on from."""
    config = session.config
    weights, adapter, digest = adapters.starting_point(config.tuning, session.shape, session.weights)
    actor = trainer(session, trainer_spec(config), config.optimizer, session.shape, weights, num_optimizer_steps)
    if adapter is not None:
        adapters.load_adapter(actor, adapter)
        actor.adapter_start = digest
        session.say(f"tuning.adapter.path: training goes on from the adapter in {adapter.directory}")
    return actor


def trainer(
    session: Session,
    spec: TrainerSpec,
    optimizer: OptimizerConfig,
    shape: ModelShape,
    weights: HFReader | NewScore,
    num_optimizer_steps: int,
    base: MegatronPolicy | None = None,
    groups: Groups | None = None,
) -> MegatronEngine:
    """Any model that is trained, at the layout of ``spec``; as ``MegatronEngine``."""
    policy = MegatronPolicy(spec, shape, ParallelLayout.of(spec.parallel, session.layout.world_size), session.device)
    optimization = Optimization(optimizer, num_optimizer_steps, session.config.trainer.max_skipped_steps)
    return MegatronEngine(policy, weights, optimization, base, groups)


def reference(session: Session, actor: MegatronEngine) -> Reference | None:
    """The starting weights, if the objective needs them: what is under the adapters, or the adapters that training goes
    on from, if nothing else is trained; else a frozen copy. So the actor must not have been resumed yet."""
    if session.config.algorithm.kl_coefficient == 0:
        return None
    plan = actor.policy.plan
    settings = session.config.tuning.adapter
    if plan.adapters.ranks and not plan.trained:
        goes_on = settings.path is not None and not settings.new
        return StartingAdapters(actor.policy) if goes_on else WithoutAdapters(actor.policy)
    policy = MegatronPolicy(companion_spec(session.config), session.shape, session.layout, session.device)
    policy.copy_from(actor.policy)
    return FrozenCopy(policy, session.config.memory, platform.current().has_own_memory)


def engine_and_sync(session: Session, actor: MegatronEngine, noise: AqnNoise) -> tuple[ProbedSampler, Sync]:
    """The sampler, asleep if it can sleep, and the sync that gives it the actor's weights; collective."""
    config = session.config
    if config.rollout.replay is not None:
        session.say(f"rollout.replay: responses come from {config.rollout.replay}, there is no engine to validate with")
        records = ReplayEngine(Path(config.rollout.replay), session.shape.mixture, waits=config.rollout.oversample > 1)
        return records, RecordedSync(records, noise)
    weights, slots = engine_weights(session, actor, noise)
    if config.rollout.placement == "separate":
        rollout = config.rollout
        size = rollout.tensor_parallel_size
        wanted = remote_layout(weights, size, rollout.num_engines * size)
        load = load_proof(session, actor, weights, wanted)
        engines = remote_engines(session, slots)
        sink: WeightSink = remote_sink(engines, weights, load, rollout.weight_update)
        return engines, weight_sync(session, actor, sink, noise, weights.slots)
    engine, sink = colocated_engine(session, actor, weights, slots)
    return engine, weight_sync(session, actor, sink, noise, weights.slots)


def engine_weights(session: Session, actor: MegatronEngine, noise: AqnNoise) -> tuple[SentWeights, Slots | None]:
    """What the engines are sent, and the slots of their adapters; None: they have none."""
    config, plan = session.config, actor.policy.plan.adapters
    dtype = DTYPES[config.rollout.dtype or config.model.dtype]
    slots = adapters.engine_slots(config.rollout, session.shape, plan, session.device.type, session.say)
    changing = adapters.changing(config, actor.policy, noise, slots is not None)
    of_slots = None if slots is None else plan
    settings = session.shape, dtype, config.bridge.bucket_bytes, session.device, changing, of_slots
    return SentWeights(*settings, has_whole_experts(config.rollout)), slots


def remote_engines(session: Session, slots: Slots | None) -> RemoteEngines:
    return RemoteEngines(engine_spec(session, slots), session.config.rollout.num_engines, session.picture_set)


def engine_spec(session: Session, slots: Slots | None) -> EngineSpec:
    """What engines in processes of their own are started with."""
    config = session.config
    return EngineSpec(
        str(Path(config.model.path).resolve()),
        config.rollout,
        config.data.max_prompt_length + config.data.max_response_length,
        config.model.dtype,
        platform.current().name,
        config.platform.deterministic,
        torch.get_num_threads(),
        config.trainer.collective_timeout_s,
        slots,
        sight=(seen := sight(session)) and replace(seen, pictures={}),
    )


def colocated_engine(
    session: Session, actor: MegatronEngine, weights: SentWeights, slots: Slots | None
) -> tuple[VLLMEngine, WeightSink]:
    """The engine in this process, asleep if it can sleep, and its sink; meanwhile the actor makes room for it."""
    config, layout = session.config, session.engine_layout
    load = None
    if config.rollout.weight_update != "reload":
        load = load_proof(session, actor, weights, colocated_layout(weights, layout))
    actor.offload.to_host(*PARTS)  # an engine refuses to start if its share of the device is not free
    engine = VLLMEngine(
        config.model.path,
        engine_settings(config.rollout, layout.replica(dist.get_rank())),
        max_model_len=config.data.max_prompt_length + config.data.max_response_length,
        device_type=session.device.type,
        dtype=config.model.dtype,
        slots=slots,
        sight=sight(session),
    )
    sink = colocated_sink(
        engine,
        weights,
        layout,
        load=load,
        weight_update=config.rollout.weight_update,
        verify=config.bridge.verify,
        say=session.say,
    )
    engine.sleep()
    actor.offload.to_device()
    return engine, sink


def sight(session: Session) -> Sight | None:
    """What engines of this run see with."""
    picture_set = session.picture_set
    if picture_set is None:
        return None
    return Sight(picture_set.pictures, session.config.data.max_images, picture_set.reader.pixel_limits)


def load_proof(
    session: Session, actor: MegatronEngine, weights: SentWeights, wanted: Sequence[Sequence[Series]]
) -> LoadProof:
    """What compares the engines' own load with ``model.path``, before the actor leaves the device or is resumed.

    The actor still holds the tensors of ``model.path``, unless its dtype is narrower than the engines', or an adapter
    was merged into them: then its part of them is read again. Collective.

    Args:
        wanted: what every engine worker holds.
    """
    rank, config = dist.get_rank(), session.config

    def held(local_name: str, hf_name: str, hf_box: Box, local_box: Box) -> torch.Tensor:
        return actor.policy.local(local_name, local_box).to(weights.dtype)

    def read(local_name: str, hf_name: str, hf_box: Box, local_box: Box) -> torch.Tensor:
        return session.weights.read(hf_name, hf_box).to(weights.device, weights.dtype)

    is_other = DTYPES[config.model.dtype].itemsize < weights.dtype.itemsize or config.tuning.adapter.new
    sources = [slices_of(actor.series_of(other)) for other in range(dist.get_world_size())]
    size = config.rollout.tensor_parallel_size
    num_loading = num_loading_engines(config.rollout, len(wanted) // size)
    loaded = [slices_of(series) for series in wanted[: num_loading * size]]
    return LoadProof(hf_tensors(session.shape), sources, loaded, size, read if is_other else held, rank)


def weight_sync(
    session: Session, actor: MegatronEngine, sink: WeightSink, noise: AqnNoise, slots: AdapterPlan | None = None
) -> WeightSync:
    """The actor's way into the sink, with the outgoing transforms and the proof that the configuration asks for.

    Args:
        slots: the adapters that the engines keep in slots; None: adapters are merged.

    Raises:
        InputError: simulated quantisation whose blocks the trainer's layout cuts.
    """
    config, shape, policy = session.config, session.shape, actor.policy
    dtype = DTYPES[config.rollout.dtype or config.model.dtype]
    sources = [actor.series_of(rank) for rank in range(dist.get_world_size())]
    transforms: list[Transform] = []
    if config.aqn.enabled:
        transforms.append(AqnTransform(noise, hf_tensors(shape), roles(shape), actor.master_weights, dtype))
    if (four_bits := config.rollout.simulated_quantization) is not None:
        held = [slices_of(series) for series in sources]
        transforms.append(
            SimulatedQuantization(four_bits, hf_tensors(shape), roles(shape), held, dist.get_rank(), session.device)
        )
    model: list[Transform] = []
    if slots is not None:
        model.append(adapters.scaled_adapters(policy, dtype))
        sources = [held + policy.adapter_series_of(rank) for rank, held in enumerate(sources)]
    elif policy.plan.adapters.ranks:
        model.append(adapters.lora_merge(policy, dtype, config.bridge.bucket_bytes))
    of_slots = {} if slots is None else adapter_tensors(shape, slots)
    checks = proof(config, {**hf_tensors(shape), **of_slots}, sources, sink)
    return WeightSync(actor, sources, sink, transforms, dtype, checks, model)


def proof(config: RunConfig, sizes: Sizes, sources: Sequence[Sequence[Series]], sink: WeightSink) -> Proof | None:
    """What ``bridge.verify`` asks for; None if it is off, or the engines hold nothing to compare."""
    if config.bridge.verify == "off" or sink.inspect is None:
        return None
    held, needed = ([slices_of(series) for series in side] for side in (sources, sink.layout()))
    is_sample = config.bridge.verify == "sample"
    return Proof(sizes, held, needed, config.rollout.tensor_parallel_size, is_sample, config.trainer.seed)


def noise(session: Session, total: int) -> AqnNoise:
    aqn = AqnNoise(session.config.aqn, total)
    if any(other != session.config.aqn for other in gather_objects(session.config.aqn)):
        raise InputError("the ranks were started with different aqn sections: give every one the same configuration")
    if session.config.aqn.enabled:
        aqn.targets(roles(session.shape))  # refuses what matches nothing
    return aqn


def scorer(session: Session) -> Scorer:
    config = session.config
    reward = reward_model(config)
    collective = None if reward is None else collective_reward_of(session, reward)
    if not config.rewards:  # the environment gives them
        return Scorer([], None)
    pictures = None if session.picture_set is None else session.picture_set.pictures
    return scorer_of_node(workers_rewards(config), config.reward_workers, collective, pictures)


def collective_reward_of(session: Session, reward: RewardConfig) -> RewardModel:
    """The reward model, frozen, at the trainer's layout."""
    config, directory = session.config, model_directory(reward)
    with together("opening the reward model"):
        shape, weights = open_value_model(directory, REWARD_KEY, seed=None, allowed=VALUE)
        check_same_tokenizer(session.tokenizer, directory, REWARD_KEY)
    policy = MegatronPolicy(companion_spec(config), shape, session.layout, session.device)
    policy.load_huggingface(weights)
    frozen = Frozen(policy, config.memory, platform.current().has_own_memory)
    return RewardModel(WeightedReward(reward.name, reward.weight), frozen, session.share)


def policy_updates(config: RunConfig, total_steps: int) -> int:
    """Optimizer steps of the policy in so many training steps."""
    alone = config.critic.warmup_steps if has_critic(config) else 0
    return max(1, total_steps - alone) * config.algorithm.minibatches_per_step


def learner(session: Session, actor: MegatronEngine, reference: Reference | None, total_steps: int) -> Learner:
    """With a critic, if the advantage needs one, which must be there before the actor is resumed."""
    config = session.config
    value = critic(session, actor, total_steps) if has_critic(config) else None
    common = session.share, session.trajectory_store, session.timers, session.say
    return Learner(config, *common, actor, reference, objective_of(config), value)


def critic(session: Session, actor: MegatronEngine, total_steps: int) -> Critic:
    """A critic that begins as ``critic.path`` says; with a new head every value begins at 0.

    One that shares the policy's weights is first built with its own, which the policy makes room for if it can.
    """
    config, settings = session.config, session.config.critic
    with together("opening the critic"):
        shape, weights = open_value_model(settings.path or config.model.path, "critic.path", seed=None)
        if settings.path is not None:
            check_same_tokenizer(session.tokenizer, settings.path, "critic.path")
    updates = config.algorithm.minibatches_per_step
    optimizer = replace(config.optimizer, lr=settings.lr, min_lr=0.0, warmup_steps=0, decay_steps=None)
    optimizer.schedule = "constant"
    tuning = critic_tuning(config.tuning, settings.shares_base)
    spec = replace(companion_spec(config), parallel=critic_parallel(config), tuning=tuning)
    base = actor.policy if settings.shares_base else None
    if base is not None:
        actor.offload.to_host(*PARTS)
    groups, share = _own_layout(session, spec.parallel)
    with nullcontext() if groups is None else groups.current():
        engine = trainer(session, spec, optimizer, shape, weights, total_steps * updates, base, groups)
    actor.offload.to_device()
    return Critic(settings, share, session.timers, session.say, engine, actor, updates, groups is not None)


def _own_layout(session: Session, parallel: ParallelConfig) -> tuple[Groups | None, BatchShare]:
    """Groups of the critic's layout, None if it is the policy's, and this rank's share of minibatches; collective."""
    trainer, layout = session.config.trainer, ParallelLayout.of(parallel, session.layout.world_size)
    if parallel == session.config.parallel:
        return None, session.share
    groups = Groups(layout, trainer.seed, trainer.collective_timeout_s)
    multiple = layout.tensor if parallel.sequence else 1
    return groups, replace(session.share, layout=layout, pad_multiple=multiple)
