"""What an endpoint does with a request, whatever carries it: prompts made, engines asked, turns recorded."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from mega_rl.data.tokens.tokenizer import encode, is_surely_longer
from mega_rl.environments.tools import Parser
from mega_rl.errors import InputError
from mega_rl.rollout.engine import Piece, Request
from mega_rl.rollout.requests import sample_seed
from mega_rl.serving.conversations import ConversationRenderer, Conversations, Opening, read_back
from mega_rl.serving.engines import Engines
from mega_rl.serving.openai_answers import AnswerForm, ClientAnswer, Kind, answer_of
from mega_rl.serving.openai_requests import Asked, chat_of, check_ids, completion_of, tokens_of
from mega_rl.serving.sessions import AgentSession, Sessions
from mega_rl.types import Prompt, Trajectory


@dataclass(frozen=True)
class Model:
    """What is served."""

    name: str
    max_model_len: int  # prompt and response together, tokens
    vocab_size: int
    temperature: float = 1.0  # of requests that name none, and of every turn that is recorded


@dataclass
class EndpointRequest:
    """One prompt, and the responses that are asked for to it."""

    form: AnswerForm
    opening: Opening
    session: AgentSession | None
    parse: Parser | None  # of calls; None: there are no tools
    number: int = 0  # of the prompt within its request

    @property
    def asked(self) -> Asked:
        return self.form.asked


@dataclass
class Endpoint:
    """Engines, a model's words and the sessions of agents."""

    engines: Engines
    renderer: ConversationRenderer
    model: Model
    sessions: Sessions | None = None  # None: nothing is recorded
    parse: Parser | None = None  # None: tools are refused
    num_sampled: int = 0  # tokens, so far
    _words: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "words"))

    def turns(self, kind: Kind, body: Any, session: str | None) -> list[EndpointRequest]:
        """What a request asks for, whose prompts are still to be rendered. Raises InputError."""
        if kind == "chat":
            chat = chat_of(body, self.model.temperature)
            if chat.tools and self.parse is None:
                raise InputError("tools need the parser of the model's calls: start the server with --tool-parser")
            owner, conversations = self._owner(session, chat.asked, 1)
            self._check_size(chat.messages)
            opening = conversations.open(chat.messages, chat.tools)
            return [EndpointRequest(self._form(kind, chat.asked), opening, owner, self.parse if chat.tools else None)]
        if kind == "tokens":
            ids, asked = tokens_of(body, self.model.temperature)
            prompts: list[str | list[int]] = [ids]
        else:
            prompts, asked = completion_of(body, self.model.temperature)
        if asked.is_streamed and len(prompts) > 1:
            raise InputError("a stream takes one prompt: send the others by themselves")
        owner, conversations = self._owner(session, asked, len(prompts))
        form = self._form(kind, asked)
        return [
            EndpointRequest(form, conversations.open_tokens(self._ids(prompt)), owner, None, number)
            for number, prompt in enumerate(prompts)
        ]

    def _owner(self, name: str | None, asked: Asked, num_prompts: int) -> tuple[AgentSession | None, Conversations]:
        if name is None or self.sessions is None:
            return None, Conversations()
        if asked.n > 1 or num_prompts > 1:
            raise InputError("a recorded session takes one response to one prompt at a time; open one for each sample")
        if asked.temperature != self.model.temperature:
            raise InputError(
                f"recorded turns are sampled at temperature {self.model.temperature:g}, which training goes by: leave "
                "temperature out"
            )
        found = self.sessions.use(name)
        return found, found.conversations

    def _form(self, kind: Kind, asked: Asked) -> AnswerForm:
        return AnswerForm(kind, self.model.name, asked, self.renderer.tokenizer)

    def _check_size(self, texts: Sequence[Any]) -> None:
        if is_surely_longer(self.renderer.tokenizer, [list(texts)], self.model.max_model_len):
            raise InputError(f"the prompt has more than {self.model.max_model_len} tokens, the length of the model")

    def _ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            self._check_size([{"content": prompt}])
            return encode(self.renderer.tokenizer, prompt, add_special_tokens=True)
        check_ids(prompt, self.model.vocab_size)
        return prompt

    async def whole(self, turns: Sequence[EndpointRequest], session: str | None) -> dict[str, Any]:
        """The answer to a request. Raises as `answers`."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._collected(turn, session)) for turn in turns]
        except ExceptionGroup as several:  # the first one; it had the others cancelled
            raise several.exceptions[0] from None
        found = [answer for task in tasks for answer in task.result()]
        return turns[0].form.whole(found, sum(len(turn.opening.token_ids) for turn in turns))

    async def _collected(self, turn: EndpointRequest, session: str | None) -> list[ClientAnswer]:
        async with contextlib.aclosing(self.answers(turn, session)) as events:
            found = [event async for event in events if isinstance(event, ClientAnswer)]
        return sorted(found, key=lambda answer: answer.number)

    async def stream(self, turn: EndpointRequest, session: str | None) -> AsyncGenerator[bytes, None]:
        """The events of one prompt's answers. Raises as `answers`."""
        form, seen = turn.form, set[int]()
        num_sampled, is_held = 0, turn.parse is not None  # what may be a call is not told before it is one or not
        async with contextlib.aclosing(self.answers(turn, session)) as events:
            async for event in events:
                number = event.number if isinstance(event, ClientAnswer) else event.sample_index
                if number not in seen and (opening := form.first(number, turn.opening.token_ids)) is not None:
                    yield opening
                if isinstance(event, Piece):
                    seen.add(number)
                    if not is_held:
                        yield form.piece(number, event.text, event.token_ids, event.logprobs)
                    continue
                if is_held or number not in seen:
                    yield form.piece(number, event.text, event.token_ids, event.logprobs)
                if event.calls:
                    yield form.calls(event)
                num_sampled += len(event.token_ids)
                yield form.last(event)
        yield form.end(len(turn.opening.token_ids), num_sampled)

    async def answers(self, turn: EndpointRequest, session: str | None) -> AsyncGenerator[Piece | ClientAnswer, None]:
        """Pieces and whole answers to one prompt, as they come; a turn of a session is recorded before it is told.

        Raises:
            InputError: the prompt cannot be rendered, or leaves no room.
            FullError, EngineLostError: as ``Engines.sample``.
        """
        owner, opening, is_finished = turn.session, turn.opening, False
        if owner is not None:
            owner.num_under_way += 1
            opening.take()
        try:
            await asyncio.get_running_loop().run_in_executor(self._words, opening.render, self.renderer)
            async with contextlib.aclosing(self.engines.sample(self._requests(turn), session)) as events:
                async for event in events:
                    if isinstance(event, Trajectory):
                        self.num_sampled += event.num_sampled
                        number = turn.number * turn.asked.n + event.sample_index
                        answer = answer_of(number, event, self.renderer.tokenizer, turn.parse)
                        if owner is not None:
                            message = read_back(answer.message) if turn.form.kind == "chat" else None
                            owner.conversations.finish(opening, event, message)
                            is_finished = True
                        yield answer
                    elif isinstance(event, Piece):
                        yield event
        finally:
            if owner is not None:
                owner.num_under_way -= 1
                if not is_finished:
                    opening.leave()

    def _requests(self, turn: EndpointRequest) -> list[Request]:
        """Raises InputError."""
        asked, ids = turn.asked, turn.opening.token_ids
        room = self.model.max_model_len - len(ids)
        if not ids or room < 1:
            raise InputError(
                f"the prompt has {len(ids)} tokens, and the model takes 1 to {self.model.max_model_len - 1}"
            )
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        return [
            Request(
                Prompt(0, tuple(ids), "", "", ""),
                number,
                sample_seed(seed, 0, turn.number, number),
                min(room, asked.max_tokens or room),
                asked.temperature,
                with_logprobs=asked.with_logprobs or turn.session is not None,
                stop=asked.stop,
            )
            for number in range(asked.n)
        ]

    def close(self) -> None:
        self.engines.close()
        self._words.shutdown(wait=False, cancel_futures=True)
