"""Preferences: pairs of a better and a worse response (DPO, reward models), and single ones with a label (KTO)."""

from __future__ import annotations

from typing import Any

from mega_rl.data.rows.columns import prompt_of
from mega_rl.data.rows.rows import Row
from mega_rl.data.sets.counting import Dropped, Record, fold
from mega_rl.data.sets.turns import (
    EMPTY,
    answer_of,
    check_order,
    is_transcript,
    system_first,
    text_of,
    transcript_turns,
    turns_of,
)
from mega_rl.data.tokens.tokenizer import Message

EQUAL = "equal pair: chosen and rejected are the same"
LABELS = ("label", "kto_tag")


def pair(row: Row) -> Record:
    """``chosen`` and ``rejected``, with the prompt before them or in both.

    The prompt is a column (``prompt``, ``question``, ``instruction``, ``conversations`` or ``messages``), or what the
    two have in common at their beginning: messages, the turns of a transcript (HH-RLHF), or else whole words of text.
    ``margin``, by how much the better one should score higher, is kept where a row has it.
    """
    if row.get("chosen") is None or row.get("rejected") is None:
        raise row.missing("`chosen` and `rejected`")
    asked = prompt_column(row)
    chosen, rejected = (_response(row.get(name), asked is None) for name in ("chosen", "rejected"))
    if chosen == rejected:
        raise Dropped(EQUAL)
    if chosen[0]["role"] == "assistant" == rejected[0]["role"]:
        asked = _common_words(chosen, rejected) if asked is None else asked
    else:  # both begin with the prompt, which a column may repeat
        asked = _common_turns(chosen, rejected)
    asked = system_first(row, asked)
    check_order(asked, last="user")
    if len(chosen) != 1 or len(rejected) != 1 or {chosen[0]["role"], rejected[0]["role"]} != {"assistant"}:
        raise Dropped("the responses are not one message of the assistant each")
    fields: dict[str, Any] = {"prompt": asked, "chosen": chosen, "rejected": rejected}
    if row.get("margin") is not None:
        fields["margin"] = row.get("margin")  # stage rm, which learns from it, refuses what is no number
    # A pair that stands the other way round elsewhere has the same content, and another truth.
    better, worse = text_of(chosen), text_of(rejected)
    return Record(fields, fold(text_of(asked)), content="\n\n".join(sorted([better, worse])), truth=better)


def kto(row: Row) -> Record:
    """``prompt``, ``completion`` and ``label``, or a conversation that ends with the response and ``label``."""
    label = next((row.get(name) for name in LABELS if row.get(name) is not None), None)
    if label not in (True, False):
        if label is None:
            raise Dropped("without label")
        raise row.missing("`label`, true for a good response and false for a bad one")
    completion, asked = row.get("completion"), prompt_column(row)
    conversation = row.get("prompt") is None and (row.get("conversations") or row.get("messages"))
    if completion is None and "completion" in row.fields and not conversation:
        raise Dropped(EMPTY)
    if asked is None:
        raise row.missing("`prompt` and `completion`, or `messages` that end with the response")
    if completion is None and row.get("prompt") is None:
        asked, response = asked[:-1], asked[-1:]
    elif completion is None:
        raise row.missing("`completion`")
    else:
        response = answer_of(completion)
    asked = system_first(row, asked)
    check_order([*asked, *response], last="assistant")
    fields = {"prompt": asked, "completion": response, "label": bool(label)}
    return Record(fields, fold(text_of(asked)), content=text_of(response), truth=str(bool(label)))


def prompt_column(row: Row) -> list[Message] | None:
    """The conversation before the responses, as far as a column of its own holds it."""
    for name in ("prompt", "conversations", "messages"):
        value = row.get(name)
        if isinstance(value, str) and is_transcript(value):
            return transcript_turns(value.rstrip().removesuffix("\n\nAssistant:"))
        if value is not None:
            return turns_of(value)
    asked = prompt_of(row)
    return None if asked is None else turns_of(asked)


def _response(value: Any, may_be_transcript: bool) -> list[Message]:
    if isinstance(value, str) and may_be_transcript and is_transcript(value):
        return transcript_turns(value)
    return answer_of(value)


def _common_turns(chosen: list[Message], rejected: list[Message]) -> list[Message]:
    """Takes the messages with which both begin off them, in place."""
    common = 0
    while common < min(len(chosen), len(rejected)) and chosen[common] == rejected[common]:
        common += 1
    asked = chosen[:common]
    if common in (len(chosen), len(rejected)) or not common:
        raise Dropped("chosen and rejected do not answer the same prompt")
    del chosen[:common], rejected[:common]
    return asked


def _common_words(chosen: list[Message], rejected: list[Message]) -> list[Message]:
    """Takes the words with which both texts begin off them, in place."""
    texts = [chosen[0]["content"], rejected[0]["content"]]
    length = 0
    while length < min(map(len, texts)) and texts[0][length] == texts[1][length]:
        length += 1
    while length and not texts[0][length - 1].isspace():
        length -= 1
    asked = texts[0][:length].strip()
    rest = [text[length:].strip() for text in texts]
    if not asked or not all(rest):
        raise Dropped("without prompt")
    for message, text in zip((chosen[0], rejected[0]), rest, strict=True):
        message["content"] = text
    return [{"role": "user", "content": asked}]
