"""What is trained: the policy and further models as the configuration wants them, and the policy as it was before."""

from __future__ import annotations

from dataclasses import replace

from mega_rl import platform
from mega_rl.bridge.files.huggingface import HFReader
from mega_rl.config import RunConfig, has_critic, samples
from mega_rl.config.schema.learning import RouterConfig, TuningConfig
from mega_rl.config.schema.sections import OptimizerConfig
from mega_rl.megatron.engine import MegatronEngine, Optimization
from mega_rl.megatron.groups import Groups
from mega_rl.megatron.model.spec import TrainerSpec
from mega_rl.megatron.model.value import NewScore
from mega_rl.megatron.policy import MegatronPolicy
from mega_rl.megatron.reference import FrozenCopy, Reference, StartingAdapters, WithoutAdapters
from mega_rl.models.shape import ModelShape
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.stages.run.job import Job
from mega_rl.stages.weights import adapters
from mega_rl.types import DTYPES


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


def actor(job: Job, num_optimizer_steps: int) -> MegatronEngine:
    """The policy that is trained, with the adapter that it goes on from."""
    config = job.config
    weights, adapter, digest = adapters.starting_point(config.tuning, job.shape, job.weights)
    actor = trainer(job, trainer_spec(config), config.optimizer, (job.shape, weights), num_optimizer_steps)
    if adapter is not None:
        adapters.load_adapter(actor, adapter)
        actor.adapter_start = digest
        job.say(f"tuning.adapter.path: training goes on from the adapter in {adapter.directory}")
    return actor


def policy_updates(config: RunConfig, total_steps: int) -> int:
    """Optimizer steps of the policy in so many training steps."""
    alone = config.critic.warmup_steps if has_critic(config) else 0
    return max(1, total_steps - alone) * config.algorithm.minibatches_per_step


def trainer(
    job: Job,
    spec: TrainerSpec,
    optimizer: OptimizerConfig,
    model: tuple[ModelShape, HFReader | NewScore],
    num_optimizer_steps: int,
    base: MegatronPolicy | None = None,
    groups: Groups | None = None,
) -> MegatronEngine:
    """Any model that is trained, as ``MegatronEngine``, at the layout of ``spec``; ``model``: its shape and weights."""
    shape, weights = model
    policy = MegatronPolicy(spec, shape, ParallelLayout.of(spec.parallel, job.layout.world_size), job.device)
    optimization = Optimization(optimizer, num_optimizer_steps, job.config.trainer.max_skipped_steps)
    return MegatronEngine(policy, weights, optimization, base, groups)


def reference(job: Job, actor: MegatronEngine) -> Reference | None:
    """The starting weights, if the objective needs them: what is under the adapters, or the adapters that training goes
    on from, if nothing else is trained; else a frozen copy. So the actor must not have been resumed yet."""
    if job.config.algorithm.kl_coefficient == 0:
        return None
    plan = actor.policy.plan
    settings = job.config.tuning.adapter
    if plan.adapters.ranks and not plan.trained:
        goes_on = settings.path is not None and not settings.new
        return StartingAdapters(actor.policy) if goes_on else WithoutAdapters(actor.policy)
    policy = MegatronPolicy(companion_spec(job.config), job.shape, job.layout, job.device)
    policy.copy_from(actor.policy)
    return FrozenCopy(policy, job.config.memory, platform.current().has_own_memory)
