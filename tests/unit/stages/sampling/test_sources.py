"""Which rewards the rows of a data source have, and what is said before the first step of rows without any."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mega_rl.config import RunConfig
from mega_rl.config.schema.learning import EnvironmentConfig
from mega_rl.config.schema.sampling import RewardConfig
from mega_rl.data.rows.rows import write_jsonl
from mega_rl.errors import InputError
from mega_rl.stages.sampling.prompts import prompt_stream, validation_prompts
from mega_rl.stages.score.scoring import check_sources
from mega_rl.synthetic.arithmetic import arithmetic_tokenizer
from mega_rl.types import Prompt

SUMS = {"prompt": "1+1=", "answer": "2", "data_source": "sums"}
FREE = {"prompt": "2+2=", "data_source": "free/talk"}


def job_of(tmp_path: Path, rewards: list[RewardConfig], train: list[Any], val: list[Any]) -> Any:
    config = RunConfig(rewards=rewards)
    config.data.train_batch_size = 1
    for name, rows in (("train_files", train), ("val_files", val)):
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
        setattr(config.data, name, [str(tmp_path / f"{name}.jsonl")])
    said: list[str] = []
    tokenizer: Any = arithmetic_tokenizer()
    return SimpleNamespace(config=config, tokenizer=tokenizer, plan=None, picture_set=None, say=said.append, said=said)


def prompts(*sources: str) -> list[Prompt]:
    return [Prompt(place, (1,), "", "", source) for place, source in enumerate(sources)]


def test_a_truth_is_needed_where_a_reward_of_the_source_compares_with_it(tmp_path: Path) -> None:
    rewards = [RewardConfig("exact_match", only=["sums"]), RewardConfig("repetition", only=["free/*"])]
    job = job_of(tmp_path, rewards, [SUMS, FREE], [FREE])
    held_out = validation_prompts(job, stream := prompt_stream(job))
    assert sorted(stream.dataset[place].data_source for place in range(2)) == ["free/talk", "sums"]
    assert held_out is not None and len(held_out) == 1
    assert job.said == []
    lacking = job_of(tmp_path, rewards, [SUMS, {"prompt": "3+3=", "data_source": "sums"}], [FREE])
    with pytest.raises(InputError, match="train_files.jsonl line 2 .*as a reward compares with it"):
        prompt_stream(lacking)


@pytest.mark.parametrize("key", ["data.train_files", "data.val_files"])
def test_a_source_that_no_reward_scores_is_refused_before_the_first_step(tmp_path: Path, key: str) -> None:
    rows = [[SUMS, FREE], [SUMS]] if key == "data.train_files" else [[SUMS], [SUMS, FREE]]
    job = job_of(tmp_path, [RewardConfig("exact_match", only=["sums"])], *rows)
    expected = rf"{key} has rows of the data source 'free/talk', which no entry of rewards scores.*only: \[free/talk\]"
    with pytest.raises(InputError, match=expected):
        validation_prompts(job, prompt_stream(job))


def test_an_environment_may_reward_the_rows_that_no_reward_is_for() -> None:
    config = RunConfig(rewards=[RewardConfig("exact_match", only=["sums"])])
    check_sources(replace(config, environment=EnvironmentConfig(name="tools")), prompts("sums", "games"), "data")
    with pytest.raises(InputError, match="'games'"):
        check_sources(config, prompts("sums", "games"), "data")


def test_patterns_that_give_one_source_a_name_twice_are_refused() -> None:
    config = RunConfig(rewards=[RewardConfig("gsm8k", only=["a*"]), RewardConfig("gsm8k", 2.0, only=["*b"])])
    check_sources(config, prompts("a", "b", "aa"), "data")
    with pytest.raises(InputError, match="rewards has gsm8k twice for the data source 'ab'"):
        check_sources(config, prompts("a", "ab"), "data")


def test_a_reward_that_no_row_is_for_is_told(tmp_path: Path) -> None:
    rewards = [RewardConfig("exact_match"), RewardConfig("repetition", only=["sum"])]
    job = job_of(tmp_path, rewards, [SUMS], [SUMS])
    validation_prompts(job, prompt_stream(job))
    (line,) = job.said
    assert "rewards[1].only is ['sum']" in line and "the data sources are sums" in line
