"""Supervised fine-tuning on conversations: what is read; how it is learnt stands in ``offline/next_tokens.py``."""

from __future__ import annotations

from functools import partial
from typing import Any

from mega_rl.config import RunConfig
from mega_rl.data.conversations import ConversationDataset
from mega_rl.data.pictures.image_processor import picture_reader
from mega_rl.stages.offline import next_tokens
from mega_rl.stages.offline.loop import read
from mega_rl.stages.run.job import Job
from mega_rl.stages.run.opening import open_job


def run(config: RunConfig) -> None:
    """Train as ``config`` says; every rank of the job calls it."""
    with open_job(config) as job:
        dataset, held_out = read(job, ConversationDataset, partial(_pictures, job))
        if dataset.num_dropped:
            job.say(f"data: {dataset.num_dropped} conversations longer than the length limits left out")
        if len(dataset) > dataset.num_conversations:
            job.say(f"data: {dataset.num_conversations} conversations became {len(dataset)} rows (split)")
        next_tokens.train(job, "sft", dataset, [] if held_out is None else held_out.sequences)


def _pictures(job: Job) -> dict[str, Any]:
    """What reads the pictures of the rows, if the model sees any."""
    config, tower = job.config, job.shape.tower
    if tower is None:
        return {}
    return {"pictures": picture_reader(config.model.path, tower, job.tokenizer, config.data)}
