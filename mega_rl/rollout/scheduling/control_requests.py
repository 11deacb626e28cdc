"""Where a run is asked about its engines, and for more or fewer of them: ``tools/fleet.py`` is who asks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from mega_rl.errors import InputError
from mega_rl.fleet import events, membership, tickets
from mega_rl.fleet.engines import Condition
from mega_rl.fleet.events import Event
from mega_rl.fleet.executor import FleetExecutor, PlacesError, Whereabouts
from mega_rl.fleet.scheduler import FleetScheduler
from mega_rl.rollout.scheduling.fleet_record import FleetRecord
from mega_rl.rollout.scheduling.fleet_requests import ControlQuestion, Mailbox

MAX_LOOKS = 64  # at the room of engines at a time: each is a question to Ray
LOG = logging.getLogger(__name__)
MAX_WAITING = 1024  # engines that room is waited for: each is asked for one by one, while nothing else is heard


@dataclass(frozen=True)
class Adding:
    """Engines that are to join as soon as all of them have room."""

    name: str  # of the question
    engines: Sequence[int]
    until_s: float
    wait_s: float
    without_room: list[int]  # of the engines, as far as it is known


class ControlRequests:
    """The thread that runs the scheduler calls all methods."""

    def __init__(
        self,
        mailbox: Mailbox,
        scheduler: FleetScheduler,
        executor: FleetExecutor,
        record: FleetRecord,
        handle: Callable[[Event], None],
    ) -> None:
        """``handle``: has the scheduler handle an event, and carries out what follows."""
        self._mailbox, self._scheduler, self._executor, self._record = mailbox, scheduler, executor, record
        self._handle = handle
        self._adding: list[Adding] = []

    def attend(self) -> None:
        """Answer what has been asked; nothing is waited for."""
        for name, question in self._mailbox.questions():
            if question.command == "add":
                self._begin_adding(name, question)
            elif question.command == "remove":
                self._remove(name, question)
            else:
                self._mailbox.answer(name, self.status())
        for adding in list(self._adding):
            self._go_on_adding(adding)

    def close(self) -> None:
        for adding in self._adding:
            self._mailbox.refuse(adding.name, "the run has just ended")
        self._mailbox.close()

    def status(self) -> dict[str, Any]:
        """What there is, as plain values."""
        scheduler, window, speeds = self._scheduler, self._scheduler.window, self._record.tokens_per_s()
        places: Mapping[int, Whereabouts] = {}
        with suppress(PlacesError):
            places = self._executor.whereabouts()
        return {
            "mode": "pinned" if scheduler.rules.is_pinned else "in_flight",
            "max_staleness": scheduler.rules.eta,
            "trained_steps": window.trained,
            "total_steps": scheduler.rules.total_steps,
            "steps_in_the_air": [step + 1 for step in range(window.trained, window.num_begun)],
            "responses_in_hand": window.num_under_way,
            "responses_waiting": window.num_waiting,
            "engines": [
                {
                    "engine": number,
                    "node": places.get(number, Whereabouts()).node,
                    "processes": list(places.get(number, Whereabouts()).processes),
                    "condition": (Condition.LOADING if engine.loading is not None else engine.condition).value,
                    "version": tickets.shown(engine.version),
                    "staleness": window.trained - engine.version if engine.version >= 0 else None,
                    "responses_in_hand": engine.load,
                    "tokens_per_s": round(speeds.get(number, 0.0), 1),
                    "restarts": engine.num_restarts,
                }
                for number, engine in sorted(scheduler.engines.items())
            ],
        }

    def _remove(self, name: str, question: ControlQuestion) -> None:
        try:
            chosen = membership.leaving(self._scheduler.engines, question.engines, question.count)
        except InputError as error:
            self._mailbox.refuse(name, str(error))
            return
        for engine in chosen:
            self._handle(events.Left(engine))
        self._tell("left", chosen)
        self._mailbox.answer(name, self.status())

    def _begin_adding(self, name: str, question: ControlQuestion) -> None:
        promised = [engine for adding in self._adding for engine in adding.engines]
        if len(promised) + question.count > MAX_WAITING:
            others = f", and {len(promised):,} are waited for already" if promised else ""
            self._mailbox.refuse(name, f"at most {MAX_WAITING:,} engines can be waited for{others}: ask for fewer")
            return
        engines = membership.joining(self._scheduler.engines, promised, question.count)
        for number, engine in enumerate(engines):
            try:
                self._executor.reserve(engine)
            except PlacesError as error:
                self._give_up(name, engines[:number], str(error))
                return
        self._adding.append(Adding(name, engines, time.monotonic() + question.wait_s, question.wait_s, [*engines]))

    def _go_on_adding(self, adding: Adding) -> None:
        try:
            asked = adding.without_room[:MAX_LOOKS]
            found = [*takewhile(self._executor.has_room, asked)]
            del adding.without_room[: len(found)]
            has_room = not adding.without_room
            if not has_room and (found == asked or time.monotonic() < adding.until_s):
                return
            why = "" if has_room else self._no_room(adding)
        except PlacesError as error:
            has_room, why = False, str(error)
        self._adding.remove(adding)
        if not has_room:
            self._give_up(adding.name, adding.engines, why)
            return
        for engine in adding.engines:
            self._handle(events.Joined(engine))
        self._tell("joined", adding.engines)
        self._mailbox.answer(adding.name, self.status())

    def _no_room(self, adding: Adding) -> str:
        words = f"{len(adding.engines)} more engines within {adding.wait_s:g} s: {self._executor.free()}"
        return f"there was no room for {words}; none was added, so ask for fewer, add nodes or wait longer"

    def _give_up(self, name: str, engines: Sequence[int], why: str) -> None:
        """Give back what was reserved for a question, and refuse it."""
        for engine in engines:
            self._executor.carry(events.Release(engine))
        self._mailbox.refuse(name, why)

    def _tell(self, what: str, engines: Sequence[int]) -> None:
        number = len(membership.in_use(self._scheduler.engines))
        names = ", ".join(map(str, engines))
        LOG.warning("rollout engines that %s, as was asked for: %s; %d are in use", what, names, number)
