"""An address for agents of other frameworks: what they send to it asks the run's own loop for a turn.

A framework knows a ``base_url`` and no coroutines. ``AgentAddress`` is one server of this process on loopback; every
episode has a path of its own there, which nobody can guess.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from transformers import PreTrainedTokenizerBase

from mega_rl.data.rows.messages import Message
from mega_rl.environments.agent import Generate
from mega_rl.environments.protocol import Turn
from mega_rl.environments.tools import Parser
from mega_rl.errors import InputError
from mega_rl.serving.conversations import Key, key_of, read_back
from mega_rl.serving.openai_answers import AnswerForm, ClientAnswer, calls_of, error
from mega_rl.serving.openai_requests import chat_of

# What the run decides: an agent that asks for something else would be trained as what it is not.
OF_THE_RUN: Mapping[str, tuple[Any, ...]] = {
    "logprobs": (None, False),
    "max_completion_tokens": (None,),
    "max_tokens": (None,),
    "n": (None, 1),
    "seed": (None,),
    "stop": (None, []),
    "stream": (None, False),
    "temperature": (None,),
}


@dataclass
class _Caller:
    """One episode at the address."""

    generate: Generate
    prompt_text: str
    parse: Parser | None
    said: list[Key] = field(default_factory=list)  # messages that the model has read or written

    def new(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Those that the model has not read. Raises InputError: the conversation does not go on from what it has."""
        keys = [key_of(message) for message in messages]
        if not self.said:
            place = 0
            for message in messages:
                place = self.prompt_text.find(message["content"], place)
                if place < 0:
                    raise InputError("the first request of an episode must be the messages of its prompt")
            return ()
        if keys[: len(self.said)] != self.said or len(keys) == len(self.said):
            raise InputError("a request must go on from the last answer: earlier messages were changed or left out")
        return messages[len(self.said) :]


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Of none: they are the run's."""
        yield


class AgentAddress:
    """A port of loopback for the episodes of one event loop."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._callers: dict[str, _Caller] = {}
        self._port: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None
        self._server: uvicorn.Server | None = None

    @contextlib.asynccontextmanager
    async def of(self, generate: Generate, prompt_text: str, parse: Parser | None = None) -> AsyncIterator[str]:
        """A ``base_url`` for one episode.

        Args:
            generate: of the episode.
            prompt_text: what the model reads first; the first request must be the messages that it was made of.
            parse: finds calls of tools in a turn.
        """
        if self._port is None:
            self._open()
        assert self._port is not None
        name = secrets.token_hex(16)
        self._callers[name] = _Caller(generate, prompt_text, parse)
        try:
            yield f"http://127.0.0.1:{self._port.getsockname()[1]}/{name}/v1"
        finally:
            del self._callers[name]

    def _open(self) -> None:
        app = Starlette(routes=[Route("/{name}/v1/chat/completions", self._answer, methods=["POST"])])
        self._port = socket.create_server(("127.0.0.1", 0), backlog=2048)
        settings = uvicorn.Config(app, loop="asyncio", http="h11", ws="none", lifespan="off", log_level="warning")
        self._server = _Server(settings)
        self._task = asyncio.ensure_future(self._server.serve([self._port]))

    async def close(self) -> None:
        if self._server is not None and self._task is not None and self._port is not None:
            self._server.should_exit = True
            await self._task
            self._port.close()

    async def _answer(self, request: Request) -> Response:
        caller = self._callers.get(request.path_params["name"])
        if caller is None:
            return JSONResponse(error(404, "the episode is over", "not_found_error"), 404)
        try:
            return JSONResponse(await self._turn(caller, await request.json()))
        except RuntimeError as trouble:  # of `generate`: another turn is under way
            return JSONResponse(error(409, str(trouble), "conflict_error"), 409)
        except ValueError as trouble:  # InputError, or no JSON
            return JSONResponse(error(400, str(trouble), "invalid_request_error"), 400)

    async def _turn(self, caller: _Caller, body: Any) -> dict[str, Any]:
        chat = chat_of(body, 1.0)
        for name, allowed in OF_THE_RUN.items():
            if body.get(name) not in allowed:
                raise InputError(f"{name} is the run's to choose: leave it out")
        new, keys = caller.new(chat.messages), [key_of(message) for message in chat.messages]
        turn = await caller.generate(new)
        answer = _answer_of(turn, caller.parse if chat.tools else None)
        said = read_back(answer.message)
        caller.said = keys if said is None else [*keys, key_of(said)]
        return AnswerForm("chat", "policy", chat.asked, self._tokenizer).whole([answer], 0)


def _answer_of(turn: Turn, parse: Parser | None) -> ClientAnswer:
    text, calls = calls_of(turn.text, parse)
    reason = "tool_calls" if calls else turn.finish_reason
    return ClientAnswer(0, turn.token_ids, [0.0] * len(turn.token_ids), text, reason, calls)
