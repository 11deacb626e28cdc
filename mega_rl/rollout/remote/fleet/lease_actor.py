"""Keeps the engines of a run on a cluster of the user's own: they survive the trainer, but not for ever.

One small actor per run, which the trainer's death does not end. It has reserved the engines' places, so that whatever
becomes of it, Ray frees them once it is gone, and ends what runs in them. It is therefore on the node of the trainer
that made it: then no other node has all engines depend on it. A trainer that comes back on another node finds it there.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from mega_rl.errors import InputError

TICK_S = 0.5


class Fenced(InputError):
    """Another trainer has taken the engines over."""


def check_holder(token: str, holder: str) -> None:
    """Refuse a call of a trainer that is not the last one to have attached.

    Raises:
        Fenced: as said.
    """
    if token != holder:
        raise Fenced(
            "another trainer has attached to the rollout engines of this run since, and this one has lost them: a run "
            "may have one trainer at a time, end one of the two"
        )


class LeasedEngine(NamedTuple):
    """An engine that the lease actor has."""

    group: Any  # Ray's placement group
    actors: Sequence[str]  # by tensor rank, their names: with one as an object its whole program would come here


class LeaseActor:
    """The actor. A trainer attaches with a token of its own, and every later call must bring the same one."""

    def __init__(self) -> None:
        self._holder = ""
        self._lease_s = float("inf")
        self._silent_s = 0.0  # since a trainer was last heard; in ticks, so that being stopped does not count
        self._groups: dict[int, Any] = {}
        self._actors: dict[int, Sequence[str]] = {}
        threading.Thread(target=self._watch, name="lease", daemon=True).start()

    def attach(self, token: str, lease_s: float, is_back: bool = False) -> dict[int, LeasedEngine]:
        """Make this trainer the only one that is listened to.

        Args:
            lease_s: without a word of it for so long, everything ends.
            is_back: it has had another lease actor, which is gone.

        Returns:
            What there is, by engine.

        Raises:
            Fenced: it is back, and another trainer has attached before it.
        """
        if is_back and self._holder:
            check_holder(token, self._holder)
        self._holder, self._lease_s, self._silent_s = token, lease_s, 0.0
        for engine in self._groups.keys() - self._actors.keys():  # the trainer before ended while it began with it
            self._free(engine)
        return {engine: LeasedEngine(self._groups[engine], actors) for engine, actors in self._actors.items()}

    def hear(self, token: str) -> None:
        """The trainer is there."""
        check_holder(token, self._holder)
        self._silent_s = 0.0

    def reserve(self, token: str, engine: int, bundles: Sequence[Mapping[str, float]]) -> Any:
        """A placement group for an engine in the place of the one that it had; it may have to be waited for."""
        import ray

        self.hear(token)
        self._free(engine)
        self._groups[engine] = ray.util.placement_group([dict(bundle) for bundle in bundles], strategy="STRICT_PACK")
        return self._groups[engine]

    def note(self, token: str, engine: int, kept: LeasedEngine) -> None:
        """These are an engine's actors and place now."""
        self.hear(token)
        self._groups[engine], self._actors[engine] = kept

    def renumber(self, token: str, moved: Mapping[int, int]) -> None:
        """Engines, by the number that they had, have numbers from now on that no engine has."""
        self.hear(token)
        for old, new in moved.items():
            if old in self._actors:  # else the trainer has told this actor of them by their new numbers
                self._groups[new], self._actors[new] = self._groups.pop(old), self._actors.pop(old)

    def free(self, token: str, engine: int) -> None:
        """End an engine and give its place back."""
        self.hear(token)
        self._free(engine)

    def end(self, token: str) -> None:
        """End all engines at once, and this actor with them."""
        self.hear(token)
        self._end()

    def _free(self, engine: int) -> None:
        import ray

        self._actors.pop(engine, None)
        if (group := self._groups.pop(engine, None)) is not None:
            ray.util.remove_placement_group(group)  # ends what is in it, stopped processes too

    def _end(self) -> None:
        for engine in list(self._groups):
            with suppress(Exception):  # the others must be freed all the same
                self._free(engine)
        os._exit(0)  # of any thread

    def _watch(self) -> None:
        while self._silent_s < self._lease_s:
            time.sleep(TICK_S)
            self._silent_s += TICK_S
        self._end()
