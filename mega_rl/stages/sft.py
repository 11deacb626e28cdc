"""Supervised fine-tuning: batch, learn, validate, save, in the order in which it is written here."""

from __future__ import annotations

from functools import partial

from mega_rl.algorithms.objective import SftObjective
from mega_rl.config import RunConfig
from mega_rl.data.conversations import ConversationDataset
from mega_rl.data.stream import Stream
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.observe.heartbeat import HEART
from mega_rl.parallel.collectives import together
from mega_rl.stages.parts import building, progress
from mega_rl.stages.parts.batches import denominators_of, memory_metrics, pack_for_rank, totals_of
from mega_rl.stages.parts.export import export_huggingface
from mega_rl.stages.parts.progress import Progress, warn_if_skipped
from mega_rl.stages.parts.session import Session, open_session
from mega_rl.types import Figures, Sequence


def run(config: RunConfig) -> None:
    """Train as ``config`` says; every rank of the job calls it."""
    with open_session(config) as session:
        train(session)


def train(session: Session) -> None:
    config, timers, save_freq = session.config, session.timers, session.config.checkpoint.save_freq
    with together("reading the conversations"):
        stream, held_out = conversations(session)
    total_steps = building.total_steps(config, stream.steps_per_epoch)
    model = building.actor(session, total_steps)
    state = progress.resume(session.checkpoint, session.memory, model, stream, session.say)

    with session.observer(state, total_steps) as observer, session.notice() as notice:
        for step in range(state.step, total_steps):
            HEART.step = done = step + 1
            with timers("step"):
                batch = stream.next_batch()
                with timers("update"):
                    metrics = update(session, model, batch, is_read=weights_are_read(config, done, total_steps))
            if held_out and progress.is_due(done, config.validation.test_freq, total_steps):
                with timers("validate"):
                    metrics["sft/val_loss"] = held_out_loss(session, model, held_out)
            metrics["data/epoch"] = stream.epochs
            reached = Progress(done, metrics=metrics)
            freq = 1 if notice.is_given() else save_freq
            progress.save_if_due(session.checkpoints, freq, timers, model, stream, reached, total_steps, session.memory)
            seconds = timers.collect()
            num_tokens = sum(sequence.loss_mask.numel() for sequence in batch)
            metrics |= seconds | memory_metrics(timers)
            observer.log(done, metrics | {"throughput/tokens_per_s": num_tokens / max(seconds["time/step_s"], 1e-9)})
            session.stop_if_given(notice, done)

    if config.checkpoint.export_hf:
        with HEART.during("export"):
            export_huggingface(model, session.export_dir, config.model.path, config.bridge.bucket_bytes)
    session.say_where()


def conversations(session: Session) -> tuple[Stream[Sequence], list[Sequence]]:
    """The training stream and the held-out sequences."""
    data, tokenizer = session.config.data, session.tokenizer
    dataset = ConversationDataset.from_files(data.train_files, tokenizer, data)
    if dataset.num_dropped:
        session.say(f"data: {dataset.num_dropped} conversations longer than the length limits left out")
    held_out: list[Sequence] = []
    if data.val_files:
        held_out = ConversationDataset.from_files(
            data.val_files, tokenizer, data, key="data.val_files", max_samples=data.max_val_samples
        ).sequences
    return Stream(dataset, data.train_batch_size, data.shuffle, data.seed), held_out


def weights_are_read(config: RunConfig, done: int, total_steps: int) -> bool:
    """Whether something other than the next step reads the weights that step ``done`` leaves."""
    return any(
        progress.is_due(done, freq, total_steps) for freq in (config.validation.test_freq, config.checkpoint.save_freq)
    )


def update(session: Session, model: MegatronEngine, batch: list[Sequence], is_read: bool) -> dict[str, float]:
    """One optimizer step; returns its metrics. ``is_read``: more than the next step reads the weights. Collective."""
    denominators = denominators_of(batch, session.config.data.max_response_length)
    reports = model.forward_backward(
        pack_for_rank(session.share, batch), partial(SftObjective(), denominators=denominators)
    )
    step = model.optimizer_step(next_is_forward_backward=not is_read)
    warn_if_skipped(session.say, model, step)
    return {
        "sft/loss": totals_of(session.share, reports).sums["loss"],
        "sft/tokens": float(denominators.num_tokens),
        "sft/grad_norm": step.grad_norm,
        "sft/lr": step.lr,
        "sft/skipped_steps_total": float(model.stepper.skipped.total),
    }


def held_out_loss(session: Session, model: MegatronEngine, sequences: list[Sequence]) -> float:
    """Mean negative log-likelihood per learnt token, in nats. Collective."""
    microbatches = pack_for_rank(session.share, sequences)
    stats = model.token_stats(microbatches)
    reports = [
        Figures({"nll": -(s.logprobs * m.loss_mask).sum(), "tokens": m.loss_mask.sum()})
        for s, m in zip(stats, microbatches, strict=True)
    ]
    if not session.share.is_last_stage:  # every pipeline stage was given the statistics; count them once
        reports = []
    sums = totals_of(session.share, reports).sums
    return sums["nll"] / sums["tokens"]
