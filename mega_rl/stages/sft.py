"""Supervised fine-tuning on conversations: what is read; how it is learnt stands in ``parts/next_tokens.py``."""

from __future__ import annotations

from mega_rl.config import RunConfig
from mega_rl.data.conversations import ConversationDataset
from mega_rl.stages.parts import next_tokens
from mega_rl.stages.parts.from_files import read
from mega_rl.stages.parts.session import open_session


def run(config: RunConfig) -> None:
    """Train as ``config`` says; every rank of the job calls it."""
    with open_session(config) as session:
        dataset, held_out = read(session, ConversationDataset)
        if dataset.num_dropped:
            session.say(f"data: {dataset.num_dropped} conversations longer than the length limits left out")
        if len(dataset) > dataset.num_conversations:
            session.say(f"data: {dataset.num_conversations} conversations became {len(dataset)} rows (split)")
        next_tokens.train(session, "sft", dataset, [] if held_out is None else held_out.sequences)
