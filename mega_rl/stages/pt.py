"""Continued pre-training on plain text: what is read; the loop stands in ``parts/from_files.py``."""

from __future__ import annotations

from functools import partial

from mega_rl.config import RunConfig
from mega_rl.data.stream import Stream
from mega_rl.data.texts import TextDataset
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
    with together("reading the texts"):
        stream, held_out = texts(session)
    total_steps = building.total_steps(session.config, stream.steps_per_epoch)
    model = building.actor(session, total_steps)
    loop(
        session,
        model,
        stream,
        total_steps,
        update=partial(next_tokens.update, session, model, "pt"),
        validate=partial(next_tokens.validate, session, model, "pt", held_out) if held_out else None,
        num_tokens=lambda sequence: sequence.loss_mask.numel(),
    )


def texts(session: Session) -> tuple[Stream[Sequence], list[Sequence]]:
    """The training stream and the held-out sequences: documents, or parts of them."""
    data, tokenizer = session.config.data, session.tokenizer
    dataset = TextDataset.from_files(data.train_files, tokenizer, data)
    empty = f", {dataset.num_empty} empty ones left out" if dataset.num_empty else ""
    session.say(f"data: {dataset.num_documents} documents in {len(dataset)} sequences{empty}")
    held_out: list[Sequence] = []
    if data.val_files:
        held_out = TextDataset.from_files(
            data.val_files, tokenizer, data, key="data.val_files", max_samples=data.max_val_samples
        ).sequences
    return Stream(dataset, data.train_batch_size, data.shuffle, data.seed), held_out
