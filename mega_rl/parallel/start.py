"""How the ranks of one start of a run find each other in the store of their launcher."""

from __future__ import annotations

import datetime
import os
import time
import uuid

import torch.distributed as dist

from mega_rl.errors import InputError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 1.0  # of rank 0 between two looks at who has come


def store_of_this_start(timeout: datetime.timedelta) -> tuple[dist.Store, int, int]:
    """The launcher's store with this process's rank and their number, also when torchrun has started the ranks again.

    torchrun's store lives as long as torchrun: ranks of a later start would find the addresses of those that have died
    (torch 2.13 no longer tells one start from the next). So each start has a part of the store of its own.

    Raises:
        InputError: the other ranks did not come.
    """
    store, rank, size = next(iter(dist.rendezvous("env://", timeout=timeout)))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and size > 1:
        store = dist.PrefixStore(_agree_on_start(dist.PrefixStore("starts", store), rank, size, timeout), store)
    return store, rank, size


def _agree_on_start(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> str:
    """A name that the ranks of this start have, and of no other; what earlier ones have left in the store is no matter.

    Every rank leaves a word that only it knows, and waits until rank 0 has left the name under this word. Rank 0 alone
    looks again and again, more and more seldom, for the words of those that have not taken the name.
    """
    own, end, pause_s = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds(), FIRST_PAUSE_S
    if rank > 0:
        store.set(f"word/{rank}", own)
        try:
            store.wait([f"told/{own}"], timeout)
        except dist.DistStoreError as error:
            raise _nobody_came(rank, size, timeout) from error
        name = store.get(f"told/{own}").decode()
        store.set(f"{name}/{rank}", "")
        return name
    missing = list(range(1, size))
    while missing and time.monotonic() < end:
        for other in missing:
            if store.check([f"word/{other}"]):
                store.set(f"told/{store.get(f'word/{other}').decode()}", own)
        time.sleep(pause_s)
        pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
        missing = [other for other in missing if not store.check([f"{own}/{other}"])]
    if missing:
        raise _nobody_came(rank, size, timeout)
    return own


def _nobody_came(rank: int, size: int, timeout: datetime.timedelta) -> InputError:
    return InputError(
        f"rank {rank} did not meet all {size} ranks within trainer.collective_timeout_s={timeout.total_seconds():g} s: "
        "look at the logs of the other ranks"
    )
