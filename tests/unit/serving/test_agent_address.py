"""An agent with a client of its own, trained through an address: it is driven by the episode like any function."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

openai = pytest.importorskip("openai")  # comes with vLLM, which need not be there

from mega_rl.environments.agent import AgentEnvironment, Generate  # noqa: E402
from mega_rl.environments.episode import Episode, EpisodeLimits, run_episode  # noqa: E402
from mega_rl.environments.protocol import Message, Reply, Turn  # noqa: E402
from mega_rl.errors import InputError  # noqa: E402
from mega_rl.serving.agent_address import AgentAddress  # noqa: E402
from mega_rl.serving.verifiers_agents import verifiers_episode  # noqa: E402
from mega_rl.types import Prompt  # noqa: E402
from tests.models.chat_templates import tokenizer_of  # noqa: E402
from tests.pretended.serving import parse_calls  # noqa: E402

LIMITS = EpisodeLimits(max_turns=9, step_timeout_s=120.0, close_timeout_s=120.0)
ASK = [{"role": "user", "content": "What is 2 + 2?"}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}


async def run(agent: Any, texts: Sequence[str], number: int = 1) -> list[Episode]:
    """So many episodes at once of an agent, which is a function of a client and a prompt."""
    address = AgentAddress(tokenizer_of("qwen2.5"))

    async def episode(prompt: Prompt, generate: Generate) -> float:
        async with (
            address.of(generate, prompt.text, parse_calls) as url,
            openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client,
        ):
            return float(await agent(client.chat.completions.create, prompt))

    async def one(place: int) -> Episode:
        left = iter(texts)

        async def generate(messages: Sequence[Message]) -> Turn:
            return Turn(next(left).replace("PLACE", str(place)), token_ids=(1, 2))

        prompt = Prompt(place, (1,), "<user>What is 2 + 2?", "", "test")
        return await run_episode(AgentEnvironment(prompt, 0, episode=episode), generate, LIMITS)

    try:
        return await asyncio.gather(*(one(place) for place in range(number)))
    finally:
        await address.close()


def test_sixteen_agents_talk_with_their_own_episodes() -> None:
    async def agent(create: Any, prompt: Prompt) -> float:
        first = await create(model="m", messages=ASK, tools=[TOOL])
        (call,) = first.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"a": 2}
        said = first.choices[0].message.model_dump(exclude_none=True)
        more = [*ASK, said, {"role": "tool", "tool_call_id": call.id, "content": f"result {prompt.index}"}]
        last = await create(model="m", messages=more, tools=[TOOL])
        return float(last.choices[0].message.content == f"It is {prompt.index}.")

    found = asyncio.run(run(agent, [CALL, "It is PLACE."], number=16))
    assert [episode.reward for episode in found] == [1.0] * 16
    for place, episode in enumerate(found):
        (reply,) = [event for event in episode.events if isinstance(event, Reply)]
        assert [message["content"] for message in reply.messages] == [f"result {place}"]


def test_a_conversation_that_does_not_go_on_is_refused() -> None:
    async def agent(create: Any, prompt: Prompt) -> float:
        with pytest.raises(openai.BadRequestError, match="must be the messages of its prompt"):
            await create(model="m", messages=[{"role": "user", "content": "another"}])
        with pytest.raises(openai.BadRequestError, match="temperature is the run's to choose"):
            await create(model="m", messages=ASK, temperature=0.5)
        answer = await create(model="m", messages=ASK)
        changed = [*ASK, {"role": "assistant", "content": "I said this."}, {"role": "user", "content": "?"}]
        with pytest.raises(openai.BadRequestError, match="earlier messages were changed"):
            await create(model="m", messages=changed)
        said = {"role": "assistant", "content": answer.choices[0].message.content}
        await create(model="m", messages=[*ASK, said, changed[-1]])
        return 1.0

    (episode,) = asyncio.run(run(agent, ["one", "two"]))
    assert episode.reward == 1.0 and episode.metrics["turns"] == 2


class Rehearsal:
    """A fake of what is used of verifiers' environments (0.1): it drives itself with a client, and a rubric scores."""

    def __init__(self) -> None:
        self.rubric = self

    async def rollout(self, row: Any, client: Any, model: str, sampling_args: Any) -> dict[str, Any]:
        assert client.client_type == "openai_chat_completions" and row["example_id"] == 4
        async with openai.AsyncOpenAI(base_url=client.api_base_url, api_key="none", max_retries=0) as asked:
            answer = await asked.chat.completions.create(model=model, messages=row["prompt"], n=1, **sampling_args)
        return {"said": answer.choices[0].message.content, "answer": row["answer"], "error": None}

    async def score_rollout(self, state: dict[str, Any]) -> None:
        state["reward"] = float(state["said"] == state["answer"])
        state["metrics"] = {"num_turns": 1}


def test_an_environment_of_verifiers_drives_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "verifiers.types", None)
    address = AgentAddress(tokenizer_of("qwen2.5"))
    with pytest.raises(InputError, match="pip install 'verifiers<0.2'"):
        verifiers_episode(Rehearsal(), address)
    monkeypatch.setitem(sys.modules, "verifiers.types", SimpleNamespace(ClientConfig=SimpleNamespace))
    prompt = Prompt(4, (1,), "<user>What is 2 + 2?", "four", "test", {"messages": ASK})

    async def generate(messages: Sequence[Message]) -> Turn:
        return Turn("four")

    async def one() -> Episode:
        environment = AgentEnvironment(prompt, 0, episode=verifiers_episode(Rehearsal(), address))
        try:
            return await run_episode(environment, generate, LIMITS)
        finally:
            await address.close()

    episode = asyncio.run(one())
    assert (episode.stop, episode.reward, episode.metrics["num_turns"]) == ("environment", 1.0, 1.0), episode
