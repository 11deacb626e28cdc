"""Reinforcement learning: push weights, sample, score, learn, validate, save, in the order written here."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

from mega_rl.config import RunConfig
from mega_rl.stages.learn import learning
from mega_rl.stages.learn.gate_watch import GateWatch
from mega_rl.stages.learn.validation_gate import validation_gate
from mega_rl.stages.models import trainer
from mega_rl.stages.models.critic_model import open_critic
from mega_rl.stages.run import progress
from mega_rl.stages.run.sampling_job import SamplingJob, open_sampling_job
from mega_rl.stages.sampling import rollout_metrics
from mega_rl.stages.sampling.prompts import prompt_stream, validation_prompts
from mega_rl.stages.sampling.sampling import sampling
from mega_rl.stages.sampling.validation import Validator
from mega_rl.stages.score.scorer_of import scorer_of
from mega_rl.stages.score.scoring import RewardWatch
from mega_rl.stages.weights.behaviour import behaviour_policy, noise_of
from mega_rl.stages.weights.engine_probe import Rounding
from mega_rl.stages.weights.export import export_trained


def run(config: RunConfig) -> None:
    """Train as ``config`` says; every rank of the job calls it."""
    with open_sampling_job(config) as job:
        train(job)


def train(job: SamplingJob) -> None:
    config, timers = job.config, job.timers
    # What can refuse the configuration comes first, what takes long to build after it.
    learning.check_algorithm(config, job.device)
    prompts = prompt_stream(job)
    total_steps = progress.total_steps(config, prompts.steps_per_epoch)
    noise = noise_of(job, total_steps)
    scorer = scorer_of(job)
    held_out = validation_prompts(job, prompts)
    actor = trainer.actor(job, trainer.policy_updates(config, total_steps))
    # Both take the actor for what model.path holds: it is resumed after them.
    reference = trainer.reference(job, actor)
    builder, sync, probe = sampling(job, actor, noise, prompts, scorer, total_steps, held_out)
    seen = None if held_out is None else held_out.picture_set
    gate = validation_gate(config, replace(job.share, picture_set=seen), actor, job.say)
    validator = Validator(job, held_out, sync, builder, scorer, gate)
    rounding = Rounding(config, job.say)
    learner = learning.Learner(job, actor, reference, open_critic(job, actor, total_steps))
    watch = RewardWatch(job.say)
    state = progress.resume(job.checkpoint, job.memory, actor, builder, job.say)
    gates = GateWatch(config, job.share.is_counted, job.say, state.step, state.metrics, noise.sigma)
    validator.results |= state.validations

    with job.observer(state, total_steps) as observer, job.notice() as notice, closing(builder):
        if config.validation.val_before_train and state.step == 0:
            observer.log(0, validator.validate(observer, step=0) | timers.collect())
        for step in range(state.step, total_steps):
            with job.step(step + 1):
                with timers("sync"):
                    pushed = sync.push(version=step)
                rounding.tell(pushed)
                probe.check(pushed)
                with timers("generate"):
                    batch = builder.build(step)
                    sync.end_sampling()
                    batch = builder.judged(batch)
                metrics = {**pushed.metrics, **batch.metrics}
                watch.check(batch.generated)
                samples = learning.with_advantages(batch.learnt, config.algorithm)
                rollout_metrics.show(job, observer, actor, step + 1, batch, samples)
                behaviour = behaviour_policy(actor, noise, pushed)
                metrics |= learner.update(samples, gates.of_step(step, pushed.version, pushed.sigma), behaviour)
            metrics |= rollout_metrics.sample_metrics(samples)
            metrics |= rollout_metrics.schedule_metrics(noise, pushed, samples, metrics)
            done = step + 1
            if progress.is_due(done, config.validation.test_freq, total_steps):
                metrics |= validator.validate(observer, step=done)
            metrics |= {"data/epoch": prompts.epochs, "rollout/weight_version": float(pushed.version)}
            reached = progress.Progress(done, validator.results, metrics)
            freq = 1 if notice.is_given() else config.checkpoint.save_freq
            progress.save_if_due(job, freq, actor, builder, reached, total_steps)
            reports = job.reports_of_step()
            metrics |= job.device_metrics(reports) | rollout_metrics.time_metrics(reports, samples)
            timers.collect()
            observer.log(done, metrics)
            job.stop_if_given(notice, done)

    export_trained(job, actor)
    validator.print_summary()
    job.say_where()
