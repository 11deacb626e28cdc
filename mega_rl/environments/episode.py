"""One episode: turns of a model and replies of an environment, within limits. Knows no engine, tokenizer or trainer."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal

from mega_rl.environments.protocol import End, Environment, Message, Reply, Turn
from mega_rl.environments.waiting import RaisedError, result_of
from mega_rl.types import ASSISTANT

# What the model writes next, given what it has not read yet: the messages of `start`, then those of each reply.
Generate = Callable[[Sequence[Message]], Awaitable[Turn]]
Stop = Literal["environment", "turns", "tokens", "failed"]
Slots = AbstractAsyncContextManager[Any] | None
MAX_CHARACTERS_PER_TOKEN = 16  # a longer reply is cut before its tokens are counted
MAX_DETAIL_LENGTH = 300  # characters


@dataclass(frozen=True)
class EpisodeLimits:
    """When an episode ends, whatever its environment says."""

    max_turns: int = 4
    max_reply_tokens: int = 1024  # of each message; a longer one is cut in its middle, and says so
    max_tokens: int | None = None  # of all turns and replies together, as `count_tokens` counts them
    step_timeout_s: float = 30.0
    close_timeout_s: float = 5.0


@dataclass(frozen=True)
class Episode:
    """What became of one."""

    events: tuple[Turn | Reply, ...]  # in order; begins with a reply if there was something to start with
    stop: Stop
    reward: float | None  # of the end; None: to be scored by the run's rewards, or unknown if the episode failed
    metrics: dict[str, float]
    cause: str | None = None  # of a failure: timed_out, raised or not_a_reply
    detail: str = ""
    turn_rewards: tuple[float, ...] = ()  # of every turn that was answered, beside that of the end; (): there were none


class NoRoomError(Exception):
    """`Generate` raises it: what the model reads next leaves no room for a turn."""


class _Failure(Exception):
    """Cause and detail."""


async def run_episode(
    environment: Environment,
    generate: Generate,
    limits: EpisodeLimits,
    count_tokens: Callable[[str], int] = len,
    slots: Slots = None,
) -> Episode:
    """Let the model and the environment take turns until one of them, or a limit, ends it.

    Plain functions of the environment run in the event loop's default executor. What it does never raises; a failure of
    `generate` does, after the environment was closed. ``slots``, such as a semaphore, is entered for each call of the
    environment, outside of its time; ``count_tokens`` is of a text without a chat template.
    """
    events: list[Turn | Reply] = []
    metrics: Counter[str] = Counter()
    rewards: list[float | None] = []  # of the turns
    num_tokens = 0

    def take(reply: Reply) -> Reply:
        nonlocal num_tokens
        cut = tuple(_cut_message(message, limits.max_reply_tokens, count_tokens) for message in reply.messages)
        metrics.update(reply.metrics)
        metrics["replies_cut"] += sum(a is not b for a, b in zip(cut, reply.messages, strict=True))
        num_tokens += sum(count_tokens(_text(message)) for message in cut)
        return replace(reply, messages=cut)

    def end(stop: Stop, reward: float | None = None, cause: str | None = None, detail: str = "") -> Episode:
        return Episode(tuple(events), stop, reward, _counts(metrics, events), cause, detail, _turn_rewards(rewards))

    try:
        opening = await _start(environment, limits.step_timeout_s, slots)
        if opening.messages:
            events.append(take(opening))
        messages: Sequence[Message] = opening.messages
        for number in range(limits.max_turns):
            turn = replace(await generate(messages), number=number)
            events.append(turn)
            num_tokens += len(turn.token_ids) or count_tokens(turn.text)
            answer = await _step(environment, turn, limits.step_timeout_s, slots)
            rewards.append(answer.reward if isinstance(answer, Reply) else None)
            if isinstance(answer, End):
                metrics.update(answer.metrics)
                return end("environment", answer.reward)
            reply = take(answer)
            if number + 1 == limits.max_turns:
                break  # nobody would read the reply
            if limits.max_tokens is not None and num_tokens >= limits.max_tokens:
                return end("tokens")
            events.append(reply)
            messages = reply.messages
        return end("turns")
    except NoRoomError:
        if events and isinstance(events[-1], Reply):
            events.pop()  # nobody reads it
        return end("tokens")
    except _Failure as failure:
        cause, detail = failure.args
        return end("failed", None, cause, detail)
    finally:
        await _close(environment, limits.close_timeout_s)


def _counts(metrics: Counter[str], events: Sequence[Turn | Reply]) -> dict[str, float]:
    turns = sum(isinstance(event, Turn) for event in events)
    return {name: float(value) for name, value in metrics.items()} | {"turns": float(turns)}


def _turn_rewards(rewards: Sequence[float | None]) -> tuple[float, ...]:
    """Of every turn that was answered, 0 where it was given none; empty if none was given any."""
    return tuple(reward or 0.0 for reward in rewards) if any(reward is not None for reward in rewards) else ()


async def _start(environment: Environment, timeout_s: float, slots: Slots) -> Reply:
    start = getattr(environment, "start", None)
    messages = () if start is None else await _limited(start, (), timeout_s, slots)
    return _checked(Reply(messages or ()))


async def _step(environment: Environment, turn: Turn, timeout_s: float, slots: Slots) -> Reply | End:
    answer = await _limited(environment.step, (turn,), timeout_s, slots)
    if not isinstance(answer, Reply | End):
        raise _Failure("not_a_reply", f"step returned {answer!r:.60}, which is neither a Reply nor an End")
    if isinstance(answer, Reply):
        reply = _checked(answer)
        if any(message["role"] == ASSISTANT for message in reply.messages):
            raise _Failure("not_a_reply", f"a message of a reply has the role {ASSISTANT}, which is the model's own")
        return reply
    reward = None if answer.reward is None else _number(answer.reward, "the reward")
    return End(reward, _metrics(answer.metrics))


def _number(value: Any, name: str) -> float:
    """Raises _Failure."""
    with contextlib.suppress(OverflowError):
        if isinstance(value, Real) and math.isfinite(value):
            return float(value)
    raise _Failure("not_a_reply", f"{name} is {value!r:.60}, which is not a finite number")


def _metrics(metrics: Any) -> dict[str, float]:
    """Raises _Failure."""
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise _Failure("not_a_reply", f"the metrics are {metrics!r:.60}, which are not numbers by name")
    return {name: _number(value, f"the metric {name:.60}") for name, value in metrics.items()}


def _checked(reply: Reply) -> Reply:
    """Raises _Failure if a message is none, or a metric."""
    try:
        messages = tuple(reply.messages)
        if all("role" in message and isinstance(message.get("content", ""), str | list) for message in messages):
            reward = None if reply.reward is None else _number(reply.reward, "the reward of a turn")
            return replace(reply, messages=messages, metrics=_metrics(reply.metrics), reward=reward)
    except (TypeError, AttributeError):
        pass
    raise _Failure("not_a_reply", f"{reply.messages!r:.60} is not a list of messages with role and content")


async def _limited(
    function: Callable[..., Any], arguments: tuple[Any, ...], timeout_s: float, slots: Slots = None
) -> Any:
    """The result of a plain or an ``async`` function. Raises _Failure."""
    try:
        async with slots or contextlib.nullcontext():
            return await result_of(function, timeout_s, *arguments)
    except TimeoutError:
        raise _Failure("timed_out", f"{function.__name__} gave nothing within {timeout_s:g} s") from None
    except RaisedError as error:
        raise _Failure("raised", f"{function.__name__} raised {error}"[:MAX_DETAIL_LENGTH]) from None


async def _close(environment: Environment, timeout_s: float) -> None:
    close = getattr(environment, "close", None)
    if close is not None:
        with contextlib.suppress(_Failure):  # the episode is over already
            await _limited(close, (), timeout_s)


def close_untaken(environment: Environment, timeout_s: float) -> None:
    """Close an environment that no episode took, in the calling thread: a plain ``close`` that hangs keeps it."""
    close = getattr(environment, "close", None)
    with contextlib.suppress(Exception):  # nobody is left to be told
        if inspect.iscoroutinefunction(close):
            asyncio.run(result_of(close, timeout_s))
        elif close is not None:
            close()


def _text(message: Message) -> str:
    content = message.get("content", "")
    return content if isinstance(content, str) else ""


def _cut_message(message: Message, max_tokens: int, count_tokens: Callable[[str], int]) -> Message:
    text = _text(message)
    cut = cut_middle(text, max_tokens, count_tokens)
    return message if cut is text else {**message, "content": cut}


def cut_middle(text: str, max_tokens: int, count_tokens: Callable[[str], int]) -> str:
    """A text of at most so many tokens: beginning and end, and between them how many characters are left out.

    A limit that does not hold the mark itself leaves nothing.
    """
    if len(text) <= max_tokens * MAX_CHARACTERS_PER_TOKEN and count_tokens(text) <= max_tokens:
        return text

    def kept(length: int) -> str:
        mark = f"\n... [{len(text) - length} characters left out] ...\n"
        return text[: length - length // 2] + mark + text[len(text) - length // 2 :]

    low, high = 0, min(len(text) - 1, max_tokens * MAX_CHARACTERS_PER_TOKEN)
    if count_tokens(kept(0)) > max_tokens:
        return ""
    while low < high:  # the largest length that fits; tokens grow with it but for a few at the seams
        middle = (low + high + 1) // 2
        low, high = (middle, high) if count_tokens(kept(middle)) <= max_tokens else (low, middle - 1)
    return kept(low)
