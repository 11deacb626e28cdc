"""Prompts to sample from: rows of data files, rendered and tokenised once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from mega_rl.config.schema import DataConfig
from mega_rl.data.rows import Row, read_rows
from mega_rl.data.stream import Stream, fingerprint
from mega_rl.data.tokenizer import is_surely_longer, num_characters, render_prompt
from mega_rl.errors import InputError, shown
from mega_rl.parallel.collectives import gather_objects, together, work_shared
from mega_rl.types import Prompt

WANTED = "`prompt` with `reward_model.ground_truth` or `answer`"

PromptStream = Stream[Prompt]


class PromptDataset:
    """Prompts in the order of their files.

    Example of a row: ``{"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "..."}],
    "ability": "math", "reward_model": {"style": "rule", "ground_truth": "72"}, "extra_info": {"index": 0}}``,
    or plainly ``{"prompt": "3+4=", "answer": "7"}``, whose data source is the name of its file.
    """

    def __init__(self, prompts: list[Prompt], num_dropped: int = 0) -> None:
        self.prompts = prompts
        self.num_dropped = num_dropped  # prompts longer than data.max_prompt_length
        self.fingerprint = fingerprint([repr((p.index, p.token_ids, p.ground_truth)).encode() for p in prompts])

    @classmethod
    def from_files(
        cls,
        files: list[str],
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        *,
        key: str = "data.train_files",
        max_samples: int | None = None,
    ) -> PromptDataset:
        """Reads, renders and filters. Collective: every rank reads all rows and tokenises an even share of them.

        Args:
            key: the configuration field that lists ``files``, for messages.
            max_samples: take the first rows only, before filtering; ``data.max_val_samples`` for validation.

        Raises:
            InputError: on every rank, for unreadable files, files that differ between ranks, rows without the needed
                fields, overlong prompts if they are not filtered, or nothing left.
        """
        with together(f"reading {key}"):
            rows = read_rows(files, key)[:max_samples]
        counts = gather_objects(len(rows))
        if len(set(counts)) > 1:
            other = next(rank for rank, count in enumerate(counts) if count != counts[0])
            raise InputError(
                f"{key} has {counts[0]} rows on rank 0 and {counts[other]} on rank {other}: give every node the same "
                "files"
            )
        found = work_shared(range(len(rows)), lambda index: _fitting_prompt(index, rows[index], tokenizer, data))
        prompts = [prompt for prompt in found if prompt is not None]
        if not prompts:
            raise InputError(
                f"{key}: all {len(found)} prompts are longer than data.max_prompt_length "
                f"({data.max_prompt_length} tokens); raise it"
            )
        return cls(prompts, num_dropped=len(found) - len(prompts))

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, position: int) -> Prompt:
        return self.prompts[position]


def _fitting_prompt(index: int, row: Row, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> Prompt | None:
    """The prompt of a row; None if it is overlong and such are to be left out."""
    limit, where = data.max_prompt_length, row.where
    if is_surely_longer(tokenizer, [row.get("prompt")], limit):
        length = num_characters(row.get("prompt"))
        problem = (
            f"{where} has a prompt of {length} characters, which are more than data.max_prompt_length {limit} tokens; "
            "shorten it or set data.filter_overlong_prompts"
        )
    else:
        prompt = _prompt(index, row, tokenizer, data)
        if len(prompt.token_ids) <= limit:
            return prompt
        problem = (
            f"{where} has a prompt of {len(prompt.token_ids)} tokens but data.max_prompt_length is {limit}; raise it "
            "or set data.filter_overlong_prompts"
        )
    if not data.filter_overlong_prompts:
        raise InputError(problem)
    return None


def _prompt(index: int, row: Row, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> Prompt:
    truth = _ground_truth(row)
    if row.get("prompt") is None or truth is None:
        raise row.missing(WANTED)
    extra_info = row.get("extra_info") or {}
    if not isinstance(extra_info, Mapping):
        raise InputError(f"{row.where}: extra_info is {shown(extra_info)}; make it an object or leave it out")
    try:
        text, token_ids = render_prompt(tokenizer, row.get("prompt"), data.chat_template, data.system_prompt)
    except InputError as error:
        raise InputError(f"{row.where}: {error}") from error
    return Prompt(
        index=index,
        token_ids=tuple(token_ids),
        text=text,
        ground_truth=truth if isinstance(truth, str) else json.dumps(truth, default=str),
        data_source=str(row.get("data_source") or row.file.stem),
        extra_info=extra_info,
    )


def _ground_truth(row: Row) -> Any:
    reward_model = row.get("reward_model")
    if reward_model is None:
        return row.get("answer")
    if not isinstance(reward_model, Mapping):
        raise InputError(f"{row.where}: reward_model is {shown(reward_model)}; make it an object with ground_truth")
    return reward_model.get("ground_truth")
