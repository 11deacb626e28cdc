"""Adapters of other libraries' environments and tools, over small fakes of the interfaces that they use.

The libraries themselves are not needed here; that the fakes are like them was seen once with gymnasium 1.4.0 and mcp
2.3.0.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from mega_rl.environments.built_in.gymnasium_games import GymnasiumGame
from mega_rl.environments.built_in.mcp_tools import McpTools
from mega_rl.environments.episode import Episode, EpisodeLimits, run_episode
from mega_rl.environments.protocol import Message, Reply, Turn
from mega_rl.environments.tools import Parsed, ToolCall
from mega_rl.errors import InputError
from mega_rl.types import Prompt

PROMPT = Prompt(3, (1,), "?", "", "test")
LIMITS = EpisodeLimits(max_turns=9, step_timeout_s=120.0, close_timeout_s=120.0)


def run(environment: Any, texts: Sequence[str]) -> tuple[Episode, list[str]]:
    """The episode, and what it told the model."""
    left = iter(texts)

    async def generate(messages: Sequence[Message]) -> Turn:
        return Turn(next(left))

    episode = asyncio.run(run_episode(environment, generate, LIMITS))
    replies = [event for event in episode.events if isinstance(event, Reply)]
    return episode, [str(message["content"]) for reply in replies for message in reply.messages]


Discrete = type("Discrete", (SimpleNamespace,), {})
Text = type("Text", (SimpleNamespace,), {})
Box = type("Box", (SimpleNamespace,), {})


class Corridor:
    """Of gymnasium's interface: 1 goes on, 0 goes back, and the fourth place is the end."""

    def __init__(self, space: Any) -> None:
        self.action_space, self.place, self.seeds, self.is_closed = space, 0, list[int](), False

    def reset(self, *, seed: int) -> tuple[int, dict[str, Any]]:
        self.seeds.append(seed)
        return self.place, {}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.place += 1 if str(action) == "1" else -1
        return self.place, 0.25, self.place == 3, self.place < 0, {}

    def close(self) -> None:
        self.is_closed = True


def test_a_game_is_played_in_words() -> None:
    game = Corridor(Discrete(start=0, n=2))
    episode, told = run(GymnasiumGame(PROMPT, 0, game=lambda: game), ["I take 1", "jump", "7", "no, 1", "1"])
    assert told == ["0", "1", *["error: write one whole number from 0 to 1"] * 2, "2"]
    assert (episode.stop, episode.reward, game.is_closed) == ("environment", 0.25, True)
    assert episode.turn_rewards == (0.25, 0.0, 0.0, 0.25, 0.0), "the last one is that of the end"
    assert (episode.metrics["actions"], episode.metrics["invalid_actions"]) == (3, 2)
    lost = run(GymnasiumGame(PROMPT, 0, game=lambda: Corridor(Discrete(start=0, n=2))), ["jump"] * LIMITS.max_turns)[0]
    assert (lost.stop, lost.turn_rewards) == ("turns", (0.0,) * LIMITS.max_turns), "0, not unknown"
    other = Corridor(Text())
    assert run(GymnasiumGame(PROMPT, 1, game=lambda: other), [" 0 "])[0].reward == 0.25, "cut off below the first place"
    assert other.seeds == game.seeds, "samples of a prompt play the same game"


def test_a_game_that_cannot_be_played_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="kind Box is not read from text by itself: give read_action"):
        GymnasiumGame(PROMPT, 0, game=lambda: Corridor(Box()))
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(InputError, match="needs gymnasium: pip install gymnasium"):
        GymnasiumGame(PROMPT, 0, game="FrozenLake-v1")

    def make(name: str, **options: Any) -> Any:
        raise LookupError(f"no {name} with {options}")

    monkeypatch.setitem(sys.modules, "gymnasium", SimpleNamespace(make=make))
    with pytest.raises(InputError, match=r"does not make the game 'X': no X with \{'a': 1\}"):
        GymnasiumGame(PROMPT, 0, game="X", options={"a": 1})


class Server:
    """Of an MCP client's interface: what a session does, and how many there were."""

    def __init__(self) -> None:
        self.num_open, self.num_opened, self.tasks = 0, 0, set[Any]()

    @contextlib.asynccontextmanager
    async def open(self, server: Any) -> AsyncIterator[Any]:
        begun = asyncio.current_task()
        self.num_open, self.num_opened = self.num_open + 1, self.num_opened + 1
        try:
            yield self
        finally:
            self.num_open -= 1
            assert asyncio.current_task() is begun, "a session is closed where it was opened"

    async def list_tools(self) -> Any:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        return SimpleNamespace(tools=[SimpleNamespace(name="double", description="Twice.", input_schema=schema)])

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        if "a" not in arguments:
            return SimpleNamespace(content=[SimpleNamespace(type="text", text="no a")], is_error=True)
        parts = [SimpleNamespace(type="text", text=str(2 * arguments["a"])), SimpleNamespace(type="image", data="")]
        return SimpleNamespace(content=parts, is_error=False)


def parse(text: str) -> Parsed:
    calls = [ToolCall("double", part) for part in text.split(";") if part.startswith("{")]
    return Parsed("", calls)


def test_tools_of_a_server_answer_calls() -> None:
    server = Server()

    def made() -> McpTools:
        return McpTools(PROMPT, 0, server="http://127.0.0.1:1/mcp", parse=parse, open_session=server.open)

    calls = ";".join(json.dumps(arguments) for arguments in ({"a": 4}, {}, {"name": 1}))
    tools = made()
    assert tools.tools[0]["function"]["name"] == "double" and server.num_opened == 1
    episode, told = run(tools, [calls, "done"])
    assert told == ["8\n[image]", "error: no a", "error: no a"] and episode.stop == "environment"
    assert episode.metrics["tool_calls"] == 3 and episode.metrics["tool_errors"] == 2
    run(made(), ["done"])
    assert (server.num_open, server.num_opened) == (0, 3), "the tools are asked for once, each episode has a session"


def test_a_server_that_does_not_answer_is_refused_or_fails_its_episode() -> None:
    server = Server()

    @contextlib.asynccontextmanager
    async def broken(where: Any) -> AsyncIterator[Any]:
        raise ConnectionError("nobody there")
        yield

    with pytest.raises(InputError, match="does not tell its tools: ConnectionError: nobody there"):
        McpTools(PROMPT, 0, server="http://127.0.0.1:2/mcp", parse=parse, open_session=broken)
    tools = McpTools(PROMPT, 0, server="http://127.0.0.1:3/mcp", parse=parse, open_session=server.open)
    tools._open = broken
    assert run(tools, ["done"])[0].cause == "raised"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(InputError, match="needs the package mcp, of version 2: pip install"):
        McpTools(PROMPT, 0, server=("no", "server"), parse=parse)
