"""How the ranks of one start of a run find each other in the store of their launcher."""

from __future__ import annotations

import datetime
import json
import os
import time
import uuid

import torch.distributed as dist

from mega_rl.errors import InputError


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

    Every rank leaves a word that only it knows, and takes the name that comes with this word from rank 0.
    """
    own, end = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    others = range(1, size)
    if rank > 0:
        store.set(f"word/{rank}", own)
    while time.monotonic() < end:
        if rank == 0:
            words = {str(r): store.get(f"word/{r}").decode() for r in others if store.check([f"word/{r}"])}
            store.set("name", json.dumps([own, words]))
            if all(store.check([f"{own}/{r}"]) for r in others):
                return own
        elif store.check(["name"]):
            name, words = json.loads(store.get("name"))
            if words.get(str(rank)) == own:
                store.set(f"{name}/{rank}", "")
                return str(name)
        time.sleep(0.02)
    raise InputError(
        f"rank {rank} did not meet all {size} ranks within trainer.collective_timeout_s={timeout.total_seconds():g} s: "
        "look at the logs of the other ranks"
    )
