"""Conversations in the forms in which they are published, as messages with ``role`` and ``content``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mega_rl.data.rows.columns import ROLES
from mega_rl.data.rows.rows import Row
from mega_rl.data.sets.counting import LEFT_OUT, NOTHING, Dropped
from mega_rl.data.tokens.tokenizer import Message

EMPTY = "empty"
TOOL_ROLES = ("tool", "function", "function_call", "observation")
MORE_ROLES = {"chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
# How the transcripts of Anthropic's HH-RLHF begin a turn.
_HH_TURN = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")


def turns_of(value: Any) -> list[Message]:
    """Messages of a text (one message of the user), of one message, or of a list of them (OpenAI's or ShareGPT's).

    Raises:
        Dropped: anything else, an empty one, or one that is not only text.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    parts = [value] if isinstance(value, Mapping) else value
    if not isinstance(parts, list) or not parts:
        raise Dropped(EMPTY if not parts else "no text and no messages")
    return [_turn(part) for part in parts]


def _turn(part: Any) -> Message:
    if not isinstance(part, Mapping):
        raise Dropped("no text and no messages")
    for name, why in LEFT_OUT.items():
        if part.get(name) not in NOTHING:
            raise Dropped(f"with {name}, but {why}")
    role, content = (part.get("role"), part.get("content")) if "role" in part else (part.get("from"), part.get("value"))
    if role in TOOL_ROLES:
        raise Dropped(f"with a message of a tool, but {LEFT_OUT['tools']}")
    known = ROLES.get(str(role)) or MORE_ROLES.get(str(role))
    if known is None:
        raise Dropped("with a message of an unknown role")
    if content is None:
        raise Dropped(EMPTY)
    if not isinstance(content, str):
        raise Dropped("with a message that is not text")
    if not content.strip():
        raise Dropped(EMPTY)
    return {"role": known, "content": content}


def is_transcript(text: str) -> bool:
    return bool(_HH_TURN.match(text))


def transcript_turns(text: str) -> list[Message]:
    """The turns of ``\\n\\nHuman: ...\\n\\nAssistant: ...``."""
    pieces = _HH_TURN.split(text)[1:]
    roles = {"Human": "user", "Assistant": "assistant"}
    return turns_of(
        [{"role": roles[who], "content": said.strip()} for who, said in zip(*[iter(pieces)] * 2, strict=True)]
    )


def answer_of(value: Any) -> list[Message]:
    """As ``turns_of``, but a text is a message of the assistant."""
    return turns_of([{"role": "assistant", "content": value}] if isinstance(value, str) else value)


def system_first(row: Row, messages: Sequence[Message]) -> list[Message]:
    """The messages behind the row's ``system``, unless they begin with a system message."""
    system = row.get("system")
    has_one = bool(messages) and messages[0]["role"] == "system"
    if not isinstance(system, str) or not system.strip() or has_one:
        return list(messages)
    return [{"role": "system", "content": system}, *messages]


def check_order(messages: Sequence[Message], last: str) -> None:
    """Raises Dropped unless user and assistant take turns after an optional system message, the user first."""
    body = messages[1:] if messages and messages[0]["role"] == "system" else messages
    if not body or body[-1]["role"] != last:
        raise Dropped(f"does not end with a message of the {last}")
    if any(message["role"] != ("user", "assistant")[place % 2] for place, message in enumerate(body)):
        raise Dropped("user and assistant do not take turns, the user first")


def text_of(messages: Sequence[Message]) -> str:
    """One text for comparing conversations with each other."""
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
