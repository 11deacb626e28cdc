"""Where the processes of a fleet's engines are, for as long as the trainer lives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mega_rl.rollout.remote.engine_process import WorkerPlace
from mega_rl.rollout.remote.placement import reserve, spawn
from mega_rl.rollout.remote.ray_room import bundle


class Survivor(NamedTuple):
    """An engine that an earlier trainer of the run has started."""

    workers: list[Any]
    whereabouts: list[WorkerPlace]  # by worker


class Places:
    """A place on one node for every engine; what runs there ends with this process."""

    num_survivors = 0  # engines that were there before this process

    def __init__(self, ray: Any, num_engines: int, size: int, options: Mapping[str, Any]) -> None:
        """
        Args:
            size: workers of an engine.
            options: of their actors.

        Raises:
            InputError: there is no room.
        """
        self._ray, self._size, self._options = ray, size, options
        self._groups = {engine: reserve(ray, size, options) for engine in range(num_engines)}

    def survivor(self, engine: int) -> Survivor | None:
        """What is left of an earlier trainer of the run, once."""
        return None

    def workers(self, engine: int) -> list[Any]:
        """New actors for an engine, which has a place."""
        return spawn(self._ray, self._groups[engine], self._size, self._options)

    def reserve(self, engine: int) -> None:
        """Ask for a place for one more engine, without waiting for it."""
        worker = bundle(self._options)
        self._groups[engine] = self._ray.util.placement_group([worker] * self._size, strategy="STRICT_PACK")

    def has_room(self, engine: int) -> bool:
        """Whether the place of an engine is there."""
        return bool(self._ray.util.placement_group_table(self._groups[engine])["state"] == "CREATED")

    def release(self, engine: int) -> None:
        """Give an engine's place back."""
        self._ray.util.remove_placement_group(self._groups.pop(engine))

    def free(self) -> str:
        """What nobody has taken, in words."""
        worker, found = bundle(self._options), self._ray.available_resources()
        needed = ", ".join(f"{name}: {amount * self._size:g}" for name, amount in worker.items())
        free = ", ".join(f"{name}: {found.get(name, 0):g}" for name in worker)
        return f"an engine needs {needed} on one node, and in the whole Ray cluster there is {free} free"

    def check(self) -> None:
        """Prove that the engines are this trainer's still.

        Raises:
            Fenced: they are not.
        """

    def kill(self, workers: Sequence[Any]) -> None:
        """End actors."""
        for worker in workers:
            self._ray.kill(worker)

    def close(self) -> None:
        """Give all places back."""
