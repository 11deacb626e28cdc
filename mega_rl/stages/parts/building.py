"""The parts of a stage, each made from the configuration alone."""

from __future__ import annotations

from pathlib import Path

import torch

from mega_rl import platform
from mega_rl.algorithms.objective import PolicyObjective
from mega_rl.bridge.mapping.tensors import roles
from mega_rl.bridge.outgoing.noise import AqnNoise
from mega_rl.config import RunConfig
from mega_rl.data.prompts import PromptDataset, PromptStream
from mega_rl.data.stream import Stream
from mega_rl.errors import InputError
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.megatron.offload import PARTS, Reference, is_device
from mega_rl.megatron.policy import MegatronPolicy
from mega_rl.parallel.collectives import gather_objects, together
from mega_rl.rewards.scorer import Scorer, build_scorer
from mega_rl.rollout.engine import RolloutEngine
from mega_rl.rollout.remote.engine_process import EngineSpec
from mega_rl.rollout.remote.engines import RemoteEngines
from mega_rl.rollout.replay import ReplayEngine
from mega_rl.rollout.vllm.engine import VLLMEngine
from mega_rl.stages.parts.session import Session
from mega_rl.stages.parts.weight_sync import Sync, Unsynced, WeightSync


def prompt_stream(session: Session) -> PromptStream:
    data = session.config.data
    with together("reading the prompts"):
        dataset = PromptDataset.from_files(data.train_files, session.tokenizer, data)
        if dataset.num_dropped:
            session.say(f"data: {dataset.num_dropped} prompts longer than {data.max_prompt_length} tokens left out")
        return Stream(dataset, data.train_batch_size, data.shuffle, data.seed)


def validation_prompts(session: Session) -> PromptDataset | None:
    data = session.config.data
    if not data.val_files or session.config.rollout.replay is not None:
        return None
    with together("reading the validation prompts"):
        return PromptDataset.from_files(
            data.val_files, session.tokenizer, data, key="data.val_files", max_samples=data.max_val_samples
        )


def total_steps(config: RunConfig, steps_per_epoch: int) -> int:
    """Training steps of the whole run: given, or epochs times the full batches of one."""
    trainer = config.trainer
    if trainer.total_steps is not None:
        return trainer.total_steps
    assert trainer.total_epochs is not None, "validation asks for one of the two"
    return trainer.total_epochs * steps_per_epoch


def actor(session: Session, num_optimizer_steps: int) -> MegatronEngine:
    return MegatronEngine(
        session.config, session.shape, session.layout, session.device, session.weights, num_optimizer_steps
    )


def reference(session: Session) -> Reference | None:
    """A frozen copy of the starting weights, where the objective needs one."""
    if session.config.algorithm.kl_coefficient == 0:
        return None
    policy = MegatronPolicy(session.config, session.shape, session.layout, session.device)
    for chunk in policy.chunks:
        chunk.requires_grad_(False)
    policy.load_huggingface(session.weights)
    return Reference(policy, session.config.memory, is_device(session.device))


def rollout_engine(session: Session, actor: MegatronEngine) -> RolloutEngine:
    """The engine, asleep where it can: while a colocated one is built the actor makes room for it."""
    config = session.config
    if config.rollout.replay is not None:
        session.say(f"rollout.replay: responses come from {config.rollout.replay}, there is no engine to validate with")
        return ReplayEngine(Path(config.rollout.replay))
    max_model_len = config.data.max_prompt_length + config.data.max_response_length
    if config.rollout.placement == "separate":
        spec = EngineSpec(
            str(Path(config.model.path).resolve()),
            config.rollout,
            max_model_len,
            config.model.dtype,
            platform.current().name,
            config.platform.deterministic,
            torch.get_num_threads(),
        )
        return RemoteEngines(spec, config.rollout.num_engines)
    actor.offload.to_host(*PARTS)  # an engine refuses to start where its share of the device is not free
    engine = VLLMEngine(
        config.model.path,
        config.rollout,
        max_model_len=max_model_len,
        device_type=session.device.type,
        dtype=config.model.dtype,
    )
    engine.sleep()
    actor.offload.to_device()
    return engine


def weight_sync(session: Session, actor: MegatronEngine, engine: RolloutEngine, noise: AqnNoise) -> Sync:
    return Unsynced(engine) if session.config.rollout.replay is not None else WeightSync(session, actor, engine, noise)


def noise(session: Session, total: int) -> AqnNoise:
    aqn = AqnNoise(session.config.aqn, total)
    if any(other != session.config.aqn for other in gather_objects(session.config.aqn)):
        raise InputError("the ranks were started with different aqn sections: give every one the same configuration")
    if session.config.aqn.enabled:
        aqn.targets(roles(session.shape))  # refuses what matches nothing
    return aqn


def scorer(session: Session) -> Scorer:
    with together("building the rewards"):
        return build_scorer(session.config.rewards, session.config.reward_workers)


def objective(config: RunConfig) -> PolicyObjective:
    algorithm = config.algorithm
    # Where the engine's own log-probabilities are pi_old, or its noise is ignored as published, nothing is corrected.
    is_corrected = not config.aqn.enabled or config.aqn.old_logprobs in ("decoupled", "recompute_noisy")
    return PolicyObjective(
        objective=algorithm.objective,
        clip_low=algorithm.clip_ratio_low,
        clip_high=algorithm.clip_ratio_high,
        dual_clip=algorithm.dual_clip,
        kl_coefficient=algorithm.kl_coefficient if algorithm.kl_in == "loss" else 0.0,
        kl_estimator=algorithm.kl_estimator,
        entropy_coefficient=algorithm.entropy_coefficient,
        importance_cap=algorithm.importance_cap if is_corrected else None,
        importance_correction=algorithm.importance_correction,
        importance_level=algorithm.importance_level,
        importance_floor=algorithm.importance_floor,
        reduction=algorithm.loss_reduction,
    )
