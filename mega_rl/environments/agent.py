"""An agent of the user's as an environment: a function that asks for turns, instead of one that answers them.

``async def episode(prompt, generate)`` runs once for every response. ``await generate(messages)`` shows the model what
it has not read yet and returns its next turn; what the function returns is the reward. It may do anything in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from mega_rl.environments.protocol import End, Message, Reply, Turn
from mega_rl.environments.waiting import RaisedError
from mega_rl.types import Prompt

CLOSE_S = 5.0  # for a function that is cancelled


class Generate(Protocol):
    """What an agent's function asks for turns with."""

    def __call__(self, messages: Sequence[Message] | str = (), reward: float | None = None) -> Awaitable[Turn]:
        """From what the model has not read yet, its next turn.

        Args:
            messages: a text is one message of the user; nothing: the model reads the prompt.
            reward: of the turn before.
        """
        ...


EpisodeFunction = Callable[[Prompt, Generate], Awaitable[End | float | None]]


class AgentEnvironment:
    """Runs an agent's function beside the episode; `start` and `step` pass messages and turns between the two.

    The function ends the episode by returning: an `End`, a reward, or None for the rewards of the run. If the episode
    ends first, by a limit, the function is cancelled.
    """

    def __init__(
        self, prompt: Prompt, sample_index: int, *, episode: EpisodeFunction, tools: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """
        Args:
            episode: a coroutine function.
            tools: JSON schemas that the chat template shows the model; the function answers the calls itself.
        """
        self.tools = list(tools)
        self._prompt, self._episode = prompt, episode
        self._asked: asyncio.Queue[Reply] = asyncio.Queue()
        self._turn: asyncio.Future[Turn] | None = None  # that the function waits for
        self._task: asyncio.Task[End | float | None] | None = None

    async def start(self) -> Sequence[Message]:
        self._task = asyncio.ensure_future(self._run())
        answer = await self._next()
        if isinstance(answer, End):
            raise RuntimeError("the agent ended before it asked for a turn")
        if answer.reward is not None:
            raise RuntimeError("the agent gave a reward before there was a turn")
        return answer.messages

    async def step(self, turn: Turn) -> Reply | End:
        assert self._turn is not None, "a turn that nobody asked for"
        waiting, self._turn = self._turn, None
        if not waiting.done():  # else the function has given up waiting
            waiting.set_result(turn)
        return await self._next()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=CLOSE_S)  # the function may catch it, and go on
            if self._task.done() and not self._task.cancelled():
                self._task.exception()  # looked at, so that asyncio does not report it

    async def generate(self, messages: Sequence[Message] | str = (), reward: float | None = None) -> Turn:
        """What the function is given; ``reward`` is of the turn before. Raises RuntimeError: another is waited for."""
        if self._turn is not None:
            raise RuntimeError("an agent waits for one turn at a time: another is under way")
        text = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        self._turn = asyncio.get_running_loop().create_future()
        self._asked.put_nowait(Reply(text, reward=reward))
        return await self._turn

    async def _run(self) -> End | float | None:
        try:
            return await self._episode(self._prompt, self.generate)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # the user's code: SystemExit would end the event loop
            raise RaisedError(error) from error

    async def _next(self) -> Reply | End:
        """What the function asks the model next, or how it has ended. Raises what it raised."""
        assert self._task is not None
        asked = asyncio.ensure_future(self._asked.get())
        try:
            await asyncio.wait({asked, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result()
        finally:
            asked.cancel()
        returned = self._task.result()
        return returned if isinstance(returned, End) else End(returned)
