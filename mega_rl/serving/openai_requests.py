"""What clients of an OpenAI-compatible endpoint ask for, read and checked; what is not done here is refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mega_rl.data.rows.messages import Message, as_messages, tools_of
from mega_rl.data.tokens.template import Tools
from mega_rl.errors import InputError, shown

MAX_STOPS = 16
MAX_CHOICES = 128
MAX_SEED = 1 << 63
# Fields that change nothing that is sampled here.
IGNORED = {
    "include_stop_str_in_output",
    "metadata",
    "model",
    "parallel_tool_calls",
    "priority",
    "prompt_cache_key",
    "request_id",
    "safety_identifier",
    "service_tier",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "store",
    "user",
}
# Fields that would change what is sampled in a way that is not to be had, and the values that change nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True, None),
    "best_of": (1, None),
    "continue_final_message": (False, None),
    "echo": (False, None),
    "frequency_penalty": (0, None),
    "function_call": (None, "none"),
    "functions": ([], None),
    "ignore_eos": (False, None),
    "logit_bias": ({}, None),
    "min_p": (0, None),
    "min_tokens": (0, None),
    "modalities": (["text"], None),
    "output_mode": ("tokens", None),
    "prediction": (None,),
    "presence_penalty": (0, None),
    "prompt_logprobs": (None,),
    "repetition_penalty": (1, None),
    "response_format": ({"type": "text"}, None),
    "stop_token_ids": ([], None),
    "suffix": ("", None),
    "top_k": (-1, 0, None),
    "top_logprobs": (0, None),
    "top_p": (1, None),
}
SAMPLING = {
    "temperature", "max_tokens", "max_completion_tokens", "n", "seed", "stop", "logprobs", "stream", "stream_options",
    "return_token_ids",
}  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """How to sample, and what to tell."""

    max_tokens: int | None  # None: as many as there is room for
    temperature: float
    n: int  # responses to each prompt
    seed: int | None  # None: another one each time
    stop: tuple[str, ...]
    with_logprobs: bool
    with_token_ids: bool
    is_streamed: bool
    with_usage: bool  # at the end of a stream


@dataclass(frozen=True)
class Chat:
    """A request for the next message of a conversation."""

    messages: list[Message]
    tools: Tools
    asked: Asked


def chat_of(body: Any, temperature: float) -> Chat:
    """A request of /v1/chat/completions; ``temperature`` is used where it names none. Raises InputError."""
    known = _known(body, {"messages", "tools", "tool_choice"})
    choice = known.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise InputError(f"tool_choice is {shown(choice)}: the model chooses; give auto or none")
    given = known.get("messages")
    if not isinstance(given, list):
        raise InputError(f"messages is {shown(given)}; give a list of chat messages")
    messages = as_messages([_plain(message) for message in given], None)
    tools = [] if choice == "none" else tools_of(known.get("tools"))
    return Chat(messages, tools, _asked(known, temperature, is_chat=True))


def completion_of(body: Any, temperature: float) -> tuple[list[str | list[int]], Asked]:
    """Prompts, as text or as token ids, of a request of /v1/completions. Raises InputError."""
    known = _known(body, {"prompt"})
    prompt = known.get("prompt")
    prompts: list[Any] = prompt if isinstance(prompt, list) and not _are_ids(prompt) else [prompt]
    if not prompts or not all(isinstance(one, str) or (_are_ids(one) and one) for one in prompts):
        raise InputError(f"prompt is {shown(prompt)}; give a text, token ids, or a list of either")
    return prompts, _asked(known, temperature, is_chat=False)


def tokens_of(body: Any, temperature: float) -> tuple[list[int], Asked]:
    """The prompt of a request of /inference/v1/generate. Raises InputError."""
    known = _known(body, {"token_ids", "sampling_params"})
    params, ids = known.pop("sampling_params", {}), known.get("token_ids")
    if not _are_ids(ids) or not ids:
        raise InputError(f"token_ids is {shown(ids)}; give a list of token ids")
    own = _known(params, set())
    return list(ids), _asked(known | own, temperature, is_chat=False)


def _known(body: Any, own: set[str]) -> dict[str, Any]:
    """The fields that matter. Raises InputError for one that asks for what is not done here."""
    if not isinstance(body, dict):
        raise InputError("the request is no JSON object")
    for name, value in body.items():
        if name in NEUTRAL:
            if value not in NEUTRAL[name]:
                raise InputError(f"{name}={shown(value)} is not to be had here: leave it out")
        elif name not in IGNORED | SAMPLING | own:
            raise InputError(f"unknown field {shown(name)}: leave it out")
    return {name: value for name, value in body.items() if name in SAMPLING | own and value is not None}


def _asked(known: Mapping[str, Any], temperature: float, is_chat: bool) -> Asked:
    limit = known.get("max_completion_tokens", known.get("max_tokens"))
    logprobs = known.get("logprobs", False)
    if not isinstance(logprobs, bool) and (is_chat or logprobs not in (0, 1)):
        raise InputError(f"logprobs is {shown(logprobs)}: those of sampled tokens alone are to be had; give 0 or 1")
    stream = known.get("stream_options", {})
    if not isinstance(stream, dict):
        raise InputError(f"stream_options is {shown(stream)}; give an object")
    return Asked(
        max_tokens=None if limit is None else int(_number("max_tokens", limit, 1, 1 << 31, is_whole=True)),
        temperature=float(_number("temperature", known.get("temperature", temperature), 0, 100)),
        n=int(_number("n", known.get("n", 1), 1, MAX_CHOICES, is_whole=True)),
        seed=None if "seed" not in known else int(_number("seed", known["seed"], 0, MAX_SEED - 1, is_whole=True)),
        stop=_stops(known.get("stop", [])),
        with_logprobs=logprobs is not False,
        with_token_ids=_switch("return_token_ids", known),
        is_streamed=_switch("stream", known),
        with_usage=_switch("include_usage", stream),
    )


def _number(name: str, value: Any, lowest: float, highest: float, is_whole: bool = False) -> float:
    kind = int if is_whole else int | float
    if isinstance(value, bool) or not isinstance(value, kind) or not lowest <= value <= highest:
        raise InputError(
            f"{name} is {shown(value)}; give a {'whole ' if is_whole else ''}number from {lowest} to {highest}"
        )
    return value


def _switch(name: str, known: Mapping[str, Any]) -> bool:
    value = known.get(name, False)
    if not isinstance(value, bool):
        raise InputError(f"{name} is {shown(value)}; give true or false")
    return value


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise InputError(f"stop is {shown(value)}; give a text, or a list of at most {MAX_STOPS} texts")
    return tuple(stops)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in value)


def _plain(message: Any) -> Any:
    """A message whose content is a list of parts of text as one with a text; keys that say nothing are left out."""
    if not isinstance(message, dict):
        return message
    made = {key: value for key, value in message.items() if value is not None}
    content = made.get("content")
    if isinstance(content, list):
        made["content"] = "".join(_text(part) for part in content)
    if made.get("role") == "developer":  # the newer name
        made["role"] = "system"
    return made


def _text(part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise InputError(f"a part of a message is {shown(part)}: only text can be read")


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Raises InputError for a token that the model does not have."""
    if wrong := next((i for i in ids if not 0 <= i < vocab_size), None):
        raise InputError(f"there is no token {wrong}: the vocabulary has {vocab_size}")
