"""The prompts of a run: those that every step draws, and those that are held out."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from mega_rl.config.schema.sources import claims
from mega_rl.data.prompts import PromptDataset, PromptStream
from mega_rl.data.rows.rows import DataFiles
from mega_rl.data.stream import Stream
from mega_rl.errors import shortened, shown
from mega_rl.parallel.collectives import together
from mega_rl.stages.run.sampling_job import SamplingJob
from mega_rl.stages.score.scoring import check_sources, truth_is_needed
from mega_rl.types import Prompt


def _prompts(job: SamplingJob, files: DataFiles) -> PromptDataset:
    found = PromptDataset.from_files(
        files,
        job.tokenizer,
        job.config.data,
        needs_truth=partial(truth_is_needed, job.config),
        tools=() if job.plan is None else job.plan.tools,
        picture_set=job.picture_set,
    )
    check_sources(job.config, found.prompts, files.key)
    return found


def prompt_stream(job: SamplingJob) -> PromptStream:
    data = job.config.data
    dataset = _prompts(job, DataFiles(data.train_files))
    if job.picture_set is not None:
        job.picture_set.learn_from(dataset.prompts)
    if dataset.num_dropped:
        job.say(f"data: {dataset.num_dropped} prompts longer than {data.max_prompt_length} tokens left out")
    with together("making batches of the prompts"):
        return Stream(dataset, data.train_batch_size, data.shuffle, data.seed)


def validation_prompts(job: SamplingJob, trained: PromptStream) -> PromptDataset | None:
    """With a warning for each reward that scores no row, neither of these nor of those that are trained on."""
    data, found = job.config.data, None
    if data.val_files and job.config.rollout.replay is None:
        found = _prompts(job, DataFiles.validation(data))
    prompts = [trained.dataset[place] for place in range(len(trained.dataset))]
    _tell_of_idle_rewards(job, [*prompts, *([] if found is None else found.prompts)])
    return found


def _tell_of_idle_rewards(job: SamplingJob, prompts: Iterable[Prompt]) -> None:
    sources = sorted({prompt.data_source for prompt in prompts})
    for index, reward in enumerate(job.config.rewards):
        if not any(claims(reward.only, source) for source in sources):
            job.say(
                f"warning: rewards[{index}].only is {shown(reward.only)}, and no row is of that: the data sources are "
                f"{shortened(', '.join(sources))}"
            )
