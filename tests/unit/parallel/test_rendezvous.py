"""Ranks that wait for each other on a store, here as threads."""

from __future__ import annotations

import random
import threading
import time

from torch.distributed import HashStore

from mega_rl.parallel.rendezvous import Rendezvous


def test_nobody_leaves_before_the_last_one_has_come() -> None:
    store, log, lock = HashStore(), [], threading.Lock()

    def run(rank: int) -> None:
        chance, rendezvous = random.Random(rank), Rendezvous(store, rank, 3)
        for meeting in range(4):
            time.sleep(chance.random() / 50)
            with lock:
                log.append((meeting, "comes"))
            rendezvous.wait("working")
            with lock:
                log.append((meeting, "leaves"))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for meeting in range(4):
        of_meeting = [what for number, what in log if number == meeting]
        assert of_meeting[:3] == ["comes"] * 3 and of_meeting[3:] == ["leaves"] * 3


def test_one_rank_waits_for_nobody() -> None:
    Rendezvous(HashStore(), 0, 1).wait("working")
