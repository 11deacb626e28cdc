"""Functions as tools: schemas from type hints and docstrings, calls from what the model wrote, results in order."""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from mega_rl.environments.called import CalledFunction
from mega_rl.environments.protocol import End, Message, Reply, ToolResult, Turn
from mega_rl.environments.waiting import RaisedError, result_of
from mega_rl.errors import InputError
from mega_rl.types import Prompt

MAX_CALLS = 16  # of one turn; the others are answered with an error
MAX_ARGUMENT_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class ToolCall:
    """What the model asks for."""

    name: str
    arguments: str  # JSON, as the model wrote it


@dataclass(frozen=True)
class Parsed:
    """A turn taken apart."""

    content: str  # what stands before the calls
    calls: Sequence[ToolCall]
    is_malformed: bool = False  # there is the mark of a call, but no call


# From a turn's text, special tokens included; `mega_rl.rollout.vllm.tool_parsers` has those of the engine.
Parser = Callable[[str], Parsed]


class ToolEnvironment:
    """Answers the calls of a turn with the results of functions; a turn without a call ends the episode.

    Whatever a tool does is a reply that begins with ``error:``: it raises, hangs, ends its process, returns too much. A
    tool may return a `ToolResult`, whose text stays as it is.
    """

    roles = ("tool",)

    def __init__(
        self,
        prompt: Prompt,
        sample_index: int,
        *,
        functions: Sequence[Callable[..., Any]],
        parse: Parser,
        timeout_s: float = 10.0,
        memory_bytes: int = 1 << 32,
        is_in_process: bool = False,
    ) -> None:
        """Make the tools ready.

        Args:
            functions: with type hints and a docstring that describes every argument (``Args:``). ``async`` ones run in
                the event loop of the episode. Of plain ones each call runs in a process of its own, which is ended
                after it.
            timeout_s: of one call.
            memory_bytes: data memory of the process of a call.
            is_in_process: plain functions run in threads of this process instead. They may be methods and keep a state,
                but one that hangs keeps its thread, and one that ends its process ends this one.

        Raises:
            InputError: a function without hints or descriptions, two of one name, or one that another process cannot
                import.
        """
        self._functions: dict[str, Callable[..., Any]] = {}
        for function in functions:
            name = function.__name__
            if name in self._functions:
                raise InputError(f"two tools are called {name!r}; give one of them another name")
            is_local = is_in_process or inspect.iscoroutinefunction(function)
            self._functions[name] = function if is_local else CalledFunction(function, timeout_s, memory_bytes)
        self.tools = [schema(function) for function in functions]
        self._checks = [function.check_at_start for function in functions if hasattr(function, "check_at_start")]
        self._parse = parse
        self._timeout_s = timeout_s

    def check_at_start(self) -> None:
        """Ask the tools that have a ``check_at_start`` whether they work."""
        for check in self._checks:
            check()

    async def step(self, turn: Turn) -> Reply | End:
        parsed = self._parse(turn.text)
        if parsed.is_malformed:
            error = "error: this is not a tool call: its JSON cannot be read or is cut off"
            return Reply([{"role": "tool", "content": error}], {"tool_calls": 1, "tool_errors": 1})
        if not parsed.calls:
            return End()
        timed = await asyncio.gather(*(self._timed_answer(call) for call in parsed.calls[:MAX_CALLS]))
        left = _failed(f"at most {MAX_CALLS} calls are answered in one turn"), 0.0
        answered = list(zip(parsed.calls, [*timed, *[left] * (len(parsed.calls) - MAX_CALLS)], strict=True))
        messages: list[Message] = [
            {"role": "tool", "name": call.name, "content": result.text} for call, (result, _) in answered
        ]
        metrics: Counter[str] = Counter()
        for call, (result, seconds) in answered:
            metrics.update(self._metrics(call.name, result, seconds))
        return Reply(messages, metrics)

    def _metrics(self, name: str, result: ToolResult, seconds: float) -> dict[str, float]:
        """Of a call, also by the tool's name."""
        found = {"tool_calls": 1.0, "tool_errors": float(result.has_failed), "tool_s": seconds}
        is_known = name in self._functions  # not what the model made up
        return found | ({f"{metric}/{name}": value for metric, value in found.items()} if is_known else {})

    async def _timed_answer(self, call: ToolCall) -> tuple[ToolResult, float]:
        began = time.monotonic()
        return await self._answer(call), time.monotonic() - began

    async def _answer(self, call: ToolCall) -> ToolResult:
        function = self._functions.get(call.name)
        if function is None:
            return _failed(f"there is no tool {call.name!r:.60}; there are {', '.join(self._functions)}")
        try:
            arguments = json.loads(call.arguments) if len(call.arguments) <= MAX_ARGUMENT_CHARACTERS else None
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            return _failed("the arguments are not a JSON object")
        try:
            if isinstance(function, CalledFunction):  # has its own limit, and nothing is left of it
                return await asyncio.to_thread(function, arguments)
            return _result(await result_of(function, self._timeout_s, **arguments))
        except TimeoutError:
            return _failed(f"{call.name} gave nothing within {self._timeout_s:g} s")
        except (RaisedError, OSError, ValueError, TypeError, RecursionError) as error:  # the last: no text of the value
            return _failed(str(error))


def _failed(sentence: str) -> ToolResult:
    return ToolResult(f"error: {sentence}", has_failed=True)


def _result(value: Any) -> ToolResult:
    if isinstance(value, ToolResult):
        return value
    text = text_of(value)
    return ToolResult(text, text.startswith("error:"))


@cache
def schema(function: Callable[..., Any]) -> Mapping[str, Any]:
    """The JSON schema of a function, as chat templates take it. Raises InputError."""
    from transformers.utils import get_json_schema  # two seconds, for runs with tools only

    try:
        return dict(get_json_schema(function))
    except Exception as error:  # of several kinds, by what is missing
        raise InputError(
            f"the tool {function.__name__} cannot be described to a model ({error}); give it type hints, and a "
            "docstring with a line for each argument under Args:"
        ) from error


def text_of(value: Any) -> str:
    """What the model reads of a result: text as it is, bytes as UTF-8 as far as they are, anything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return json.dumps(value, ensure_ascii=False, default=str)
