"""Trajectories that engines hand to a rank of the trainer themselves, so that their tokens never pass rank 0.

On every node of the trainer one rank owns what is handed there. An engine connects to it when a response has ended,
shows a key, and hands the response over before it tells rank 0 of it: so whatever rank 0 hears of is there, though the
engine dies. What was handed over and is never told of, since the engine died between the two, is forgotten with its
step.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from mega_rl.parallel.collectives import gather_objects, together
from mega_rl.parallel.interfaces import addresses_towards
from mega_rl.rewards.pool import node
from mega_rl.rewards.pool.nodes import connection_of, listen
from mega_rl.types import HandedTrajectory, Response, Trajectory

ANSWER_S = 120.0  # of an owner, which may be taking in what all other engines hand to it
REST_S = 0.1  # after a connection that did not come about
MAX_WORDS = 1 << 10  # bytes of what is said before a trajectory
KEY_BYTES = 32
TAKE, GIVE = "take", "give"


@dataclass(frozen=True)
class OwnerAddress:
    """Where a rank takes trajectories from engines."""

    rank: int
    host: str
    port: int
    key: bytes


class HandedTrajectories:
    """The owner's side, in threads of its own: one for each connection, which takes one trajectory or gives it back."""

    def __init__(self, own: Callable[[Trajectory], int], is_here: bool = False) -> None:
        """
        Args:
            own: has this rank own a trajectory, and returns its number; called in any thread.
            is_here: engines are on this machine only.
        """
        self._own, self.key = own, os.urandom(KEY_BYTES)
        self._steps: dict[int, tuple[int, Trajectory]] = {}  # by number: the step that it was sampled for
        self._lock, self._is_closed = threading.Lock(), threading.Event()
        self._listener = listen(is_here)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._listen, name="handed trajectories", daemon=True).start()

    def get(self, number: int) -> Trajectory | None:
        """One that was handed over and not forgotten; called in any thread."""
        with self._lock:
            found = self._steps.get(number)
        return None if found is None else found[1]

    def forget_before(self, step: int) -> list[int]:
        """Forget what was sampled for earlier steps; returns its numbers."""
        with self._lock:
            numbers = [number for number, (of_step, _) in self._steps.items() if of_step < step]
            for number in numbers:
                del self._steps[number]
        return numbers

    def close(self) -> None:
        """Take no more."""
        self._is_closed.set()
        with contextlib.suppress(OSError):  # which wakes the thread that waits there
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _listen(self) -> None:
        while not self._is_closed.is_set():
            try:
                connected, _ = self._listener.accept()
            except OSError:  # it is closed, or there are too many connections just now
                self._is_closed.wait(REST_S)
                continue
            threading.Thread(target=self._serve, args=(connected,), daemon=True).start()

    def _serve(self, connected: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError), connection_of(connected) as connection:  # an engine may die
            if not node.knows(connection, self.key):
                return
            words = json.loads(connection.recv_bytes(MAX_WORDS))
            if words["what"] == GIVE:
                connection.send_bytes(pickle.dumps(self.get(words["number"]), protocol=5))
                return
            trajectory: Trajectory = pickle.loads(connection.recv_bytes())
            number = self._own(trajectory)
            with self._lock:
                self._steps[number] = words["step"], trajectory
            connection.send_bytes(json.dumps(number).encode())


def open_owners(own: Callable[[Trajectory], int]) -> tuple[HandedTrajectories | None, tuple[OwnerAddress, ...]]:
    """Have the first rank of every node take trajectories; where there is one node, nobody. Collective.

    Returns:
        What this rank takes, and all addresses.
    """
    owners, rank = node.owners_of(gather_objects(node.machine())), dist.get_rank()
    if len(owners) == 1:
        return None, ()
    taken: HandedTrajectories | None = None
    here: tuple[str, str, int, bytes] | None = None
    with together("taking responses from engines"):
        if rank in owners:
            taken = HandedTrajectories(own)
            here = *addresses_towards(os.environ["MASTER_ADDR"]), taken.port, taken.key
    found = [each for each in gather_objects(here) if each is not None]
    # Rank 0 reaches itself at an address that others may not reach it at: they know a better one.
    hosts = [found[1][1], *(own_address for own_address, *_ in found[1:])]
    pairs = zip(owners, hosts, found, strict=True)
    return taken, tuple(OwnerAddress(owner, host, port, key) for owner, host, (_, _, port, key) in pairs)


def hand_over(trajectory: Trajectory, owners: Sequence[OwnerAddress], step: int, attempt: int, sample: int) -> Response:
    """An engine's side: give a trajectory to one of its owners, and return what rank 0 is told of it.

    Args:
        owners: they are given equally many; (): rank 0 is told everything, as it always is of a validation.
        step, attempt, sample: what it was sampled for; the step is below 0 in a validation.

    Raises:
        RuntimeError: the owner does not take it.
    """
    if step < 0 or not owners:
        return trajectory
    owner = owners[(attempt + sample) % len(owners)]
    with _asked(owner, "hand a response to") as connection:
        connection.send_bytes(json.dumps({"what": TAKE, "step": step}).encode())
        connection.send_bytes(pickle.dumps(trajectory, protocol=5))
        number = json.loads(_answer(connection, MAX_WORDS))
    return handed(trajectory, owner.rank, number)


def handed(trajectory: Trajectory, owner: int, number: int) -> HandedTrajectory:
    """What rank 0 is told of a trajectory that a rank owns under a number."""
    return HandedTrajectory(trajectory.summary(owner, number), trajectory.episode)


def given_back(handed_over: HandedTrajectory, owners: Sequence[OwnerAddress]) -> Trajectory:
    """The whole trajectory, from its owner.

    Raises:
        RuntimeError: the owner does not give it.
    """
    owner, number = handed_over.summary.key
    (address,) = (address for address in owners if address.rank == owner)
    with _asked(address, "get a response from") as connection:
        connection.send_bytes(json.dumps({"what": GIVE, "number": number}).encode())
        found: Trajectory | None = pickle.loads(_answer(connection))
    assert found is not None, f"rank {owner} has forgotten response {number} too early"
    return found


@contextlib.contextmanager
def _asked(owner: OwnerAddress, what: str) -> Any:
    try:
        with connection_of(socket.create_connection((owner.host, owner.port), ANSWER_S)) as connection:
            node.introduce(connection, owner.key)
            yield connection
    except (OSError, EOFError) as error:
        raise RuntimeError(
            f"it cannot {what} rank {owner.rank} at port {owner.port} of {owner.host} "
            f"({str(error) or type(error).__name__}): let the nodes of engines and trainer reach each other's ports"
        ) from error


def _answer(connection: Any, limit: int | None = None) -> bytes:
    """Raise TimeoutError if none comes."""
    if not connection.poll(ANSWER_S):
        raise TimeoutError(f"no answer in {ANSWER_S:g} s")
    found: bytes = connection.recv_bytes(limit)
    return found
