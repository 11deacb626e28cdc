"""Calls to the workers of engines: Ray tells which have an answer, so a call that waits costs nothing."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from mega_rl.errors import InputError
from mega_rl.fleet.events import Died, Event
from mega_rl.observe.pulse import Pulse
from mega_rl.rollout.engine_checks import EngineChecks
from mega_rl.rollout.remote.fleet.partial_responses import PartialResponses


@dataclass(eq=False)
class Life:
    """One life of an engine: its processes."""

    engine: int
    number: int
    workers: list[Any]
    node: str = ""  # "" until it is known
    processes: list[int] = field(default_factory=list)
    loading: int | None = None  # the version that it has been told to load
    is_torn: bool = False  # whether the weights that it holds are of several versions
    load: int = 0  # responses under way
    num_sampling: int = 0  # calls to sample on that have no answer yet
    num_slots: int | None = None  # responses that it takes at a time, once it has started
    pulses_at: list[tuple[int, int]] = field(default_factory=list)  # by worker: its process, and its file there
    pulses: list[Pulse | None] = field(default_factory=list)  # by worker, the last ones
    checks: EngineChecks = field(kw_only=True)  # what it must show of weights before it samples with them
    is_held: bool = False  # it has weights of which it must show something first
    continued: set[tuple[int, int]] = field(default_factory=set)  # attempt and sample of what another engine began
    partial: PartialResponses = field(default_factory=PartialResponses)
    calls: set[EngineCall] = field(default_factory=set)  # that wait for answers

    @property
    def is_busy(self) -> bool:
        """Whether it has anything to do."""
        return bool(self.load) or self.loading is not None


@dataclass(eq=False)
class EngineCall:
    """What workers of an engine were asked."""

    life: Life
    doing: str
    then: Callable[[list[Any]], list[Event]]  # what follows from all answers, by worker
    instead: Callable[[], list[Event]] | None  # of the engine's death, if the call fails or takes too long
    num_left: int  # answers that have not come
    answers: list[Future[Any]] = field(default_factory=list)

    def has_ended(self) -> bool:
        """Whether no answer to it is heard any more."""
        return self not in self.life.calls

    def end(self) -> list[Future[Any]]:
        """Hear no more answers; returns those that there are."""
        self.life.calls.discard(self)
        found, self.answers = self.answers, []  # they refer to this call, so nothing else would free them soon
        return found


def nothing(answers: list[Any]) -> list[Event]:
    """What follows from answers that say nothing."""
    return []


class Calls:
    """All calls of a fleet. One thread calls all methods."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        # Threads of Ray's put calls here, each once for every answer that has come.
        self._ready: SimpleQueue[tuple[EngineCall, Future[Any]]] = SimpleQueue()
        self._limits: list[tuple[float, int, EngineCall]] = []  # a heap: when calls take too long
        self._numbers = itertools.count()

    def ask(
        self, life: Life, doing: str, method: str, *arguments: Any, then: Callable[[list[Any]], list[Event]] = nothing
    ) -> None:
        """Call a method of all workers of an engine; calls are carried out in their order."""
        self.wait(life, doing, [getattr(worker, method).remote(*arguments) for worker in life.workers], then)

    def wait(
        self,
        life: Life,
        doing: str,
        references: Sequence[Any],
        then: Callable[[list[Any]], list[Event]],
        instead: Callable[[], list[Event]] | None = None,
        limit_s: float = math.inf,
    ) -> None:
        """Have ``then`` called with what Ray's references stand for, once all of it is there.

        Args:
            instead: if one fails or ``limit_s`` seconds are over before; None: the engine has died of a failure.
        """
        call = EngineCall(life, doing, then, instead, len(references))
        life.calls.add(call)
        if limit_s < math.inf:
            heapq.heappush(self._limits, (time.monotonic() + limit_s, next(self._numbers), call))
        call.answers = [reference.future() for reference in references]
        for answer in call.answers:
            answer.add_done_callback(partial(self._put, call))

    def _put(self, call: EngineCall, answer: Future[Any]) -> None:
        self._ready.put((call, answer))

    def drop(self, life: Life) -> None:
        """A life has ended: no answer to it is heard any more."""
        for call in list(life.calls):
            call.end()

    def heard(self, wait_s: float) -> list[Event]:
        """What follows from the answers that have come; waits at most ``wait_s`` seconds for the first.

        Raises:
            InputError: an engine refuses its configuration.
        """
        said = self._late()
        try:
            found = [self._ready.get(timeout=wait_s)] if wait_s and not said else []
            found += [self._ready.get_nowait() for _ in range(self._ready.qsize())]
        except Empty:
            return said
        for call, answer in found:
            if not call.has_ended():
                said += self._answered(call, answer)
        return said

    def _late(self) -> list[Event]:
        said: list[Event] = []
        while self._limits and time.monotonic() > self._limits[0][0]:
            _, _, call = heapq.heappop(self._limits)
            if call.instead is not None and not call.has_ended():
                call.end()
                said += call.instead()
        return said

    def _answered(self, call: EngineCall, answer: Future[Any]) -> list[Event]:
        why = self._failure(answer, call.doing)
        if why is not None and call.instead is None:
            self.drop(call.life)
            return [Died(call.life.engine, call.life.number, why)]
        call.num_left -= 1
        if why is None and call.num_left:
            return []
        answers = call.end()
        if why is not None and call.instead is not None:
            return call.instead()
        return call.then([found.result() for found in answers])

    def _failure(self, answer: Future[Any], doing: str) -> str | None:
        """Why an answer is none; None if it is one."""
        try:
            answer.result()
        except self._ray.exceptions.RayActorError:
            return f"a process of it was gone while {doing}"
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, InputError):
                raise error.cause from None
            return f"it failed while {doing}: {error.cause}"
        except self._ray.exceptions.RayError as error:
            return f"it was lost while {doing}: {error}"
        return None
