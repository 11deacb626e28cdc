"""The engines that sample, and what brings the trainer's weights into them, as the configuration wants them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from mega_rl import platform
from mega_rl.bridge.mapping.vllm_slots import Slots
from mega_rl.bridge.outgoing.noise import AqnNoise
from mega_rl.config.schema.stage import has_whole_experts
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.megatron.offload import PARTS
from mega_rl.rollout.collect.replay import ReplayEngine
from mega_rl.rollout.engine import ProbedSampler
from mega_rl.rollout.remote.engine_process import EngineSpec
from mega_rl.rollout.remote.engines import RemoteEngines
from mega_rl.rollout.remote.sink import remote_layout, remote_sink
from mega_rl.rollout.sinks import SentWeights, WeightSink, colocated_layout, colocated_sink
from mega_rl.rollout.vllm.engine import VLLMEngine
from mega_rl.rollout.vllm.start.options import engine_settings
from mega_rl.rollout.vllm.start.seeing import Sight
from mega_rl.stages.run.sampling_job import SamplingJob
from mega_rl.stages.weights import adapters, outgoing
from mega_rl.stages.weights.weight_sync import RecordedSync, Sync
from mega_rl.types import DTYPES


def engine_and_sync(job: SamplingJob, actor: MegatronEngine, noise: AqnNoise) -> tuple[ProbedSampler, Sync]:
    """The sampler, asleep if it can sleep, and the sync that gives it the actor's weights; collective."""
    config = job.config
    if config.rollout.replay is not None:
        say_replay(job)
        records = ReplayEngine(Path(config.rollout.replay), job.shape.mixture, waits=config.rollout.oversample > 1)
        return records, RecordedSync(records, noise)
    weights, slots = engine_weights(job, actor, noise)
    if config.rollout.placement == "separate":
        rollout = config.rollout
        size = rollout.tensor_parallel_size
        wanted = remote_layout(weights, size, rollout.num_engines * size)
        load = outgoing.load_proof(job, actor, weights, wanted)
        engines = remote_engines(job, slots)
        sink: WeightSink = remote_sink(engines, weights, load, rollout.weight_update)
        return engines, outgoing.weight_sync(job, actor, sink, noise, weights.slots)
    engine, sink = colocated_engine(job, actor, weights, slots)
    return engine, outgoing.weight_sync(job, actor, sink, noise, weights.slots)


def say_replay(job: SamplingJob) -> None:
    """Tell of a run without engines what is therefore not done."""
    job.say(
        f"rollout.replay: responses come from {job.config.rollout.replay}, there is no engine to validate with, nor "
        "one to ask whether its log-probabilities are those of rollout.temperature and whether adapters reach it"
    )


def engine_weights(job: SamplingJob, actor: MegatronEngine, noise: AqnNoise) -> tuple[SentWeights, Slots | None]:
    """What the engines are sent, and the slots of their adapters; None: they have none."""
    config, plan = job.config, actor.policy.plan.adapters
    dtype = DTYPES[config.rollout.dtype or config.model.dtype]
    slots = adapters.engine_slots(config.rollout, job.shape, plan, job.device.type, job.say)
    changing = adapters.changing(config, actor.policy, noise, slots is not None)
    of_slots = None if slots is None else plan
    settings = job.shape, dtype, config.bridge.bucket_bytes, job.device, changing, of_slots
    return SentWeights(*settings, has_whole_experts(config.rollout)), slots


def remote_engines(job: SamplingJob, slots: Slots | None) -> RemoteEngines:
    return RemoteEngines(engine_spec(job, slots), job.config.rollout.num_engines, job.picture_set)


def engine_spec(job: SamplingJob, slots: Slots | None) -> EngineSpec:
    """What engines in processes of their own are started with."""
    config = job.config
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
        sight=(seen := sight(job)) and replace(seen, pictures={}),
    )


def colocated_engine(
    job: SamplingJob, actor: MegatronEngine, weights: SentWeights, slots: Slots | None
) -> tuple[VLLMEngine, WeightSink]:
    """The engine in this process, asleep if it can sleep, and its sink; meanwhile the actor makes room for it."""
    config, layout = job.config, job.engine_layout
    load = None
    if config.rollout.weight_update != "reload":
        load = outgoing.load_proof(job, actor, weights, colocated_layout(weights, layout))
    actor.offload.to_host(*PARTS)  # an engine refuses to start if its share of the device is not free
    engine = VLLMEngine(
        config.model.path,
        engine_settings(config.rollout, layout.replica(dist.get_rank())),
        max_model_len=config.data.max_prompt_length + config.data.max_response_length,
        device_type=job.device.type,
        dtype=config.model.dtype,
        slots=slots,
        sight=sight(job),
    )
    sink = colocated_sink(
        engine,
        weights,
        layout,
        load=load,
        weight_update=config.rollout.weight_update,
        verify=config.bridge.verify,
        say=job.say,
    )
    engine.sleep()
    actor.offload.to_device()
    return engine, sink


def sight(job: SamplingJob) -> Sight | None:
    """What engines of this run see with."""
    picture_set = job.picture_set
    if picture_set is None:
        return None
    return Sight(picture_set.pictures, job.config.data.max_images, picture_set.reader.pixel_limits)
