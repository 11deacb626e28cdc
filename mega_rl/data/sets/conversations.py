"""Conversations for supervised training: alpaca and ShareGPT rows become ``messages``."""

from __future__ import annotations

from mega_rl.data.rows.columns import prompt_of
from mega_rl.data.rows.rows import Row
from mega_rl.data.sets.counting import Dropped, Record, fold
from mega_rl.data.sets.turns import EMPTY, answer_of, check_order, system_first, text_of, turns_of
from mega_rl.data.tokens.tokenizer import Message


def alpaca(row: Row) -> Record:
    """``instruction``, ``input`` and ``output``, with ``system`` and ``history`` (earlier turns) where they are."""
    if not isinstance(row.get("instruction"), str) or not isinstance(row.get("output"), str):
        raise row.missing("`instruction` and `output`, text")
    if not str(row.get("output")).strip():
        raise Dropped(EMPTY)
    return _record([*turns_of(prompt_of(row)), *answer_of(row.get("output"))])


def sharegpt(row: Row) -> Record:
    """``conversations`` with ``from`` and ``value``, or ``messages`` with ``role`` and ``content``."""
    conversation = row.get("conversations") if row.get("messages") is None else row.get("messages")
    if conversation is None:
        raise row.missing("`conversations` or `messages`")
    return _record(system_first(row, turns_of(conversation)))


def _record(messages: list[Message]) -> Record:
    check_order(messages, last="assistant")
    first = next(message["content"] for message in messages if message["role"] == "user")
    return Record({"messages": messages}, fold(first), content=text_of(messages))
