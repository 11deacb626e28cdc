"""Ranks that wait for each other on a store."""

from __future__ import annotations

import time

import torch.distributed as dist

from mega_rl.observe.heartbeat import HEART

MAX_PAUSE_S = 0.2


class Rendezvous:
    """A place where ranks wait for each other before a collective, when some come much later than others.

    A collective ends the run after a fixed time, however well the late ranks come on. This wait has no limit of its
    own: the watch ends the run if no rank comes on any more. The ranks wait in the same order, like in collectives.
    """

    def __init__(self, store: dist.Store, rank: int, num_ranks: int) -> None:
        self.store, self._rank, self._num_ranks = store, rank, num_ranks
        self._number = 0

    def wait(self, what: str) -> None:
        """Return when every rank has called this.

        Args:
            what: the work that they come from, in words.
        """
        self._number += 1
        key, begin = f"rendezvous/{self._number}", time.monotonic()
        arrived = self.store.add(key, 1)
        with HEART.waiting(f"the other ranks to end {what}"):
            while arrived < self._num_ranks:
                time.sleep(min(MAX_PAUSE_S, 0.001 + (time.monotonic() - begin) / 20))
                arrived = self.store.add(key, 0)
        if self._rank == 0 and self._number > 1:
            self.store.delete_key(f"rendezvous/{self._number - 1}")  # all have left it
