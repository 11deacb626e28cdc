"""What a node does for its engines besides the engines: it ends their processes, and holds a store of its own.

The trainer's node has the first store. Every other node with engines copies versions from nodes that have them or are
getting them, chunk by chunk through Ray, as the trainer's ``Relay`` says.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from mega_rl.errors import InputError
from mega_rl.fleet.relay import NODE_SLOTS, ChunkWindow, Order
from mega_rl.observe.pulse import Pulse, read_pulse
from mega_rl.rollout.remote.weight_store import Location, Store
from mega_rl.rollout.store_form import ALIGNMENT, StoreForm

CHUNK_BYTES = 1 << 24
FETCH_S = 2.0  # after which a copy that is coming tells how far it is
WAIT_S = 1.0  # for a chunk that a source has not yet
SILENCE_S = 20.0  # without an answer of a source, after which another one is asked for
GONE = -1  # chunks of a source that has something else in that place


class State(Enum):
    COMING = "coming"
    WHOLE = "whole"
    SILENT = "the source does not answer"
    GONE = "the source has something else"
    OTHER = "something else is copied to that place"


class Fetched(NamedTuple):
    """How far a copy is."""

    state: State
    num_chunks: int
    location: Location


class ComingCopy:
    """What comes into one place of a node's store."""

    def __init__(self, order: Order, num_chunks: int) -> None:
        self.order, self.window = order, ChunkWindow(num_chunks)
        self.asked: dict[Any, int] = {}  # Ray's reference to an answer -> chunk
        self.writes: list[Future[None]] = []
        self.heard_s = time.monotonic()
        self.is_broken = False  # the source does not give

    def go_on(self, order: Order) -> None:
        """Ask from now on as this order says."""
        self.order, self.heard_s, self.is_broken = order, time.monotonic(), False
        self.asked.clear()
        self.window.ask_another()


class NodeAgent:
    """Of one node: in the trainer's rank 0, or as an actor of Ray on another node."""

    def __init__(self, form: StoreForm, location: Location | None = None) -> None:
        """Take nothing yet: Ray tells of a failure in here only that the actor is gone."""
        self._form, self._location = form, location
        self._opened: Store | None = None
        self._lock = threading.Lock()  # Ray calls in several threads
        self._moved = threading.Condition()  # chunks have come, or what is copied is something else; guards all below
        self._coming: dict[int | None, ComingCopy] = {}  # by slot
        self._cuts: dict[bool, list[tuple[int, int, int]]] = {}
        self._writer = ThreadPoolExecutor(1, "weights")

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
                    self._opened = Store(self._form, self._location, NODE_SLOTS)
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

    def give(self, slot: int | None, stamp: int, number: int) -> tuple[int, npt.NDArray[np.uint8] | None]:
        """A chunk of what is in a place, for another node; waits a little if it has not come yet.

        Returns:
            How many chunks there are (``GONE``: something else is in that place), and the chunk if it is one of them.
        """
        with self._moved:
            self._moved.wait_for(lambda: not 0 <= self._have(slot, stamp) <= number, WAIT_S)
            have = self._have(slot, stamp)
        if have <= number:
            return have, None
        worker, start, stop = self._chunks(slot)[number]
        chunk: npt.NDArray[np.uint8] = self._store.memory(worker, slot)[start:stop].clone().numpy()
        with self._moved:  # what was copied may be newer than what was asked for
            return (have, chunk) if self._have(slot, stamp) != GONE else (GONE, None)

    def _have(self, slot: int | None, stamp: int) -> int:
        """Chunks that can be given."""
        coming = self._coming.get(slot)
        if self._store.stamp_of(0, slot) == stamp:
            return len(self._chunks(slot))
        return coming.window.have if coming is not None and coming.order.stamp == stamp else GONE

    def fetch(self, order: Order, source: Any) -> Fetched:
        """Begin to copy from another node, or go on with it; returns when it is whole, and else after a while.

        Args:
            source: the actor of that node.

        Raises:
            InputError: as ``open``.
        """
        import ray

        coming = self._begin(order)
        until_s = time.monotonic() + FETCH_S
        state = State.WHOLE if coming.window.is_whole else State.COMING
        while state is State.COMING and time.monotonic() < until_s:
            self._ask(coming, order, source)
            state = self._hear(ray, coming, order)
        with self._moved:
            if state in (State.SILENT, State.GONE):
                coming.is_broken = True
            if state is State.WHOLE:
                self._store.stamp(order.slot, order.stamp)
            return Fetched(state, coming.window.have, self._store.location._replace(slot=order.slot or 0))

    def _begin(self, order: Order) -> ComingCopy:
        with self._moved:
            coming = self._coming.get(order.slot)
            if coming is not None and coming.order.number == order.number:
                if coming.order != order or coming.is_broken:
                    coming.go_on(order)
                return coming
            coming = self._coming[order.slot] = ComingCopy(order, len(self._chunks(order.slot)))
            self._store.stamp(order.slot, order.stamp - 1)  # odd: half written
            self._moved.notify_all()
        self._writer.submit(int).result()  # what was being written there has been written
        return coming

    def _ask(self, coming: ComingCopy, order: Order, source: Any) -> None:
        with self._moved:
            while self._is_current(coming, order) and (number := coming.window.next()) is not None:
                coming.asked[source.give.remote(order.source_slot, order.stamp, number)] = number

    def _is_current(self, coming: ComingCopy, order: Order) -> bool:
        return self._coming.get(order.slot) is coming and coming.order == order

    def _hear(self, ray: Any, coming: ComingCopy, order: Order) -> State:
        """Take the chunks that have come; waits a little for one."""
        waited = list(coming.asked)
        ready = ray.wait(waited, timeout=WAIT_S)[0] if waited else []
        for answer in ready:
            try:
                have, chunk = ray.get(answer)
            except ray.exceptions.RayError:
                return State.SILENT if self._is_current(coming, order) else State.OTHER
            with self._moved:
                number = coming.asked.pop(answer, None)
                if number is None or not self._is_current(coming, order):
                    return State.OTHER
                if have == GONE:
                    return State.GONE
                coming.heard_s = time.monotonic()
                coming.window.answered(number, have, chunk is not None)
            if chunk is not None:
                coming.writes.append(self._writer.submit(self._write, coming, number, chunk))
        while coming.writes and (not coming.asked or coming.writes[0].done()):
            coming.writes.pop(0).result()
        with self._moved:
            if not self._is_current(coming, order):
                return State.OTHER
            if coming.window.is_whole:
                return State.WHOLE
            return State.SILENT if time.monotonic() > coming.heard_s + SILENCE_S else State.COMING

    def _write(self, coming: ComingCopy, number: int, chunk: npt.NDArray[np.uint8]) -> None:
        """In a thread of its own: the next answers are waited for meanwhile."""
        slot = coming.order.slot
        worker, start, stop = self._chunks(slot)[number]
        with self._moved:
            if self._coming.get(slot) is not coming:
                return
        self._store.memory(worker, slot)[start:stop].copy_(torch.from_numpy(chunk))
        with self._moved:
            coming.window.written(number)
            self._moved.notify_all()

    def _chunks(self, slot: int | None) -> list[tuple[int, int, int]]:
        is_fixed = slot is None
        if is_fixed not in self._cuts:
            self._cuts[is_fixed] = chunks_of(self._form, is_fixed)
        return self._cuts[is_fixed]


def chunks_of(form: StoreForm, is_fixed: bool) -> list[tuple[int, int, int]]:
    """How a slot, or what no version changes, is cut: worker, first byte and end of each chunk."""
    found = []
    for worker, plan in enumerate(form.plans):
        num_bytes = (plan.fixed if is_fixed else plan.slot).num_bytes
        starts = range(ALIGNMENT, num_bytes, CHUNK_BYTES)
        found += [(worker, start, min(start + CHUNK_BYTES, num_bytes)) for start in starts]
    return found
