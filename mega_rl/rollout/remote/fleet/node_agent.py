"""What a node does for its engines besides the engines: it ends their processes, and holds a store of its own.

The trainer's node has the first store. Every other node with engines copies versions from a node that has them, in
pieces through Ray, so that a version crosses the network once for each node, and the trainer's node sends it to two.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mega_rl.errors import InputError
from mega_rl.observe.pulse import Pulse, read_pulse
from mega_rl.rollout.remote.weight_store import Location, Store, StoreForm

CHUNK_BYTES = 1 << 24
NUM_AHEAD = 2  # chunks that are asked for before the one that is being written


class NodeAgent:
    """Of one node: in the trainer's rank 0, or as an actor of Ray on another node."""

    def __init__(self, form: StoreForm, location: Location | None = None) -> None:
        """Take nothing yet: Ray tells of a failure in here only that the actor is gone."""
        self._form, self._location = form, location
        self._opened: Store | None = None
        self._lock = threading.Lock()  # Ray calls in several threads

    def open(self) -> None:
        """Attach to the node's store, or take memory for one; the other methods do so too.

        Raises:
            InputError: the host has not so much memory.
        """
        self._store  # noqa: B018 - opens it

    @property
    def _store(self) -> Store:
        with self._lock:
            if self._opened is None:
                try:
                    self._opened = Store(self._form, self._location)
                except InputError as error:
                    raise InputError(f"on host {socket.gethostname()}, which has rollout engines, {error}") from None
            return self._opened

    def kill(self, processes: Sequence[int]) -> None:
        """End processes of this node at once, also those that have been stopped."""
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def pulses(self, places: Sequence[tuple[int, int]]) -> list[Pulse | None]:
        """Of processes of this node, by their numbers and those of their files; None of one that is gone."""
        return [read_pulse(*place) for place in places]

    def chunk(self, worker: int, slot: int | None, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Bytes of a slot, or of what no version changes."""
        found: npt.NDArray[np.uint8] = self._store.memory(worker, slot)[start:stop].numpy()
        return found

    def fetch(self, version: int, source: Any, there: Location) -> Location:
        """Copy a version from another node.

        Args:
            source: the actor of that node.
            there: the answer of the same call there, for which Ray waits before it begins with this one.

        Returns:
            Where the version is now.

        Raises:
            InputError: as ``open``.
            RuntimeError: of Ray, if that node is gone.
        """
        import ray

        asked: list[tuple[torch.Tensor, Any]] = []
        for worker, slot, start, stop in self._chunks(version):
            here = self._store.memory(worker, slot)[start:stop]
            asked.append((here, source.chunk.remote(worker, slot, start, stop)))
            if len(asked) > NUM_AHEAD:
                _write(ray, *asked.pop(0))
        for pair in asked:
            _write(ray, *pair)
        return self._store.location_of(version)

    def _chunks(self, version: int) -> Iterator[tuple[int, int | None, int, int]]:
        for worker, plan in enumerate(self._store.form.plans):
            for part, slot in ((plan.fixed, None), (plan.slot, self._store.form.slot(version))):
                for start in range(0, part.num_bytes, CHUNK_BYTES):
                    yield worker, slot, start, min(start + CHUNK_BYTES, part.num_bytes)


def _write(ray: Any, here: torch.Tensor, answer: Any) -> None:
    here.numpy()[:] = ray.get(answer)
