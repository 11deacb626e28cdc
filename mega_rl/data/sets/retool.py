"""ReTool's supervised set: reasoning with a code interpreter, in one text, becomes calls of a tool and its answers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from mega_rl.data.rows.rows import Row
from mega_rl.data.sets.counting import Dropped, Record, fold
from mega_rl.data.sets.turns import EMPTY

QUESTION = "*user question:*"  # the published prompts say before it how to write code; the tool's schema says that here
TOOL = {
    "type": "function",
    "function": {
        "name": "code_interpreter",
        "description": "Runs Python code and answers with what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program to run."}},
            "required": ["code"],
        },
    },
}
_CALL = re.compile(r"<code>(.*?)</code>\s*<interpreter>(.*?)</interpreter>", re.DOTALL)
_FENCED = re.compile(r"```(?:python|py)?\n(.*?)```", re.DOTALL)
_MARKS = re.compile(r"</?(?:code|interpreter)>")


def retool(row: Row) -> Record:
    """``messages`` of a user and an assistant who writes ``<code>`` and reads ``<interpreter>``."""
    messages = row.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise row.missing("`messages`, a list of two")
    said = [(message.get("role"), message.get("content")) for message in messages]
    if [role for role, _ in said] != ["user", "assistant"]:
        raise Dropped("not one message of the user and one of the assistant")
    question, text = (content for _, content in said)
    if not isinstance(question, str) or not isinstance(text, str):
        raise Dropped("with a message that is not text")
    problem = _without_answer_marks(question.partition(QUESTION)[2] or question).strip()
    if not problem or not text.strip():
        raise Dropped(EMPTY)
    made = [{"role": "user", "content": problem}, *_turns(text)]
    return Record({"messages": made, "tools": [TOOL]}, fold(problem), content=text)


def _turns(text: str) -> Iterator[dict[str, Any]]:
    end = 0
    for call in _CALL.finditer(text):
        yield {"role": "assistant", "content": _prose(text[end : call.start()]), "tool_calls": [_call(call[1])]}
        yield {"role": "tool", "content": call[2].strip()}
        end = call.end()
    last = _prose(text[end:])
    if not last:
        raise Dropped("without a text after the last code")
    yield {"role": "assistant", "content": last}


def _prose(text: str) -> str:
    if _MARKS.search(text):
        raise Dropped("code that no answer of the interpreter follows, or an answer without code")
    return _without_answer_marks(text).strip()


def _call(code: str) -> dict[str, Any]:
    fenced = _FENCED.search(code)
    program = (fenced[1] if fenced else code).strip()
    return {"type": "function", "function": {"name": "code_interpreter", "arguments": {"code": program}}}


def _without_answer_marks(text: str) -> str:
    return text.replace("<answer>", "").replace("</answer>", "")
