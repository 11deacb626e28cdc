"""Episodes driven by scripted model texts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from mega_rl.environments.built_in.guessing import NumberGuessing
from mega_rl.environments.episode import (
    MAX_CHARACTERS_PER_TOKEN,
    Episode,
    EpisodeLimits,
    NoRoomError,
    cut_middle,
    run_episode,
)
from mega_rl.environments.protocol import End, Message, Reply, Turn
from mega_rl.errors import InputError
from mega_rl.types import Prompt

LIMITS = EpisodeLimits(step_timeout_s=120.0, close_timeout_s=120.0)
PROMPT = Prompt(3, (1,), "?", "", "test")


def scripted(
    texts: Sequence[str], read: list[Sequence[Message]] | None = None
) -> Callable[[Sequence[Message]], Awaitable[Turn]]:
    left = iter(texts)

    async def generate(messages: Sequence[Message]) -> Turn:
        if read is not None:
            read.append(messages)
        return Turn(next(left))

    return generate


def run(environment: Any, texts: Sequence[str], limits: EpisodeLimits = LIMITS, **options: Any) -> Episode:
    return asyncio.run(run_episode(environment, scripted(texts, options.pop("read", None)), limits, **options))


class Echo:
    """Says what it heard, until it hears bye."""

    def __init__(self) -> None:
        self.closed = 0

    def start(self) -> list[Message]:
        return [{"role": "user", "content": "begin"}]

    def step(self, turn: Turn) -> Reply | End:
        if turn.text == "bye":
            return End(0.5, {"ended": 1})
        return Reply([{"role": "user", "content": f"{turn.number}:{turn.text}"}], {"steps": 1})

    def close(self) -> None:
        self.closed += 1


class Paying:
    """Pays half of what the turn says, as long as that is a number."""

    def step(self, turn: Turn) -> Reply | End:
        if turn.text == "end":
            return End(1.0)
        return Reply([{"role": "user", "content": "on"}], reward=float(turn.text) / 2 if turn.text else None)


def test_rewards_of_turns() -> None:
    found = run(Paying(), ["1", "", "end"])
    assert (found.reward, found.turn_rewards) == (1.0, (0.5, 0.0, 0.0))
    limit = run(Paying(), ["1", "2"], EpisodeLimits(max_turns=2, step_timeout_s=120.0))
    assert (limit.stop, limit.reward, limit.turn_rewards) == ("turns", None, (0.5, 1.0)), "nobody reads the last reply"
    assert run(Paying(), ["", "end"]).turn_rewards == (), "none was given"
    bad = run(Paying(), ["1", "inf"])
    assert (bad.cause, bad.turn_rewards) == ("not_a_reply", (0.5,)) and "the reward of a turn is inf" in bad.detail

    async def no_room(messages: Sequence[Message]) -> Turn:
        if messages:
            raise NoRoomError
        return Turn("4")

    cut = asyncio.run(run_episode(Paying(), no_room, LIMITS))
    assert (cut.stop, cut.turn_rewards) == ("tokens", (2.0,))


def test_turns_and_replies_in_order() -> None:
    environment, read = Echo(), list[Sequence[Message]]()
    episode = run(environment, ["a", "b", "bye"], read=read)
    assert [[message["content"] for message in messages] for messages in read] == [["begin"], ["0:a"], ["1:b"]]
    kinds = [event.text if isinstance(event, Turn) else event.messages[0]["content"] for event in episode.events]
    assert kinds == ["begin", "a", "0:a", "b", "1:b", "bye"]
    assert (episode.stop, episode.reward, environment.closed) == ("environment", 0.5, 1)
    assert episode.metrics == {"steps": 2.0, "replies_cut": 0.0, "ended": 1.0, "turns": 3.0}


def test_limits_of_turns_and_tokens() -> None:
    by_turns = run(Echo(), ["a"] * 9, EpisodeLimits(max_turns=3))
    assert (by_turns.stop, by_turns.metrics["turns"], by_turns.reward) == ("turns", 3, None)
    assert isinstance(by_turns.events[-1], Turn)  # the last reply, which nobody reads, is left out
    by_tokens = run(Echo(), ["aaaa"] * 9, EpisodeLimits(max_turns=9, max_tokens=12))
    assert (by_tokens.stop, by_tokens.metrics["turns"]) == ("tokens", 1)


class Async:
    async def step(self, turn: Turn) -> Reply | End:
        await asyncio.sleep(0)
        return End(1.0)


class Cancelled:
    async def step(self, turn: Turn) -> Reply | End:
        raise asyncio.CancelledError


def test_an_async_step_that_raises_a_cancellation_costs_its_episode_only() -> None:
    episode = run(Cancelled(), ["a"])
    assert (episode.stop, episode.cause) == ("failed", "raised")
    assert episode.detail == "step raised CancelledError: "


class Waiting:
    async def step(self, turn: Turn) -> Reply | End:
        await asyncio.Event().wait()
        return End()


def test_an_episode_that_is_cancelled_ends_so() -> None:
    async def cancelled() -> None:
        task = asyncio.create_task(run_episode(Waiting(), scripted(["a"]), LIMITS))
        for _ in range(10):  # until it waits in the step
            await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())
    episode = run(Waiting(), ["a"], EpisodeLimits(step_timeout_s=0.1))
    assert (episode.stop, episode.cause) == ("failed", "timed_out")


def test_an_async_environment_without_anything_else() -> None:
    assert run(Async(), ["a"]).reward == 1.0


class Failing(Echo):
    def __init__(self, failure: Callable[[], Any]) -> None:
        super().__init__()
        self.failure = failure

    def step(self, turn: Turn) -> Any:
        return self.failure()


def raises(error: BaseException) -> Callable[[], Any]:
    def step() -> Any:
        raise error

    return step


@pytest.mark.parametrize(
    ("failure", "cause", "detail"),
    [
        (raises(ValueError("no")), "raised", "step raised ValueError: no"),
        (raises(SystemExit(3)), "raised", "step raised SystemExit: 3"),
        (lambda: None, "not_a_reply", "step returned None"),
        (lambda: Reply(["text"]), "not_a_reply", "is not a list of messages"),  # type: ignore[list-item]
        (lambda: Reply([{"role": "tool", "content": b"\xff"}]), "not_a_reply", "is not a list of messages"),
        (lambda: Reply(5), "not_a_reply", "is not a list of messages"),  # type: ignore[arg-type]
        (lambda: Reply([{"role": "assistant", "content": "x"}]), "not_a_reply", "has the role assistant"),
        (lambda: Reply([], None), "not_a_reply", "the metrics are None"),  # type: ignore[arg-type]
        (lambda: Reply([], {"a": "1"}), "not_a_reply", "the metric a is '1'"),  # type: ignore[dict-item]
        (lambda: Reply([], {"a": float("nan")}), "not_a_reply", "the metric a is nan"),
        (lambda: End(None, [("a", 1)]), "not_a_reply", "which are not numbers by name"),  # type: ignore[arg-type]
        (lambda: End(None, {1: 1.0}), "not_a_reply", "which are not numbers by name"),  # type: ignore[dict-item]
        (lambda: End("1"), "not_a_reply", "the reward is '1', which is not a finite number"),  # type: ignore[arg-type]
        (lambda: End(float("inf")), "not_a_reply", "the reward is inf"),
        (lambda: End(10**400), "not_a_reply", "the reward is 1000"),
    ],
)
def test_a_failing_environment_costs_its_episode_only(failure: Callable[[], Any], cause: str, detail: str) -> None:
    environment = Failing(failure)
    episode = run(environment, ["a", "b"])
    assert (episode.stop, episode.cause, episode.reward, environment.closed) == ("failed", cause, None, 1)
    assert detail in episode.detail


class Hanging:
    def __init__(self) -> None:
        self.may_end = threading.Event()

    def step(self, turn: Turn) -> End:
        self.may_end.wait()
        return End()


def test_a_step_that_hangs_costs_its_episode_only() -> None:
    async def both() -> Episode:
        environment = Hanging()
        try:
            return await run_episode(environment, scripted(["a"]), EpisodeLimits(step_timeout_s=0.1))
        finally:
            environment.may_end.set()

    episode = asyncio.run(both())
    assert (episode.stop, episode.cause) == ("failed", "timed_out")
    assert episode.detail == "step gave nothing within 0.1 s"


def test_a_failing_generation_raises_after_the_environment_was_closed() -> None:
    environment = Echo()
    with pytest.raises(RuntimeError, match="StopIteration"):
        run(environment, [])
    assert environment.closed == 1


def test_a_long_reply_is_cut_in_its_middle() -> None:
    episode = run(Echo(), ["a" * 1000 + "z"] * 2, EpisodeLimits(max_turns=2, max_reply_tokens=100))
    reply = episode.events[2]
    assert isinstance(reply, Reply)
    text = reply.messages[0]["content"]
    assert len(text) <= 100 and text.startswith("0:a") and text.endswith("az") and "characters left out] ..." in text
    assert episode.metrics["replies_cut"] == 2


@pytest.mark.parametrize("max_tokens", [0, 1, 30, 40, 60, 99, 100, 1000])
def test_the_cut_text_fits_whatever_counts_it(max_tokens: int) -> None:
    text = "".join(chr(97 + number % 26) for number in range(100))
    for count in (len, lambda text: len(text.split()), lambda text: (len(text) + 3) // 4):
        cut = cut_middle(text, max_tokens, count)
        assert count(cut) <= max_tokens or cut == ""
        if max_tokens * MAX_CHARACTERS_PER_TOKEN >= len(text):
            assert (cut == text) == (count(text) <= max_tokens)
    assert len(cut_middle("x" * 10**7, 50, len)) <= 50


def test_the_game_can_be_won_by_halving() -> None:
    low, high, rewards = 1, 100, []
    game = NumberGuessing(PROMPT, 0)
    assert "from 1 to 100" in game.start()[0]["content"]
    while True:
        answer = game.step(Turn(f"Perhaps {(low + high) // 2}?"))
        if isinstance(answer, End):
            rewards.append(answer.reward)
            break
        if answer.messages[0]["content"] == "It is higher.":
            low = (low + high) // 2 + 1
        else:
            high = (low + high) // 2 - 1
    assert rewards[0] is not None and 0 < rewards[0] <= 1


def test_the_game_ends_when_the_guesses_are_spent_and_is_the_same_for_a_prompt() -> None:
    texts = ["no idea", "9" * 50, "0"]
    episodes = [run(NumberGuessing(PROMPT, sample, max_guesses=3), texts) for sample in range(2)]
    assert episodes[0] == episodes[1]
    assert (episodes[0].stop, episodes[0].reward, episodes[0].metrics["guesses"]) == ("environment", 0.0, 3)
    with pytest.raises(InputError, match="must be at least 1"):
        NumberGuessing(PROMPT, 0, max_guesses=0)
