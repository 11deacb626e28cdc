"""An engine's hold on the weight store of its node, which may come to be in another process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import psutil
import torch

from mega_rl.platform.transfers import HostCopies
from mega_rl.rollout.remote.weight_store import Location, Store, WantedVersion, take
from mega_rl.rollout.store_form import StoreForm

WATCH_S = 1.0  # between two looks whether the store's process is there


class AttachedStore:
    """At most one store at a time. Its memory is given back once its process has ended.

    A store that is mapped outlives its process. The next trainer, or the next helper of the node, needs that memory.
    """

    def __init__(self) -> None:
        self._form: StoreForm | None = None
        self._store: Store | None = None
        self._copies: HostCopies | None = None
        self._lock = threading.Lock()  # held while weights are read
        self._is_watched = False
        self._has_fixed = False  # whether the engine holds what no version of this form changes, proved
        self.num_bytes = 0  # copied so far

    def know(self, form: StoreForm, worker: int) -> None:
        """Weights will come from stores of this form; what follows from it for the worker is computed here, once."""
        self._form, self._has_fixed = form, False
        form.plan(worker)

    def take(
        self, store: Store, worker: int, slot: int, wanted: WantedVersion, live: Mapping[str, torch.Tensor]
    ) -> None:
        """As ``weight_store.take``: all at first, then only what can differ."""
        if self._copies is None:
            self._copies = HostCopies(next(iter(live.values())).device)
        self.num_bytes += take(store, worker, slot, wanted, live, self._has_fixed, self._copies)
        self._has_fixed = True

    @contextmanager
    def at(self, location: Location) -> Iterator[Store]:
        """The store there, which stays mapped afterwards: attached to anew if it is another one than the last time.

        Raises:
            OSError: its process is gone.
        """
        form = self._form
        assert form is not None, "weights before the form of the stores is known"
        with self._lock:
            found, location = self._store, location._replace(slot=0)
            if found is None or (found.location, found.form.salt) != (location, form.salt):
                self._give_back()
                found = self._store = Store(form, location)
            if not self._is_watched:
                self._is_watched = True
                threading.Thread(target=self._watch, name="weight store", daemon=True).start()
            yield found

    def look(self) -> None:
        """Give the memory back if its process has ended, unless somebody reads it."""
        if self._lock.acquire(blocking=False):
            try:
                if self._store is not None and not psutil.pid_exists(self._store.location.process):
                    self._give_back()
            finally:
                self._lock.release()

    def _give_back(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _watch(self) -> None:
        while True:
            time.sleep(WATCH_S)
            self.look()
