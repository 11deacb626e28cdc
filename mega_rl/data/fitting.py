"""Rows to items within a length limit: what is too long is left out and counted, or is an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from transformers import PreTrainedTokenizerBase

from mega_rl.config.schema.sections import DataConfig
from mega_rl.data.rows.columns import refuse_columns
from mega_rl.data.rows.rows import Row
from mega_rl.data.tokens.tokenizer import is_surely_longer, num_characters
from mega_rl.errors import InputError

Item = TypeVar("Item")
LIMIT = "data.max_prompt_length + data.max_response_length"


def max_tokens(data: DataConfig) -> int:
    """Tokens that one training sequence may have, prompt and response together."""
    return data.max_prompt_length + data.max_response_length


@dataclass(frozen=True)
class RowKind(Generic[Item]):
    """What the rows of a data set are, and how one becomes an item."""

    plural: str  # for messages
    texts_of: Callable[[Row], Sequence[Any]]  # all of one sequence, looked at before anything is tokenised
    item_of: Callable[[Row, PreTrainedTokenizerBase, DataConfig], Item]  # its InputErrors name the row
    num_tokens_of: Callable[[Item], int]  # of the longest sequence of an item


def fitting(
    rows: Iterable[Row], kind: RowKind[Item], tokenizer: PreTrainedTokenizerBase, data: DataConfig, key: str
) -> tuple[list[Item], int]:
    """Items of the rows that fit, and how many did not.

    Args:
        key: the configuration field that lists the files, for messages.

    Raises:
        InputError: a row that cannot be used, one that is too long where such are not to be left out, or nothing left.
    """
    limit, items, num_dropped = max_tokens(data), [], 0
    for row in rows:
        refuse_columns(row, takes_tools=True)
        texts = kind.texts_of(row)
        if is_surely_longer(tokenizer, texts, limit):
            problem = (
                f"{row.where} has {num_characters(*texts)} characters, which are more than {LIMIT}, {limit} tokens; "
                "shorten it or set data.filter_overlong_prompts"
            )
        else:
            item = kind.item_of(row, tokenizer, data)
            num_tokens = kind.num_tokens_of(item)
            if num_tokens <= limit:
                items.append(item)
                continue
            problem = (
                f"{row.where} has {num_tokens} tokens but {LIMIT} is {limit}; raise them or set "
                "data.filter_overlong_prompts"
            )
        if not data.filter_overlong_prompts:
            raise InputError(problem)
        num_dropped += 1
    if not items:
        raise InputError(f"{key}: all {num_dropped} {kind.plural} are longer than {LIMIT} ({limit} tokens); raise them")
    return items, num_dropped
