"""Continued pre-training on plain text: what is read; how it is learnt stands in ``offline/next_tokens.py``."""

from __future__ import annotations

from mega_rl.config import RunConfig
from mega_rl.data.texts import TextDataset
from mega_rl.stages.offline import next_tokens
from mega_rl.stages.offline.loop import read
from mega_rl.stages.run.opening import open_job


def run(config: RunConfig) -> None:
    """Train as ``config`` says; every rank of the job calls it."""
    with open_job(config) as job:
        dataset, held_out = read(job, TextDataset)
        empty = f", {dataset.num_empty} empty ones left out" if dataset.num_empty else ""
        job.say(f"data: {dataset.num_documents} documents in {len(dataset)} sequences{empty}")
        next_tokens.train(job, "pt", dataset, [] if held_out is None else held_out.sequences)
