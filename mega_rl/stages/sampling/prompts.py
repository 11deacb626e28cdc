"""The prompts of a run: those that every step draws, and those that are held out."""

from __future__ import annotations

from mega_rl.data.prompts import PromptDataset, PromptStream
from mega_rl.data.rows.rows import DataFiles
from mega_rl.data.stream import Stream
from mega_rl.parallel.collectives import together
from mega_rl.stages.run.sampling_job import SamplingJob
from mega_rl.stages.score.scoring import rows_need_truth


def prompt_stream(job: SamplingJob) -> PromptStream:
    data = job.config.data
    dataset = PromptDataset.from_files(
        DataFiles(data.train_files),
        job.tokenizer,
        data,
        needs_truth=rows_need_truth(job.config),
        tools=() if job.plan is None else job.plan.tools,
        picture_set=job.picture_set,
    )
    if job.picture_set is not None:
        job.picture_set.learn_from(dataset.prompts)
    if dataset.num_dropped:
        job.say(f"data: {dataset.num_dropped} prompts longer than {data.max_prompt_length} tokens left out")
    with together("making batches of the prompts"):
        return Stream(dataset, data.train_batch_size, data.shuffle, data.seed)


def validation_prompts(job: SamplingJob) -> PromptDataset | None:
    data = job.config.data
    if not data.val_files or job.config.rollout.replay is not None:
        return None
    return PromptDataset.from_files(
        DataFiles.validation(data),
        job.tokenizer,
        data,
        needs_truth=rows_need_truth(job.config),
        tools=() if job.plan is None else job.plan.tools,
        picture_set=job.picture_set,
    )
