"""Where ``rollout.mode`` decides: the engines of a fleet, and what the steps of a run come from."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from mega_rl.bridge.outgoing.noise import AqnNoise
from mega_rl.config.schema.sampling import RolloutConfig
from mega_rl.data.prompts import PromptDataset, PromptStream
from mega_rl.fleet.engines import EngineLimits
from mega_rl.fleet.executor import Requests
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.rewards.scorer import Scorer
from mega_rl.rollout.collect.replay import RecordedExecutor, Records
from mega_rl.rollout.engine_checks import FleetChecks
from mega_rl.rollout.remote.fleet.leases import keeping
from mega_rl.rollout.remote.fleet.ray_executor import RayExecutor, Work
from mega_rl.rollout.remote.fleet.store_sink import StoreSink
from mega_rl.rollout.remote.load_checks import LoadChecks
from mega_rl.rollout.remote.sink import remote_layout
from mega_rl.stages.run.episodes import plan_there, with_episodes
from mega_rl.stages.run.sampling_job import SamplingJob
from mega_rl.stages.sampling.batch_builder import BatchBuilder, Batches
from mega_rl.stages.sampling.fleet_batches import Fleet, FleetBatches
from mega_rl.stages.sampling.validation import validation_set
from mega_rl.stages.score.scoring import share_nodes
from mega_rl.stages.weights import engines, outgoing
from mega_rl.stages.weights.adapters import merged_there
from mega_rl.stages.weights.engine_probe import EngineProbe, FleetProbe, NoEngine, Probe, check_plan
from mega_rl.stages.weights.weight_sync import RecordedSync, Sync

SLOW_LOAD = 1e7  # bytes a second that a worker copies and hashes at least


def recorded_fleet(job: SamplingJob, actor: MegatronEngine, noise: AqnNoise) -> tuple[Fleet, Sync]:
    """Engines that answer with what a run recorded, and their sync."""
    config = job.config.rollout
    assert config.replay is not None, "there are records"
    engines.say_replay(job)
    records = Records(Path(config.replay), job.shape.mixture)
    made = partial(RecordedExecutor, records)
    return Fleet(config.num_engines, limits_of(config), made, NoEngine()), RecordedSync(None, noise)


def store_fleet(job: SamplingJob, actor: MegatronEngine, noise: AqnNoise) -> tuple[Fleet, Sync]:
    """Engines that fetch their weights, and the sync that puts the actor's where they find them. Collective."""
    config = job.config.rollout
    weights, slots = engines.engine_weights(job, actor, noise)
    adapters = actor.policy.plan.adapters
    weights = replace(weights, merged=merged_there(job.config, adapters, weights.slots))
    spec = engines.engine_spec(job, slots)
    if job.plan is not None:
        spec = replace(spec, episodes=plan_there(job.config, spec.model_path))
    has_validation = bool(job.config.data.val_files)
    # A version is written while engines may still ask for those that the step before it could be sampled with.
    sink = StoreSink(
        weights, config.tensor_parallel_size, num_slots=config.max_staleness + 2, has_validation=has_validation
    )

    wanted = remote_layout(weights, config.tensor_parallel_size, config.num_engines * config.tensor_parallel_size)
    loads = LoadChecks(spec, outgoing.load_proof(job, actor, weights, wanted), job.say)
    checks = FleetChecks(check_plan(job.config, job.shape.vocab_size, job.say))

    job.trajectory_store.open_owners()

    def opened(requests: Requests) -> RayExecutor:
        assert sink.store is not None, "rank 0 has the store"
        kept_by = keeping(job.output_dir, config.engine_lease_s)
        work = Work(requests, checks, job.picture_set, job.trajectory_store.owners)
        executor = RayExecutor(loads, config.num_engines, work, sink.store, sink.stored, kept_by)
        if executor.num_survivors:
            job.say(f"attached to {executor.num_survivors} rollout engines that the trainer before left running")
        return executor

    if adapters.ranks and weights.slots is None:
        brings = "their factors, which engines merge" if sink.form.merged else "the weights that they are merged into"
        job.say(f"rollout.adapter: of merged adapters every version brings {brings}")
    sync = outgoing.weight_sync(job, actor, sink, noise, weights.slots, gives_factors=weights.merged is not None)
    largest = max(plan.num_bytes(1) for plan in sink.form.plans)
    return Fleet(config.num_engines, limits_of(config, largest), opened, FleetProbe(checks)), sync


def limits_of(config: RolloutConfig, num_bytes: int = 0) -> EngineLimits:
    """What an engine may take, and how long; once it has started, it says itself how many responses it takes.

    Args:
        num_bytes: that a worker of an engine copies at most for a version.
    """
    slots = int(config.vllm.get("max_num_seqs") or EngineLimits.slots)
    load_s = max(EngineLimits.load_s, num_bytes / SLOW_LOAD)
    return EngineLimits(slots, progress_s=config.engine_timeout_s, load_s=load_s, restarts=config.engine_restarts)


def sampling(
    job: SamplingJob,
    actor: MegatronEngine,
    noise: AqnNoise,
    prompts: PromptStream,
    scorer: Scorer,
    total_steps: int,
    held_out: PromptDataset | None,
) -> tuple[Batches, Sync, Probe]:
    """What every step learns from, the sync that gives the engines behind it the actor's weights, and what they are
    asked after it. Collective."""
    config, layout, asked = job.config, job.engine_layout, validation_set(job, held_out)
    if config.rollout.mode == "synchronous":
        engine, sync = engines.engine_and_sync(job, actor, noise)
        sampler = with_episodes(config, layout, engine, job.plan)
        plan = check_plan(config, job.shape.vocab_size, job.say)
        probe = NoEngine() if config.rollout.replay is not None else EngineProbe(engine, layout, plan)
        return BatchBuilder(job, prompts, sampler, scorer, asked), sync, probe
    make = store_fleet if config.rollout.replay is None else recorded_fleet
    fleet, sync = make(job, actor, noise)
    share_nodes(scorer, job.trajectory_store)
    return FleetBatches(job, prompts, fleet, scorer, total_steps, asked), sync, fleet.probe
