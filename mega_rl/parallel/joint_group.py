"""One process group over the trainer's ranks and the workers of engines in other processes."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import distributed_c10d

from mega_rl.parallel.interfaces import listen_towards
from mega_rl.parallel.store import LOOPBACK, serve_store

JOIN_TIMEOUT = datetime.timedelta(minutes=5)
NAME = "mega_rl_weights"


@dataclass(frozen=True)
class MeetingPoint:
    """Where the ranks of a joint group meet."""

    host: str
    port: int
    backend: str  # as ``torch.distributed.init_process_group`` takes it
    world_size: int  # trainer ranks and engine workers together
    timeout_s: float  # of a collective of the group


def open_meeting(host: str, backend: str, world_size: int, timeout_s: float) -> tuple[MeetingPoint, dist.TCPStore]:
    """A store on a free port of this machine, for the rank that calls this to join with; see ``serve_store``."""
    store = serve_store(host, world_size, JOIN_TIMEOUT)
    return MeetingPoint(host, store.port, backend, world_size, timeout_s), store


def join_store(point: MeetingPoint) -> dist.TCPStore:
    """The store of a meeting that another process opened."""
    return dist.TCPStore(point.host, point.port, point.world_size, is_master=False, timeout=JOIN_TIMEOUT)


def join_group(point: MeetingPoint, rank: int, store: dist.TCPStore | None = None) -> dist.ProcessGroup:
    """The joint group; every one of its ranks calls this at the same time, and once: it is kept for all syncs.

    The default groups of the two sides stay as they are, and rank i of the group is called rank i by torch's functions
    of this group. Torch has no public way to make a group over processes that share no default group.

    Args:
        store: of the rank that opened the meeting.
    """
    if point.host != LOOPBACK:
        listen_towards(point.host)
    store = store or join_store(point)
    group, _ = distributed_c10d._new_process_group_helper(
        point.world_size,
        rank,
        [],
        point.backend,
        store,
        group_name=NAME,  # type: ignore[arg-type]  # a str to torch 2.10, a NewType of it to later ones
        timeout=datetime.timedelta(seconds=point.timeout_s),
    )
    distributed_c10d._world.pg_group_ranks[group] = {i: i for i in range(point.world_size)}
    return group
