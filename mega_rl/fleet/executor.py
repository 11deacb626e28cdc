"""Who carries the scheduler's decisions out: real engines, or stand-ins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from mega_rl.fleet.events import Event, Issue, Kill, Load, Release, Start
from mega_rl.fleet.tickets import Key

# What an ``Issue`` asks for: (ticket, sample numbers) -> a ``mega_rl.rollout.engine.Request`` for each, with its seed.
# Every executor is given one when it is made, and calls it in the scheduler's thread. So it is pure: it reads nothing
# that another thread changes.
Requests = Callable[[Key, Sequence[int]], list[Any]]


class PlacesError(RuntimeError):
    """What has the places of engines does not do what it is asked; the engines that are there go on."""


class Whereabouts(NamedTuple):
    """Where an engine runs, as far as it is known."""

    node: str = ""  # the host's address
    processes: tuple[int, ...] = ()  # their numbers there


class FleetExecutor(Protocol):
    """The engines of a fleet. One thread, which takes part in no collective, calls all methods.

    ``Answered.result`` is a ``mega_rl.types.Response``, of a validation a ``Trajectory``. ``Advanced.prefix`` and the
    prefixes of an ``Issue`` are a ``mega_rl.rollout.partial.PartialResponse``: of all tokens so far, those of earlier
    engines included.
    """

    def carry(self, decision: Start | Kill | Release | Load | Issue) -> None:
        """Begin with what was decided; returns at once, without waiting for an engine."""
        ...

    def events(self, wait_s: float) -> list[Event]:
        """What the engines have said since the last call: ``Started``, ``Loaded``, ``Arriving``, ``Missed``,
        ``Answered``, ``Advanced``, ``Pulsed``, ``Died``; waits at most ``wait_s`` seconds for the first.
        """
        ...

    def reserve(self, engine: int) -> None:
        """Ask for room for one more engine, which ``Release`` gives back; returns at once.

        Raises:
            PlacesError: as ``has_room``, ``free`` and ``whereabouts``.
        """
        ...

    def has_room(self, engine: int) -> bool:
        """Whether the engine has its room."""
        ...

    def free(self) -> str:
        """What there is for more engines, in words."""
        ...

    def whereabouts(self) -> Mapping[int, Whereabouts]:
        """Of the present life of every engine that runs."""
        ...

    def close(self) -> None:
        """End all engines."""
        ...
