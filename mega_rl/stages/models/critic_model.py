"""PPO's critic as the configuration wants it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

from mega_rl.bridge.mapping.tuning import critic_tuning
from mega_rl.config import has_critic
from mega_rl.config.schema.sections import ParallelConfig
from mega_rl.config.schema.stage import critic_parallel
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.megatron.groups import Groups
from mega_rl.megatron.offload import PARTS
from mega_rl.parallel.collectives import together
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.stages.learn.critic import Critic
from mega_rl.stages.models.trainer import companion_spec, trainer
from mega_rl.stages.models.values import check_same_tokenizer, open_value_model
from mega_rl.stages.run.batch_share import BatchShare
from mega_rl.stages.run.job import Job


def open_critic(job: Job, actor: MegatronEngine, total_steps: int) -> Critic | None:
    """A critic that begins as ``critic.path`` says, if the advantage needs one.

    With a new head every value begins at 0. The actor must not have been resumed yet.

    One that shares the policy's weights is first built with its own, which the policy makes room for if it can.
    """
    config, settings = job.config, job.config.critic
    if not has_critic(config):
        return None
    with together("opening the critic"):
        shape, weights = open_value_model(settings.path or config.model.path, "critic.path", seed=None)
        if settings.path is not None:
            check_same_tokenizer(job.tokenizer, settings.path, "critic.path")
    updates = config.algorithm.minibatches_per_step
    optimizer = replace(config.optimizer, lr=settings.lr, min_lr=0.0, warmup_steps=0, decay_steps=None)
    optimizer.schedule = "constant"
    tuning = critic_tuning(config.tuning, settings.shares_base)
    spec = replace(companion_spec(config), parallel=critic_parallel(config), tuning=tuning)
    base = actor.policy if settings.shares_base else None
    if base is not None:
        actor.offload.to_host(*PARTS)
    groups, share = _own_layout(job, spec.parallel)
    with nullcontext() if groups is None else groups.current():
        engine = trainer(job, spec, optimizer, (shape, weights), total_steps * updates, base, groups)
    actor.offload.to_device()
    return Critic(job, share, engine, actor, has_own_layout=groups is not None)


def _own_layout(job: Job, parallel: ParallelConfig) -> tuple[Groups | None, BatchShare]:
    """Groups of the critic's layout, None if it is the policy's, and this rank's share of minibatches; collective."""
    trainer, layout = job.config.trainer, ParallelLayout.of(parallel, job.layout.world_size)
    if parallel == job.config.parallel:
        return None, job.share
    groups = Groups(layout, trainer.seed, trainer.collective_timeout_s)
    multiple = layout.tensor if parallel.sequence else 1
    return groups, replace(job.share, layout=layout, pad_multiple=multiple)
