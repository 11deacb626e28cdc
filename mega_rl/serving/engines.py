"""Engines that answer requests as they come: a thread for each sampler, and one event loop that asks them.

Requests of one session go to one engine, which has their beginning in its cache, unless that engine has clearly more to
do than another.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import itertools
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Literal

from mega_rl.errors import InputError
from mega_rl.rollout.engine import Piece, Request, Sampler, StreamingSampler
from mega_rl.types import Prompt, Trajectory

AFFINITY_MARGIN = 2  # responses that the engine of a session may have more than the least loaded one
Event = Piece | Trajectory | Exception
Tell = Callable[[Event], None]


class FullError(Exception):
    """As many responses are under way as may be; the message says so."""


class EngineLostError(Exception):
    """An engine failed and answers no more."""


class _EngineThread(threading.Thread):
    """Submits to one sampler and steps it; whoever asked is told what became of it."""

    def __init__(self, sampler: Sampler, name: str, prepare: Callable[[], None]) -> None:
        super().__init__(name=name, daemon=True)
        self.load = 0  # responses asked for and not ended; counted by the event loop
        self.failure: BaseException | None = None
        self._sampler, self._prepare = sampler, prepare
        self._streaming = sampler if isinstance(sampler, StreamingSampler) else None
        self._change = threading.Condition()
        self._inbox: list[tuple[Literal["submit", "abort"], Sequence[Request], Tell]] = []
        self._is_closing = False
        self._told: dict[int, Tell] = {}  # prompt index -> who asked; in this thread only

    def put(self, what: Literal["submit", "abort"], requests: Sequence[Request], tell: Tell) -> None:
        with self._change:
            if self.failure is not None:
                tell(EngineLostError(f"{self.name} has failed: {self.failure}"))
                return
            self._inbox.append((what, requests, tell))
            self._change.notify()

    def close(self) -> None:
        """End the thread after its present step."""
        with self._change:
            self._is_closing = True
            self._change.notify()

    def run(self) -> None:
        try:
            self._prepare()
            while self._take():
                if self._sampler.num_unfinished:
                    self._step()
        except BaseException as error:  # noqa: BLE001 - told to whoever waits, and to whoever asks later
            with self._change:
                self.failure = error
                told = [*self._told.values(), *(tell for _, _, tell in self._inbox)]
            for tell in told:
                tell(EngineLostError(f"{self.name} has failed: {error}"))
            raise

    def _take(self) -> bool:
        """Submit and abort what has come; waits if there is nothing to do. False: the thread is to end."""
        with self._change:
            self._change.wait_for(lambda: self._inbox or self._is_closing or self._sampler.num_unfinished)
            if self._is_closing:
                return False
            taken, self._inbox = self._inbox, []
        self._told |= {requests[0].prompt.index: tell for what, requests, tell in taken if what == "submit"}
        for what, requests, tell in taken:
            if what == "abort":
                self._told.pop(requests[0].prompt.index, None)
                if self._streaming is not None:
                    self._streaming.abort(requests)
                continue
            try:
                self._sampler.submit(requests)
            except InputError as error:
                del self._told[requests[0].prompt.index]
                tell(error)
        return True

    def _step(self) -> None:
        ended = self._sampler.step()
        for piece in self._streaming.pieces() if self._streaming is not None else ():
            if (tell := self._told.get(piece.prompt_index)) is not None:
                tell(piece)
        for one in ended:
            if (tell := self._told.get(one.prompt.index)) is not None and isinstance(one, Trajectory):
                tell(one)


class Engines:
    """Samplers behind one door. All methods belong to one event loop."""

    def __init__(
        self, samplers: Sequence[Sampler], max_requests: int = 256, prepare: Callable[[], None] = lambda: None
    ) -> None:
        """
        Args:
            max_requests: responses that each engine takes at once, waiting ones included; further ones are refused.
            prepare: called once in each engine's thread, before its first step.
        """
        self.max_requests = max_requests
        self._threads = [_EngineThread(sampler, f"engine {number}", prepare) for number, sampler in enumerate(samplers)]
        self._numbers = itertools.count()  # of prompts, which are how responses are told apart
        for thread in self._threads:
            thread.start()

    @property
    def loads(self) -> list[int]:
        """Responses under way, by engine."""
        return [thread.load for thread in self._threads]

    @property
    def failure(self) -> str | None:
        """What became of an engine that has failed."""
        return next((f"{t.name}: {t.failure}" for t in self._threads if t.failure is not None), None)

    def choose(self, session: str | None, num_responses: int) -> int:
        """The engine that takes so many more responses; one that has failed only if all have. Raises FullError."""
        loads = [thread.load for thread in self._threads]
        working = [number for number, thread in enumerate(self._threads) if thread.failure is None]
        engine = min(working or range(len(loads)), key=loads.__getitem__)
        if session is not None and (home := home_of(session, len(loads))) in working:
            engine = home if loads[home] <= loads[engine] + AFFINITY_MARGIN else engine
        if loads[engine] + num_responses > self.max_requests:
            raise FullError(f"{loads[engine]} responses are under way on each engine; try again later")
        return engine

    async def sample(self, requests: Sequence[Request], session: str | None = None) -> AsyncGenerator[Event, None]:
        """Pieces, where the sampler shows them, and one trajectory per request, as they come.

        The requests differ in their sample numbers; their prompts are the same and get a number of their own here.
        Ending the iteration early gives up what is still under way.

        Raises:
            FullError: before anything was sampled.
            InputError: the engine refuses the requests.
            EngineLostError: the engine has failed.
        """
        thread = self._threads[self.choose(session, len(requests))]
        index, prompt = next(self._numbers), requests[0].prompt
        own = [
            dataclasses.replace(request, prompt=dataclasses.replace(request.prompt, index=index))
            for request in requests
        ]
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

        def tell(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(events.put_nowait, event)

        num_left = len(own)
        thread.load += num_left
        thread.put("submit", own, tell)
        try:
            while num_left:
                event = await events.get()
                if isinstance(event, Exception):
                    raise event
                if isinstance(event, Trajectory):
                    num_left -= 1
                    thread.load -= 1
                    event = _with_prompt(event, prompt)
                yield event
        finally:
            thread.load -= num_left
            thread.put("abort", own, tell)  # forgets who asked, too

    def close(self, timeout_s: float = 30.0) -> None:
        for thread in self._threads:
            thread.close()
        for thread in self._threads:
            thread.join(timeout_s)


def home_of(session: str, num_engines: int) -> int:
    """The engine of a session: the same in every process, unlike Python's own hash."""
    digest = hashlib.blake2b(session.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % num_engines


def _with_prompt(trajectory: Trajectory, prompt: Prompt) -> Trajectory:
    return dataclasses.replace(trajectory, prompt=prompt)
