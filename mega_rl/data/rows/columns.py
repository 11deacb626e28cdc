"""What the columns of a row mean, whatever data set it comes from; a column that cannot be used is never dropped.

Rows are known by their columns:
  - ``messages``, or ``conversations`` with ``from`` and ``value`` (ShareGPT), with ``system`` before them;
  - ``prompt`` (text or messages), ``question``, or ``instruction`` with ``input`` and ``history`` (alpaca), all of
    them with ``system`` before them;
  - the expected text ``response``, ``answer``, ``output`` or ``solution``; ``reward_model.ground_truth`` (verl) goes
    before these;
  - ``tools`` (JSON schemas, or their JSON text) beside a conversation or a pair of answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mega_rl.data.rows.messages import ASSISTANT, CALLS, REFUSED_KEYS, TEXTS, TOOL, calls_of, tools_of
from mega_rl.data.rows.rows import Row
from mega_rl.errors import InputError, shown

PROMPTS = ("prompt", "question", "instruction")
TRUTHS = ("answer", "solution", "output", "response")
RESPONSES = ("response", "answer", "output", "solution")
ANSWERS = ("chosen", "rejected", "completion")  # of preference data: text, one message, or messages
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "assistant": ASSISTANT,
    "function_call": ASSISTANT,  # its text is the call
    "observation": TOOL,
    "tool": TOOL,
    "system": "system",
}
LOSSES = ("loss", "step_loss_mask", "weight")  # of a message, 0 or 1: slime's and OpenAI's names of the same key
# Columns, and keys of a message, that mean something that is not there yet.
REFUSED = {
    **dict.fromkeys(
        ("images", "image"), "only stages sft and rl, and mega-rl eval, of a vision-language model read pictures"
    ),
    **dict.fromkeys(("videos", "audios"), "no model is trained on them"),
}
# Those that only stages which learn from files read.
TOOLS = {name: "a policy that samples has no tools to call" for name in ("tools", CALLS)}
FINAL = "####"  # before the result in a solution of GSM8K


def refuse_columns(row: Row, takes_tools: bool = False) -> None:
    """Raises InputError for a column, or a key of a message, that would have to be dropped."""
    refused = REFUSED if takes_tools else REFUSED | TOOLS
    for name, why in refused.items():
        if _is_filled(row.get(name)):
            raise InputError(f"{row.where} has the column {name}, but {why}: take it out, or leave such rows out")
    for column in ("messages", "conversations", "prompt", *ANSWERS):
        messages = row.get(column)
        for message in messages if isinstance(messages, list) else (messages,):
            found = [name for name in refused if isinstance(message, Mapping) and _is_filled(message.get(name))]
            if found:
                why = refused[found[0]]
                raise InputError(f"{row.where} has a message with {found[0]}, but {why}: leave such rows out")


def row_tools(row: Row) -> list[dict[str, Any]]:
    """The tools that the row offers; [] without.

    Raises:
        InputError: something else than JSON schemas or their JSON text.
    """
    try:
        return tools_of(row.get("tools"))
    except InputError as error:
        raise InputError(f"{row.where}: {error}") from error


def _is_filled(value: Any) -> bool:
    return value is not None and value not in ([], {}, "")


def prompt_of(row: Row) -> Any:
    """The prompt, text or messages; None if the row has none.

    Raises:
        InputError: a conversation without a message of the user.
    """
    messages = messages_of(row)
    if messages is not None:
        users = [place for place, message in enumerate(messages) if _role(message) == "user"]
        if not users:
            raise InputError(f"{row.where} has a conversation without a message of the user; correct it")
        return messages[: users[-1] + 1]
    name = next((name for name in PROMPTS if row.get(name) is not None), None)
    text = None if name is None else row.get(name)
    more = row.get("input") if name == "instruction" else None
    if isinstance(text, str) and isinstance(more, str) and more:
        text = f"{text}\n{more}"
    earlier = _history(row) if name == "instruction" else []
    return _after_system(row, [*earlier, {"role": "user", "content": text}] if earlier else text)


def _history(row: Row) -> list[dict[str, str]]:
    """The earlier turns of an alpaca row, which are pairs of what was asked and what was answered."""
    pairs = row.get("history") or []
    for pair in pairs if isinstance(pairs, list) else [pairs]:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise InputError(f"{row.where} has the history {shown(pair)}: give pairs of a question and its answer")
    return [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def _after_system(row: Row, prompt: Any) -> Any:
    """The prompt, text or messages, behind the text of the column ``system`` if it has no system message itself."""
    system = row.get("system")
    if not isinstance(system, str) or not system:
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, list) or not messages or _role(messages[0]) == "system":
        return prompt
    return [{"role": "system", "content": system}, *messages]


def messages_of(row: Row) -> list[Any] | None:
    """The messages of a conversation with ``role`` and ``content``; None if the row has none.

    Raises:
        InputError: ``messages`` is no list.
    """
    messages = row.get("messages")
    if messages is not None and not isinstance(messages, list):
        raise InputError(f"{row.where} has the messages {shown(messages)}: give a list of messages")
    if messages is None and row.get("conversations") is not None:
        messages = _from_sharegpt(row)
    return _after_system(row, messages)


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _from_sharegpt(row: Row) -> list[dict[str, Any]]:
    turns = row.get("conversations")
    messages = [message_of(row, turn) for turn in (turns if isinstance(turns, list) else [turns])]
    if not messages:
        raise InputError(f"{row.where} has an empty conversation; correct it")
    return messages


def message_of(row: Row, turn: Any) -> dict[str, Any]:
    """A turn, with ``role`` and ``content`` or with ``from`` and ``value``, as a message.

    Raises:
        InputError: neither, nobody's turn, or a ``function_call`` without calls.
    """
    keys = (*TEXTS, CALLS, *LOSSES, *REFUSED_KEYS)  # those that are refused are refused by as_messages
    more = {key: turn[key] for key in keys if _is_filled(turn.get(key))} if isinstance(turn, Mapping) else {}
    if isinstance(turn, Mapping) and isinstance(turn.get("role"), str):
        return {"role": turn["role"], "content": turn.get("content"), **more}
    role = ROLES.get(str(turn.get("from"))) if isinstance(turn, Mapping) else None
    if role is None:
        raise InputError(f"{row.where} has the turn {shown(turn)}: give from (human, gpt or system) and value")
    if turn["from"] != "function_call":
        return {"role": role, "content": turn.get("value"), **more}
    try:
        calls = calls_of(turn.get("value"))
    except InputError as error:
        raise InputError(f"{row.where}: {error}") from error
    if bool(calls) == (CALLS in more):  # none, or some in both
        raise InputError(f"{row.where} has the turn {shown(turn)}: give its calls in value, and only there")
    return {"role": role, "content": "", **({CALLS: calls} if calls else {}), **more}


def response_of(row: Row) -> Any:
    """The text to learn in supervised training; None if the row has none."""
    return next((row.get(name) for name in RESPONSES if row.get(name) is not None), None)


def truth_of(row: Row) -> Any:
    """What a reward compares with; None if the row has none.

    Of ``question`` with a worked ``answer`` as in GSM8K, it is what stands after the last ``####``.

    Raises:
        InputError: ``reward_model`` is no object.
    """
    reward_model = row.get("reward_model")
    if reward_model is not None:
        if not isinstance(reward_model, Mapping):
            raise InputError(f"{row.where}: reward_model is {shown(reward_model)}; make it an object with ground_truth")
        return reward_model.get("ground_truth")
    name = next((name for name in TRUTHS if row.get(name) is not None), None)
    truth = None if name is None else row.get(name)
    if name == "answer" and row.get("prompt") is None and isinstance(truth, str) and FINAL in truth:
        return truth.rpartition(FINAL)[2].strip().replace(",", "")
    return truth
