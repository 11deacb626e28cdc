"""Supervised fine-tuning on conversations: what is read; the loop stands in ``parts/from_files.py``."""

from __future__ import annotations

from functools import partial

from mega_rl.config import RunConfig
from mega_rl.data.conversations import ConversationDataset
from mega_rl.data.stream import Stream
from mega_rl.parallel.collectives import together
from mega_rl.stages.parts import building, next_tokens
from mega_rl.stages.parts.from_files import loop
from mega_rl.stages.parts.session import Session, open_session
from mega_rl.types import Sequence


def run(config: RunConfig) -> None:
    """Train as ``config`` says; every rank of the job calls it."""
    with open_session(config) as session:
        train(session)


def train(session: Session) -> None:
    with together("reading the conversations"):
        stream, held_out = conversations(session)
    total_steps = building.total_steps(session.config, stream.steps_per_epoch)
    model = building.actor(session, total_steps)
    loop(
        session,
        model,
        stream,
        total_steps,
        update=partial(next_tokens.update, session, model, "sft"),
        validate=partial(next_tokens.validate, session, model, "sft", held_out) if held_out else None,
        num_tokens=lambda sequence: sequence.loss_mask.numel(),
    )


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
