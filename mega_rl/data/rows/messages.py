"""Chat messages of data rows in the one form in which chat templates are given them, and the tools of a row.

Parquet files have one type for a column, so that a tool call, or the schema of a tool, carries the keys of all others
with nulls in them. A key that is null is therefore left out, at any depth; what is JSON text stays as it was written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from mega_rl.errors import InputError, shown

# {"role": ..., "content": text}, and of TEXTS and CALLS what the row has.
Message = dict[str, Any]
TEXTS = ("name", "tool_call_id", "reasoning_content")
CALLS = "tool_calls"  # [{"type": "function", "id": ..., "function": {"name": ..., "arguments": {...}}}]
# Keys of a message that other programs write, and what to do with them: they would be lost.
REFUSED_KEYS = {
    "function_call": "write it as tool_calls, its newer form",
    "thinking": "name it reasoning_content",
    "reasoning": "name it reasoning_content",
}
ASSISTANT, TOOL = "assistant", "tool"


def as_messages(prompt: Any, system_prompt: str | None) -> list[Message]:
    """A string or a list of chat messages as messages, led by the system prompt if they bring none.

    Of a message that calls tools, the content may be null, which becomes "".

    Raises:
        InputError: neither a string nor a non-empty list of ``{"role": str, "content": str}``, calls that are none, or
            a key of ``REFUSED_KEYS``.
    """
    given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(given, list) or not given:
        raise InputError(f"a prompt is text or a list of chat messages, not {shown(prompt)}")
    messages = [_message(message) for message in given]
    if system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def _message(message: Any) -> Message:
    for key, remedy in REFUSED_KEYS.items():
        if isinstance(message, Mapping) and without_nulls(message.get(key)) not in (None, "", [], {}):
            raise InputError(f"a chat message has {key}, which is not read: {remedy}, or take it out")
    calls = calls_of(message.get(CALLS)) if isinstance(message, Mapping) else []
    content = message.get("content") if isinstance(message, Mapping) else None
    if calls and content is None:
        content = ""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not isinstance(content, str):
        raise InputError(f"a chat message needs role and content, both text, not {shown(message)}")
    if calls and message["role"] != ASSISTANT:
        raise InputError(f"a message of {shown(message['role'])} has tool_calls: only the assistant calls tools")
    made: Message = {"role": message["role"], "content": content}
    for key in TEXTS:
        text = message.get(key)
        if text is not None and not isinstance(text, str):
            raise InputError(f"a chat message has the {key} {shown(text)}: make it text, or leave it out")
        if text:
            made[key] = text
    return made | ({CALLS: calls} if calls else {})


def calls_of(value: Any) -> list[dict[str, Any]]:
    """The calls of one message in the nested form, arguments as objects; an object without ``function`` is one itself.

    Raises:
        InputError: no list of objects with a name, or arguments that are neither an object nor the JSON text of one.
    """
    if value is None or value in ([], ""):
        return []
    return [_call(call) for call in _objects(value, CALLS)]


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise InputError(f"tool_calls has {shown(call)}: give every call a function with a name")
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    if isinstance(arguments, str):
        arguments = _parsed(arguments)
    if not isinstance(arguments, dict):
        raise InputError(
            f"the call of {shown(name)} has the arguments {shown(function.get('arguments'))}: give an object, or the "
            "JSON text of one"
        )
    made: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return made | ({"id": call["id"]} if isinstance(call.get("id"), str) else {})


def tools_of(value: Any) -> list[dict[str, Any]]:
    """The tools that a row offers: JSON schemas, a list of them or its JSON text; [] without.

    Raises:
        InputError: something else, or a tool without a name.
    """
    if value is None or value in ([], {}, ""):
        return []
    tools = _objects(value, "tools")
    for tool in tools:
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InputError(f"tools has {shown(tool)}: give every tool a function with a name, as JSON schemas have")
    return tools


def _objects(value: Any, name: str) -> list[dict[str, Any]]:
    """A list of objects, each of which, like the list, may be JSON text; keys that are null are left out."""
    found = _parsed(value) if isinstance(value, str) else without_nulls(value)
    parts = found if isinstance(found, list) else [found]
    items = [_parsed(part) if isinstance(part, str) else part for part in parts]
    objects = [item for item in items if isinstance(item, dict)]
    if len(objects) < len(items):
        raise InputError(f"{name} is {shown(value)}: give a list of objects, or its JSON text")
    return objects


def _parsed(text: str) -> Any:
    """What JSON text says; None for text that is no JSON, or that has half of a character."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value


def without_nulls(value: Any) -> Any:
    """The value without the keys that are null, at any depth; of a list, nulls stay."""
    if isinstance(value, Mapping):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


def texts_of(value: Any) -> Iterator[str]:
    """All text in a value of lists and objects, keys aside."""
    if isinstance(value, str):
        yield value
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for part in parts:
        yield from texts_of(part)
