"""Chat templates: rendering within bounds, and what a template can write of tools, tried on a conversation of our own.

Templates differ in what they want of a tool call (arguments as an object or as JSON text, no content as "" or as
null), and one that knows no tools leaves them out without a word. So every template is tried once: calls are given in
the first form that it writes whole, and a row with something that it would leave out is refused.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from mega_rl.data.rows.messages import CALLS, TOOL, Message
from mega_rl.data.tokens.template_steps import MAX_TEMPLATE_STEPS, TooManySteps, bounded_template
from mega_rl.errors import InputError, shortened

Tools = Sequence[dict[str, Any]]
CALL_ID = "callprobe"  # nine letters: what the strictest templates take
_USER: Message = {"role": "user", "content": "probe question"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "probe",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string", "description": "probe"}}},
    },
}


def uses_chat_template(tokenizer: PreTrainedTokenizerBase, mode: str) -> bool:
    """Whether prompts are rendered with the tokenizer's template.

    Args:
        mode: ``data.chat_template``: auto (where there is one), always, never.
    """
    if mode not in ("auto", "always", "never"):
        raise InputError(f"data.chat_template is {mode!r}; choose auto, always or never")
    if mode == "always" and not tokenizer.chat_template:
        raise InputError("data.chat_template is always but the tokenizer has no chat template; use auto or never")
    return mode != "never" and bool(tokenizer.chat_template)


def apply_template(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], add_generation_prompt: bool, tools: Tools = ()
) -> str:
    """The messages as text; a template that refuses them, or does not end, is an InputError."""
    if any(CALLS in message for message in messages):
        form = _abilities(tokenizer, str(tokenizer.chat_template)).calls
        messages = [_in_form(message, form) for message in messages] if form else messages
    return _rendered(tokenizer, messages, add_generation_prompt, tools)


def check_written(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Tools) -> None:
    """Raises InputError for what the template would leave out of a conversation without a word."""
    calling = [message for message in messages if CALLS in message]
    asks = tools or any(message["role"] == TOOL or message.keys() > {"role", "content"} for message in messages)
    if not asks:
        return
    able = _abilities(tokenizer, str(tokenizer.chat_template))
    missing = {
        "tools": bool(tools) and not able.writes_tools,
        "tool_calls": bool(calling) and able.calls is None,
        "content beside tool_calls": any(message["content"] for message in calling) and not able.writes_text_of_calls,
        "messages of tools": any(message["role"] == TOOL for message in messages) and not able.writes_answers,
        "reasoning_content": any("reasoning_content" in m for m in messages) and not able.writes_thoughts,
    }
    for what, is_missing in missing.items():
        if is_missing:
            raise InputError(
                f"the tokenizer's chat template does not write {what}: take one that does, or leave such rows out"
            )


@dataclass(frozen=True)
class _CallForm:
    """In which form a template writes calls."""

    has_objects: bool  # arguments as objects; else as JSON text
    empty: str | None  # the content of a message that has none


_FORMS = [_CallForm(has_objects, empty) for has_objects in (True, False) for empty in ("", None)]


@dataclass(frozen=True)
class _Abilities:
    calls: _CallForm | None  # None: calls are not written
    writes_tools: bool
    writes_text_of_calls: bool
    writes_answers: bool
    writes_thoughts: bool


@functools.lru_cache(maxsize=16)
def _abilities(tokenizer: PreTrainedTokenizerBase, template: str) -> _Abilities:
    """Args: template: the tokenizer's, which may be given another one."""
    calls = next((form for form in _FORMS if _writes_calls(tokenizer, form)), None)
    talking, answer = probe_call("probe_text"), probe_answer("probe_answer")
    silent = probe_call("")
    if calls is not None:
        talking, silent = _in_form(talking, calls), _in_form(silent, calls)
    plain = {"role": "assistant", "content": "probe_text"}
    return _Abilities(
        calls=calls,
        writes_tools="probe_tool" in _tried(tokenizer, [_USER], [_TOOL]),
        writes_text_of_calls=all(word in _tried(tokenizer, [_USER, talking]) for word in ("probe_text", "probe_name")),
        writes_answers=any("probe_answer" in _tried(tokenizer, [_USER, said, answer]) for said in (silent, plain)),
        writes_thoughts="probe_thought" in _tried(tokenizer, [_USER, {**plain, "reasoning_content": "probe_thought"}]),
    )


def probe_call(
    content: str, argument: str = "probe_value", name: str = "probe_name", call_id: str = CALL_ID
) -> Message:
    """A message of the assistant that calls one tool."""
    function = {"name": name, "arguments": {"probe_key": argument}}
    return {
        "role": "assistant",
        "content": content,
        CALLS: [{"type": "function", "id": call_id, "function": function}],
    }


def probe_answer(content: str) -> Message:
    """What the tool of ``probe_call`` answers."""
    return {"role": TOOL, "content": content, "tool_call_id": CALL_ID, "name": "probe_name"}


def _writes_calls(tokenizer: PreTrainedTokenizerBase, form: _CallForm) -> bool:
    text = _tried(tokenizer, [_USER, _in_form(probe_call(""), form)])
    is_whole = all(word in text for word in ("probe_name", "probe_key", "probe_value"))
    is_escaped = '\\"probe_key' in text  # JSON text that was made JSON once more
    return is_whole and not is_escaped and text.count("None") == _tried(tokenizer, [_USER]).count("None")


def _tried(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Tools = ()) -> str:
    try:
        return _rendered(tokenizer, messages, False, tools)
    except InputError as error:
        if isinstance(error.__cause__, TooManySteps):
            raise
        return ""


def _in_form(message: Message, form: _CallForm) -> Message:
    if CALLS not in message:
        return message
    calls = message[CALLS]
    if not form.has_objects:
        texts = [json.dumps(call["function"]["arguments"], ensure_ascii=False) for call in calls]
        calls = [
            {**call, "function": {**call["function"], "arguments": text}}
            for call, text in zip(calls, texts, strict=True)
        ]
    return {**message, "content": message["content"] or form.empty, CALLS: calls}


def _rendered(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], add_generation_prompt: bool, tools: Tools
) -> str:
    try:
        with bounded_template():
            text = tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
    except TooManySteps as error:
        raise InputError(
            f"the tokenizer's chat template takes more than {MAX_TEMPLATE_STEPS} steps for one row; correct its loops, "
            "or set data.chat_template to never"
        ) from error
    except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError, MemoryError) as error:
        # a template is a program: what it raises besides its own errors are Python's
        cause = shortened(next(iter(str(error).splitlines()), type(error).__name__))
        raise InputError(f"the tokenizer's chat template refuses the messages ({cause}); fix their roles") from error
    assert isinstance(text, str)
    return text
