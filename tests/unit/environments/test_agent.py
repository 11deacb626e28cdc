"""Agents as functions, driven through episodes with scripted model texts."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from mega_rl.environments.agent import AgentEnvironment, Generate
from mega_rl.environments.episode import Episode, EpisodeLimits, run_episode
from mega_rl.environments.protocol import End, Message, Reply, Turn
from mega_rl.types import Prompt

PROMPT = Prompt(3, (1,), "?", "", "test")
LIMITS = EpisodeLimits(step_timeout_s=120.0, close_timeout_s=120.0)


def run(episode: Any, texts: Sequence[str], limits: EpisodeLimits = LIMITS) -> tuple[Episode, list[Sequence[Message]]]:
    """The episode, and what the model was shown before each turn."""
    left, read = iter(texts), list[Sequence[Message]]()

    async def generate(messages: Sequence[Message]) -> Turn:
        read.append(messages)
        return Turn(next(left))

    async def all_of_it() -> Episode:
        found = await run_episode(AgentEnvironment(PROMPT, 0, episode=episode), generate, limits)
        assert len(asyncio.all_tasks()) == 1, "nothing of the agent is left"
        return found

    return asyncio.run(all_of_it()), read


def test_an_agent_asks_for_turns_and_returns_its_reward() -> None:
    async def episode(prompt: Prompt, generate: Generate) -> float:
        assert prompt is PROMPT
        first = await generate(())
        second = await generate([{"role": "tool", "content": first.text + "!"}])
        third = await generate("and?")
        return float(len(first.text + second.text + third.text) + third.number)

    found, read = run(episode, ["a", "bb", "ccc"])
    assert found.stop == "environment" and found.reward == 8.0 and found.metrics["turns"] == 3
    assert read == [(), ({"role": "tool", "content": "a!"},), ({"role": "user", "content": "and?"},)]
    replies = [event.messages[0]["content"] for event in found.events if isinstance(event, Reply)]
    assert replies == ["a!", "and?"]


def test_an_agent_may_reward_every_turn() -> None:
    async def episode(prompt: Prompt, generate: Generate) -> float:
        first = await generate(())
        await generate("on", reward=float(first.text))
        await generate("on")
        return 2.0

    found, _ = run(episode, ["0.5", "b", "c"])
    assert (found.reward, found.turn_rewards) == (2.0, (0.5, 0.0, 0.0))

    async def early(prompt: Prompt, generate: Generate) -> None:
        await generate((), reward=1.0)

    assert "before there was a turn" in run(early, [])[0].detail


def test_an_agent_may_leave_the_reward_to_the_run_and_tell_metrics() -> None:
    async def none(prompt: Prompt, generate: Generate) -> None:
        await generate("begin")

    async def end(prompt: Prompt, generate: Generate) -> End:
        await generate(())
        return End(None, {"looked_up": 2})

    found, read = run(none, ["x"])
    assert (found.stop, found.reward) == ("environment", None) and read[0][0]["content"] == "begin"
    assert run(end, ["x"])[0].metrics["looked_up"] == 2


def test_what_an_agent_raises_fails_its_episode_alone() -> None:
    async def at_once(prompt: Prompt, generate: Generate) -> float:
        return 1.0

    async def later(prompt: Prompt, generate: Generate) -> float:
        await generate(())
        sys.exit(3)

    async def two_at_once(prompt: Prompt, generate: Generate) -> float:
        await asyncio.gather(generate("a"), generate("b"))
        return 1.0

    for episode, words in ((at_once, "before it asked"), (later, "SystemExit: 3"), (two_at_once, "one turn at a time")):
        found, _ = run(episode, ["x", "y"])
        assert (found.stop, found.cause) == ("failed", "raised") and words in found.detail


def test_a_limit_ends_an_agent_that_would_go_on() -> None:
    ended = []

    async def episode(prompt: Prompt, generate: Generate) -> float:
        try:
            while True:
                await generate("more")
        finally:
            ended.append(True)

    found, _ = run(episode, ["x"] * 9, EpisodeLimits(max_turns=3, step_timeout_s=120.0, close_timeout_s=120.0))
    assert (found.stop, found.metrics["turns"], ended) == ("turns", 3, [True])


@pytest.mark.parametrize("reward", ["much", float("nan")])
def test_a_reward_that_is_no_number_is_a_failure(reward: Any) -> None:
    async def episode(prompt: Prompt, generate: Generate) -> Any:
        await generate(())
        return reward

    assert run(episode, ["x"])[0].cause == "not_a_reply"
