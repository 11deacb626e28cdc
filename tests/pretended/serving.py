"""An endpoint over engines that answer by rule, at a real port; for tests of what agents see and what is recorded."""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import uvicorn
from transformers import PreTrainedTokenizerBase

from mega_rl.environments.tools import Parsed, ToolCall
from mega_rl.rollout.engine import Piece, Request
from mega_rl.serving.conversations import ConversationRenderer
from mega_rl.serving.endpoint import Endpoint, Model
from mega_rl.serving.engines import Engines
from mega_rl.serving.sessions import Sessions
from mega_rl.serving.web import application
from mega_rl.types import Score, Trajectory
from tests.models.chat_templates import ends_of, tokenizer_of
from tests.pretended.samplers import Modelless

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
MODEL = Model("tiny", max_model_len=4096, vocab_size=400)


def parse_calls(text: str) -> Parsed:
    found = [json.loads(call) for call in CALL.findall(text)]
    return Parsed(text.split("<tool_call>")[0], [ToolCall(c["name"], json.dumps(c["arguments"])) for c in found])


def by_seed(tokenizer: PreTrainedTokenizerBase) -> Callable[[Request], list[int]]:
    """Up to 12 tokens that the seed alone decides, and the end of the turn."""

    def respond(request: Request) -> list[int]:
        source = random.Random(request.seed)
        letters = tokenizer("".join(source.choices("abcdefghij", k=source.randint(1, 12))))["input_ids"]
        return [*letters, tokenizer.eos_token_id]

    return respond


class FakeEngine(Modelless):
    """A ``StreamingSampler``: each step adds a token to every response, at most `width` of them at a time."""

    def __init__(self, respond: Callable[[Request], list[int]], tokenizer: PreTrainedTokenizerBase, width: int = 1000):
        super().__init__()
        self.respond, self.tokenizer, self.width = respond, tokenizer, width
        self.aborted: list[Request] = []
        self.largest = 0  # requests under way at once
        self.may_step = threading.Event()  # cleared: nothing is sampled
        self.may_step.set()
        self.pause_s = 0.0  # before each step
        self._under_way: Any = {}  # (prompt, sample) -> request, tokens, place
        self._pieces: list[Piece] = []

    def submit(self, requests: Sequence[Request]) -> None:
        self.requests += requests
        for request in requests:
            key = request.prompt.index, request.sample_index
            assert key not in self._under_way
            self._under_way[key] = request, self.respond(request)[: request.max_tokens], 0
        self.largest = max(self.largest, len(self._under_way))

    def abort(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if self._under_way.pop((request.prompt.index, request.sample_index), None) is not None:
                self.aborted.append(request)

    def pieces(self) -> Sequence[Piece]:
        return self._pieces

    def step(self) -> list[Trajectory]:
        self._pieces, ended = [], []
        if not self.may_step.wait(0.01):
            return []
        time.sleep(self.pause_s)
        for key in list(self._under_way)[: self.width]:
            request, ids, place = self._under_way[key]
            token, logprob = ids[place], self._logprob(ids[place])
            text = self.tokenizer.decode([token], skip_special_tokens=True)
            self._pieces.append(Piece(*key, (token,), (logprob,), text))
            self._under_way[key] = request, ids, place + 1
            if place + 1 == len(ids):
                del self._under_way[key]
                ended.append(self._trajectory(request, ids))
        return ended

    def _trajectory(self, request: Request, ids: list[int]) -> Trajectory:
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        reason = "stop" if ids[-1] == self.tokenizer.eos_token_id else "length"
        logprobs = [self._logprob(token) for token in ids]
        return Trajectory.single_turn(request.prompt, request.sample_index, ids, logprobs, text, reason, 0)

    @staticmethod
    def _logprob(token: int) -> float:
        return -(1 + token) / 1024  # exact in float32


@dataclass
class Served:
    """A server under test."""

    url: str
    endpoint: Endpoint
    engines: list[FakeEngine]
    taken: list[tuple[Sequence[Trajectory], Score]]  # what was rewarded


@contextlib.contextmanager
def serving(
    respond: Callable[[Request], list[int]] | None = None,
    *,
    family: str = "qwen2.5",
    num_engines: int = 1,
    max_requests: int = 256,
    width: int = 1000,
    keys: Sequence[str] = (),
) -> Iterator[Served]:
    """An endpoint at a free port of loopback."""
    tokenizer = tokenizer_of(family)
    rule = by_seed(tokenizer) if respond is None else respond
    engines = [FakeEngine(rule, tokenizer, width) for _ in range(num_engines)]
    taken: list[tuple[Sequence[Trajectory], Score]] = []
    sessions = Sessions(tokenizer, lambda trajectories, score: taken.append((trajectories, score)))
    renderer = ConversationRenderer(tokenizer, ends_of(family))
    endpoint = Endpoint(Engines(engines, max_requests), renderer, MODEL, sessions, parse_calls)
    with at_port(endpoint, keys) as url:
        yield Served(url, endpoint, engines, taken)


@contextlib.contextmanager
def at_port(endpoint: Endpoint, keys: Sequence[str] = ()) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0), backlog=512) as port:
        settings = uvicorn.Config(
            application(endpoint, keys),
            loop="asyncio",
            http="h11",
            log_level="warning",
            timeout_graceful_shutdown=5,
            timeout_keep_alive=600,  # longer than a client keeps a connection, so that none is closed while it is used
        )
        server = uvicorn.Server(settings)
        thread = threading.Thread(target=server.run, args=([port],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{port.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()
