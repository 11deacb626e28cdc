"""The reward workers of several nodes as one pool: their owners connect to one rank, which sends samples. No torch.

Owners show a key, and the rank that they connect to never unpacks what they answer, which is JSON.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from mega_rl.rewards.pool.dispatch import PoolError
from mega_rl.rewards.pool.node import WELCOME_S, RemotePool, end, introduce, knows, loss, serve
from mega_rl.rewards.pool.pool import Answers, Pool

LOOPBACK = "127.0.0.1", "localhost", "::1"
ALIVE_S = 60  # a host that has said nothing for so long is asked whether it is there, and given as long for the answer


@dataclass(frozen=True)
class MeetingAddress:
    """Where the owners of workers find the rank that uses them all."""

    host: str
    port: int
    key: bytes


class NodePools:
    """The listening side. ``close`` it when all have come."""

    def __init__(self, host: str) -> None:
        """``host``: how the others reach this machine."""
        self._listener = listen(host in LOOPBACK)
        key = secrets.token_bytes(32)
        self.address = MeetingAddress(host, self._listener.getsockname()[1], key)

    def meet(self, owners: Sequence[int], takes_images: bool) -> list[RemotePool]:
        """The workers of the ranks that own some, which all connect now.

        Raises:
            PoolError: one does not come.
        """
        found: dict[int, RemotePool] = {}
        until = time.monotonic() + WELCOME_S
        while left := sorted(set(owners) - set(found)):
            self._listener.settimeout(max(0.001, until - time.monotonic()))
            try:
                connected, _ = self._listener.accept()
            except OSError as error:
                who = f"rank {left[0]}, which has the reward workers of its node, did not connect"
                at = f"port {self.address.port} of {self.address.host}"
                raise PoolError(
                    f"rewards: {who} to {at} within {WELCOME_S:g} s: let the nodes of a run reach each other's ports"
                ) from error
            connection = connection_of(connected)
            with contextlib.suppress(OSError, EOFError, ValueError):
                if knows(connection, self.address.key) and (owner := int(connection.recv_bytes(20))) in left:
                    found[owner] = RemotePool(connection, takes_images, loss(f"rank {owner}", "its node"))
                    continue
            connection.close()
        return [found[owner] for owner in owners]

    def close(self) -> None:
        self._listener.close()


def lend(
    pool: Pool, address: MeetingAddress, rank: int, of_owned: Callable[[int], Future[Answers]]
) -> Callable[[], None]:
    """Let the rank at an address use the workers of this rank until either of them ends; returns what ends it before.

    Args:
        of_owned: what the workers say of the trajectory that this rank owns under a number.

    Raises:
        PoolError: it cannot be reached.
    """
    where = f"port {address.port} of {address.host}"
    try:
        connection = connection_of(socket.create_connection((address.host, address.port), WELCOME_S))
        introduce(connection, address.key)
        connection.send_bytes(str(rank).encode())
    except (OSError, EOFError) as error:
        raise PoolError(
            f"rewards: rank {rank} cannot reach {where} ({error}), to lend the reward workers of its node: let the "
            "nodes of a run reach each other's ports"
        ) from error
    threading.Thread(target=serve, args=(connection, pool, of_owned), daemon=True).start()
    return partial(end, connection)


def listen(is_here: bool) -> socket.socket:
    """Listen at a free port, for processes of this machine or of all."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() and not is_here else socket.AF_INET
    place = (LOOPBACK[0] if is_here else "", 0)
    return socket.create_server(
        place, family=family, backlog=socket.SOMAXCONN, dualstack_ipv6=family == socket.AF_INET6
    )


def connection_of(connected: socket.socket) -> Any:
    """A connection that finds out that the host at its other end is gone, which may say nothing of it."""
    connected.settimeout(None)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ALIVE_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * ALIVE_S)
    return Connection(connected.detach())


class PoolOfNodes:
    """Several pools as one: what is submitted goes to the pool that has the fewest samples under way."""

    def __init__(self, pools: Sequence[Pool]) -> None:
        """``pools``: of nodes with equally many workers; between equals the first one is taken."""
        self._pools, self._num_open = pools, [0] * len(pools)
        self._lock = threading.Lock()
        self.takes_images = pools[0].takes_images

    def submit(self, samples: Sequence[bytes], rewards: Sequence[int] | None = None) -> Future[Answers]:
        """See `Pool.submit`."""
        with self._lock:
            place = min(range(len(self._pools)), key=self._num_open.__getitem__)
            self._num_open[place] += len(samples)
        found = self._pools[place].submit(samples, rewards)
        found.add_done_callback(partial(self._end, place, len(samples)))
        return found

    def _end(self, place: int, number: int, _: Future[Answers]) -> None:
        with self._lock:
            self._num_open[place] -= number

    def close(self) -> None:
        for pool in self._pools:
            pool.close()
