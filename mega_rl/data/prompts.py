"""Prompts to sample from: rows of data files, rendered and tokenised once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from mega_rl.config.schema.sections import DataConfig
from mega_rl.data.pictures.picture_set import PictureSet, with_pictures
from mega_rl.data.pictures.pictures import FilePicture
from mega_rl.data.rows.columns import prompt_of, refuse_columns, truth_of
from mega_rl.data.rows.rows import DataFiles, Row
from mega_rl.data.stream import Stream, fingerprint
from mega_rl.data.tokens.template import Tools
from mega_rl.data.tokens.tokenizer import is_surely_longer, num_characters, render_prompt
from mega_rl.errors import InputError, shown
from mega_rl.parallel.collectives import gather_objects, together, work_shared
from mega_rl.types import Prompt, PromptImage

WANTED = "`prompt`, `question`, `instruction` or `messages`"
WANTED_TRUTH = "`reward_model.ground_truth`, `answer` or `solution`, as a reward compares with it"

PromptStream = Stream[Prompt]


class PromptDataset:
    """Prompts in the order of their files.

    Example of a row: ``{"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "..."}],
    "ability": "math", "reward_model": {"style": "rule", "ground_truth": "72"}, "extra_info": {"index": 0}}``,
    or plainly ``{"prompt": "3+4=", "answer": "7"}``, whose data source is the name of its file.
    """

    def __init__(self, prompts: list[Prompt], num_dropped: int = 0, picture_set: PictureSet | None = None) -> None:
        self.prompts = prompts
        self.picture_set = picture_set  # has the pictures of the prompts; None: the model sees none
        self.num_dropped = num_dropped  # prompts longer than data.max_prompt_length
        seen = [image.key.encode() for prompt in prompts for image in prompt.images]
        texts = [repr((p.index, p.token_ids, p.ground_truth)).encode() for p in prompts]
        self.fingerprint = fingerprint([*texts, *seen])

    @classmethod
    def from_files(
        cls,
        files: DataFiles,
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        *,
        needs_truth: Callable[[str], bool] = lambda source: True,
        tools: Tools = (),
        picture_set: PictureSet | None = None,
    ) -> PromptDataset:
        """Reads, renders and filters. Collective: every rank reads all rows, and tokenises and looks at an even share.

        Args:
            needs_truth: of a data source, whether a reward compares with the ground truth of its rows, so that one
                without is an error.
            tools: that every prompt offers, as JSON schemas.
            picture_set: takes the pictures of the prompts; None: the model sees none.

        Raises:
            InputError: on every rank, for unreadable files, files that differ between ranks, rows without the needed
                fields, pictures that cannot be used, overlong prompts if they are not filtered, or nothing left.
        """
        with together(f"reading {files.key}"):
            rows = files.rows()
        counts = gather_objects(len(rows))
        if len(set(counts)) > 1:
            other = next(rank for rank, count in enumerate(counts) if count != counts[0])
            raise InputError(
                f"{files.key} has {counts[0]} rows on rank 0 and {counts[other]} on rank {other}: give every node the "
                "same files"
            )
        seen = [(row, []) for row in rows] if picture_set is None else picture_set.reader.take(rows, files.key)
        rendering = _Rendering(tokenizer, data, needs_truth, tools, picture_set)
        found = work_shared(range(len(rows)), lambda index: rendering.fitting_prompt(index, *seen[index]))
        prompts = [prompt for prompt in found if prompt is not None]
        if picture_set is not None:
            picture_set.add({p.key: p for prompt in prompts for p in seen[prompt.index][1]})
        if not prompts:
            raise InputError(
                f"{files.key}: all {len(found)} prompts are longer than data.max_prompt_length "
                f"({data.max_prompt_length} tokens); raise it"
            )
        return cls(prompts, len(found) - len(prompts), picture_set)

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, position: int) -> Prompt:
        return self.prompts[position]


@dataclass(frozen=True)
class _Rendering:
    """How rows become prompts; the arguments of ``PromptDataset.from_files``."""

    tokenizer: PreTrainedTokenizerBase
    data: DataConfig
    needs_truth: Callable[[str], bool]
    tools: Tools
    picture_set: PictureSet | None

    def fitting_prompt(self, index: int, row: Row, pictures: list[FilePicture]) -> Prompt | None:
        """The prompt of a row; None if it is overlong and such are to be left out."""
        limit, where = self.data.max_prompt_length, row.where
        refuse_columns(row)
        content = prompt_of(row)
        if is_surely_longer(self.tokenizer, [content], limit):
            length = num_characters(content)
            problem = (
                f"{where} has a prompt of {length} characters, which are more than data.max_prompt_length {limit} "
                "tokens; shorten it or set data.filter_overlong_prompts"
            )
        else:
            prompt = self._prompt(index, row, pictures)
            if len(prompt.token_ids) <= limit:
                return prompt
            problem = (
                f"{where} has a prompt of {len(prompt.token_ids)} tokens but data.max_prompt_length is {limit}; "
                "raise it or set data.filter_overlong_prompts"
            )
        if not self.data.filter_overlong_prompts:
            raise InputError(problem)
        return None

    def _prompt(self, index: int, row: Row, pictures: list[FilePicture]) -> Prompt:
        content, truth = prompt_of(row), truth_of(row)
        if content is None:
            raise row.missing(WANTED)
        source = str(row.get("data_source") or row.file.stem)
        if truth is None and self.needs_truth(source):
            raise row.missing(WANTED_TRUTH)
        extra_info = row.get("extra_info") or {}
        if not isinstance(extra_info, Mapping):
            raise InputError(f"{row.where}: extra_info is {shown(extra_info)}; make it an object or leave it out")
        try:
            text, token_ids = render_prompt(
                self.tokenizer, content, self.data.chat_template, self.data.system_prompt, self.tools
            )
            images: tuple[PromptImage, ...] = ()
            if self.picture_set is not None:
                token_ids, images = with_pictures(token_ids, pictures, self.picture_set.reader.token)
        except InputError as error:
            raise InputError(f"{row.where}: {error}") from error
        return Prompt(
            index=index,
            token_ids=tuple(token_ids),
            text=text,
            ground_truth="" if truth is None else truth if isinstance(truth, str) else json.dumps(truth, default=str),
            data_source=source,
            extra_info=extra_info,
            images=images,
        )
