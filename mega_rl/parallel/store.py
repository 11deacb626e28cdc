"""Key-value stores that ranks meet at, open to no other machine than they must be."""

from __future__ import annotations

import datetime
import os
import socket

import torch.distributed as dist

from mega_rl.parallel.collectives import broadcast_object

LOOPBACK = "127.0.0.1"


def is_one_node() -> bool:
    """Whether all ranks of the trainer run on this machine, by torchrun's variables; so does a process without them."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    return os.environ.get("LOCAL_WORLD_SIZE", world_size if world_size == "1" else "") == world_size


def serve_store(
    host: str, world_size: int | None = None, timeout: datetime.timedelta = dist.default_pg_timeout
) -> dist.TCPStore:
    """A store on a free port of this machine.

    Args:
        host: how clients reach this machine; at ``LOOPBACK`` only processes of this machine can.
        world_size: processes that will use it; None: not fixed.
        timeout: of waiting for a key.
    """
    port, listener = 0, None
    if host == LOOPBACK:  # torch's own listener takes connections at every address of the machine, whatever the host
        with socket.create_server((host, 0), backlog=socket.SOMAXCONN) as server:
            port, listener = server.getsockname()[1], server.detach()
    return dist.TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener,
    )


def shared_store(timeout_s: float) -> dist.TCPStore:
    """A key-value store that every rank reaches; rank 0 serves it on a free port. Collective.

    If all ranks are on one machine, no other machine can reach it.

    Args:
        timeout_s: of connecting to it, and of waiting for a key.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    host = LOOPBACK if is_one_node() else os.environ["MASTER_ADDR"]
    server = serve_store(host, timeout=timeout) if dist.get_rank() == 0 else None
    port = broadcast_object(None if server is None else server.port)
    return server or dist.TCPStore(host, port, is_master=False, timeout=timeout)
