"""Supervised fine-tuning on conversations: what is read; how it is learnt stands in ``offline/next_tokens.py``."""

from __future__ import annotations

from functools import partial
from typing import Any

from mega_rl.config import RunConfig
from mega_rl.data.conversations import ConversationDataset
from mega_rl.data.pictures.image_processor import picture_reader
from mega_rl.stages.offline import next_tokens
from mega_rl.stages.offline.loop import read
from mega_rl.stages.run.session import Session, open_session


def run(config: RunConfig) -> None:
    """Train as ``config`` says; every rank of the job calls it."""
    with open_session(config) as session:
        dataset, held_out = read(session, ConversationDataset, partial(_pictures, session))
        if dataset.num_dropped:
            session.say(f"data: {dataset.num_dropped} conversations longer than the length limits left out")
        if len(dataset) > dataset.num_conversations:
            session.say(f"data: {dataset.num_conversations} conversations became {len(dataset)} rows (split)")
        next_tokens.train(session, "sft", dataset, [] if held_out is None else held_out.sequences)


def _pictures(session: Session) -> dict[str, Any]:
    """What reads the pictures of the rows, if the model sees any."""
    config, tower = session.config, session.shape.tower
    if tower is None:
        return {}
    return {"pictures": picture_reader(config.model.path, tower, session.tokenizer, config.data)}
