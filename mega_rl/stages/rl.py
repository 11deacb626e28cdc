"""Reinforcement learning: push weights, sample, score, learn, validate, save, in the order written here."""

from __future__ import annotations

from contextlib import closing

from mega_rl.config import RunConfig
from mega_rl.stages.build import building
from mega_rl.stages.learn import learning
from mega_rl.stages.learn.gates import GateWatch
from mega_rl.stages.run import progress
from mega_rl.stages.run.progress import Progress
from mega_rl.stages.run.session import Session, open_session
from mega_rl.stages.sampling import rollout_metrics
from mega_rl.stages.sampling.sampling import sampling
from mega_rl.stages.sampling.validation import Validator
from mega_rl.stages.score.scoring import RewardWatch
from mega_rl.stages.weights.behaviour import behaviour_policy
from mega_rl.stages.weights.engine_probe import EngineProbe
from mega_rl.stages.weights.export import export_trained


def run(config: RunConfig) -> None:
    """Train as ``config`` says; every rank of the job calls it."""
    with open_session(config) as session:
        train(session)


def train(session: Session) -> None:
    config, timers, memory, say = session.config, session.timers, session.memory, session.say
    # What can refuse the configuration comes first, what takes long to build after it.
    prompts = building.prompt_stream(session)
    total_steps = building.total_steps(config, prompts.steps_per_epoch)
    noise = building.noise(session, total_steps)
    scorer = building.scorer(session)
    held_out = building.validation_prompts(session)
    actor = building.actor(session, building.policy_updates(config, total_steps))
    # Both take the actor for what model.path holds: it is resumed after them.
    reference = building.reference(session, actor)
    builder, sync = sampling(session, actor, noise, prompts, scorer, total_steps, held_out)
    layout = session.engine_layout
    validator = Validator(config, layout, timers, say, held_out, sync, builder, scorer, session.trajectory_store)
    probe = EngineProbe(builder.probed, layout, session.shape.vocab_size, config, say)
    learner = building.learner(session, actor, reference, total_steps)
    watch = RewardWatch(say)
    state = progress.resume(session.checkpoint, memory, actor, builder, say)
    gates = GateWatch(config, session.share.is_counted, say, state.step, state.metrics)
    validator.results |= state.validations

    with session.observer(state, total_steps) as observer, session.notice() as notice, closing(builder):
        if config.validation.val_before_train and state.step == 0:
            observer.log(0, validator.validate(observer, step=0) | timers.collect())
        for step in range(state.step, total_steps):
            with session.step(step + 1):
                with timers("sync"):
                    pushed = sync.push(version=step)
                probe.check(pushed)
                with timers("generate"):
                    batch = builder.build(step)
                    sync.end_sampling()
                    batch = builder.judged(batch)
                metrics = {**pushed.metrics, **batch.metrics}
                watch.check(batch.generated)
                samples = learning.with_advantages(batch.learnt, config.algorithm)
                rollout_metrics.show(
                    config.logging, session.output_dir, session.share, observer, actor, step + 1, batch, samples
                )
                behaviour = behaviour_policy(actor, noise, pushed)
                metrics |= learner.update(samples, gates.of_step(step, pushed.version, pushed.sigma), behaviour)
            metrics |= rollout_metrics.sample_metrics(samples)
            metrics |= rollout_metrics.schedule_metrics(config, noise, pushed, metrics)
            done = step + 1
            if progress.is_due(done, config.validation.test_freq, total_steps):
                metrics |= validator.validate(observer, step=done)
            metrics |= {"data/epoch": prompts.epochs, "rollout/weight_version": float(pushed.version)}
            reached = Progress(done, validator.results, metrics)
            freq = 1 if notice.is_given() else config.checkpoint.save_freq
            progress.save_if_due(session.checkpoints, freq, timers, actor, builder, reached, total_steps, memory)
            metrics |= session.device_metrics() | rollout_metrics.time_metrics(timers.collect(), samples)
            observer.log(done, metrics)
            session.stop_if_given(notice, done)

    export_trained(session, actor)
    validator.print_summary()
    session.say_where()
