"""Rows to items within a length limit: what is too long is left out and counted, or is an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

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


def fitting(
    rows: Iterable[Row],
    key: str,
    kind: str,
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    texts_of: Callable[[Row], Sequence[Any]],
    item_of: Callable[[Row], Item],
    num_tokens_of: Callable[[Item], int],
) -> tuple[list[Item], int]:
    """Items of the rows that fit, and how many did not.

    Args:
        key: the configuration field that lists the files, for messages.
        kind: what a row is, in the plural, for messages.
        texts_of: the texts of a row, all of one sequence, looked at before anything is tokenised.
        item_of: makes an item; its InputErrors name the row.
        num_tokens_of: of the longest sequence of an item.

    Raises:
        InputError: a row that cannot be used, one that is too long where such are not to be left out, or nothing left.
    """
    limit, items, num_dropped = max_tokens(data), [], 0
    for row in rows:
        refuse_columns(row, takes_tools=True)
        texts = texts_of(row)
        if is_surely_longer(tokenizer, texts, limit):
            problem = (
                f"{row.where} has {num_characters(*texts)} characters, which are more than {LIMIT}, {limit} tokens; "
                "shorten it or set data.filter_overlong_prompts"
            )
        else:
            item = item_of(row)
            if num_tokens_of(item) <= limit:
                items.append(item)
                continue
            problem = (
                f"{row.where} has {num_tokens_of(item)} tokens but {LIMIT} is {limit}; raise them or set "
                "data.filter_overlong_prompts"
            )
        if not data.filter_overlong_prompts:
            raise InputError(problem)
        num_dropped += 1
    if not items:
        raise InputError(f"{key}: all {num_dropped} {kind} are longer than {LIMIT} ({limit} tokens); raise them")
    return items, num_dropped
