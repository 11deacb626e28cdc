"""The reward workers of one rank, used by the other ranks of its machine through a socket. Imports no torch.

The socket stands in a directory that only this user may enter, and only until the expected ranks have come in; each of
them proves that it knows a key. What they send is passed on to the workers and never unpacked here; answers are JSON.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Client, Listener
from queue import SimpleQueue
from typing import Any

from mega_rl.rewards.pool.dispatch import PoolError
from mega_rl.rewards.pool.pool import Answers, Pool
from mega_rl.rewards.pool.worker import Answer
from mega_rl.rewards.sandbox.scratch import Scratch

GREETING_S = 10.0  # from a connection to the key
WELCOME, WELCOME_S = b"welcome", 120.0  # the answer to the key


@dataclass(frozen=True)
class WorkerAddress:
    """Where the other ranks of a machine find the workers."""

    directory: str
    key: bytes
    takes_images: bool = False  # see `Pool.takes_images`


def machine() -> str:
    """What processes have in common that can reach each other's files and processes: machine and container."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:  # hidden in some containers
        boot = ""
    return f"{socket.gethostname()} {boot} {os.stat('/proc/self/ns/mnt').st_ino}"


def owners_of(machines: Sequence[str]) -> list[int]:
    """The first rank of each machine; ``machines``: those of all ranks."""
    return [rank for rank, machine in enumerate(machines) if machines.index(machine) == rank]


def offer(pool: Pool, num_ranks: int) -> WorkerAddress:
    """Let so many other ranks use the pool, until they end or this process does."""
    home, key, stack = Scratch(), secrets.token_bytes(32), contextlib.ExitStack()
    listener = Listener(stack.enter_context(_path_of(home.path)), "AF_UNIX", backlog=num_ranks)
    stack.enter_context(listener)
    threading.Thread(target=_let_in, args=(stack, listener, home, key, pool, num_ranks), daemon=True).start()
    return WorkerAddress(home.path, key, pool.takes_images)


@contextlib.contextmanager
def _path_of(directory: str) -> Iterator[str]:
    """A path of the socket that is short, whatever the directory's: a socket's may have no more than 107 bytes."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/socket"
    finally:
        os.close(descriptor)


def _let_in(
    stack: contextlib.ExitStack, listener: Listener, home: Scratch, key: bytes, pool: Pool, num_ranks: int
) -> None:
    num_known = 0
    with contextlib.suppress(OSError), stack:
        while num_known < num_ranks:
            connection: Any = listener.accept()
            if knows(connection, key):
                threading.Thread(target=serve, args=(connection, pool), daemon=True).start()
                num_known += 1
            else:
                connection.close()
    home.remove()


def knows(connection: Any, key: bytes) -> bool:
    """Whether the other side of a new connection has shown the key; if so it is let in."""
    try:
        with _reading_within(connection, GREETING_S):
            is_right = secrets.compare_digest(connection.recv_bytes(len(key)), key)
        if is_right:
            connection.send_bytes(WELCOME)
        return is_right
    except (OSError, EOFError):  # it ended, fell silent, or sent something longer
        return False


@contextlib.contextmanager
def _reading_within(connection: Any, limit_s: float) -> Iterator[None]:
    """Inside, bytes that do not come for so long raise OSError, also in the middle of a message."""

    def limit(both_ends: socket.socket, seconds: float) -> None:
        timeval = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        both_ends.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)

    with _socket_of(connection) as both_ends:
        limit(both_ends, limit_s)
        yield
        limit(both_ends, 0.0)  # none


def end(connection: Any) -> None:
    """End it for whoever reads it or writes to it, here and at its other end."""
    with contextlib.suppress(OSError), _socket_of(connection) as both_ends:
        both_ends.shutdown(socket.SHUT_RDWR)


def _socket_of(connection: Any) -> socket.socket:
    """Its socket under another number, which is closed by itself."""
    return socket.socket(fileno=os.dup(connection.fileno()))


def serve(connection: Any, pool: Pool, of_owned: Callable[[int], Future[Answers]] | None = None) -> None:
    """Answer one rank's submissions until it ends; ``of_owned`` those that name something of this process."""
    is_writing = threading.Lock()

    def answer(number: int, answered: Future[Answers]) -> None:
        error = answered.exception()
        message = {"number": number} | ({"answers": answered.result()} if error is None else {"error": str(error)})
        with is_writing, contextlib.suppress(OSError):  # it ended
            connection.send_bytes(json.dumps(message).encode())

    with connection, contextlib.suppress(OSError, EOFError):
        while True:
            header = json.loads(connection.recv_bytes())
            samples = [connection.recv_bytes() for _ in range(header["num_samples"])]
            if header["owned"] is None:
                answered = pool.submit(samples, header.get("rewards"))
            else:
                assert of_owned is not None, "a rank that owns nothing is asked for something"
                answered = of_owned(header["owned"])
            answered.add_done_callback(partial(answer, header["number"]))


def loss(owner: str, where: str = "this node") -> PoolError:
    """That the rank with some workers is gone; ``owner``: what to call it in a sentence."""
    return PoolError(f"rewards: {owner}, which has the reward workers of {where}, ended; see what it said")


def reach(address: WorkerAddress, owner: str) -> RemotePool:
    """Connect to the workers of another rank of this machine.

    Raises:
        PoolError: the owner is gone.
    """
    try:
        with _path_of(address.directory) as path:
            connection: Any = Client(path, "AF_UNIX")
        introduce(connection, address.key)
    except (OSError, EOFError) as error:
        raise loss(owner) from error
    return RemotePool(connection, address.takes_images, loss(owner))


def introduce(connection: Any, key: bytes) -> None:
    """Show the key to the other side of a new connection, and wait until it lets us in.

    Raises:
        OSError, EOFError: it does not.
    """
    connection.send_bytes(key)
    if not connection.poll(WELCOME_S):
        raise EOFError
    connection.recv_bytes(len(WELCOME))


def submission(number: int, samples: Sequence[bytes], owned: int | None, rewards: Sequence[int] | None = None) -> bytes:
    """What is said before samples that are submitted.

    Args:
        owned: see `RemotePool.submit_owned`.
        rewards: see `Pool.submit`.
    """
    of_some = {} if rewards is None else {"rewards": list(rewards)}
    return json.dumps({"number": number, "num_samples": len(samples), "owned": owned, **of_some}).encode()


class RemotePool:
    """The workers that another rank owns. Whoever submits does not wait for that rank, whatever it does."""

    def __init__(self, connection: Any, takes_images: bool, loss: PoolError) -> None:
        """``loss``: what all are told that wait for answers when the owner is gone."""
        self.takes_images = takes_images
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._open: dict[int, Future[Answers]] = {}  # without an answer
        self._is_lost = False
        self._loss, self._connection = loss, connection
        self._to_send: SimpleQueue[tuple[int, Sequence[bytes], int | None, Sequence[int] | None] | None] = SimpleQueue()
        for work in (self._send, self._receive):
            threading.Thread(target=work, daemon=True).start()

    def submit(self, samples: Sequence[bytes], rewards: Sequence[int] | None = None) -> Future[Answers]:
        """See `Pool.submit`."""
        return self._submit(samples, None, rewards)

    def submit_owned(self, number: int) -> Future[Answers]:
        """Have the owner of the workers submit what it owns under a number."""
        return self._submit((), number)

    def _submit(
        self, samples: Sequence[bytes], owned: int | None, rewards: Sequence[int] | None = None
    ) -> Future[Answers]:
        result: Future[Answers] = Future()
        with self._lock:
            if self._is_lost:
                result.set_exception(self._loss)
                return result
            number = next(self._numbers)
            self._open[number] = result
            self._to_send.put((number, samples, owned, rewards))
        return result

    def close(self) -> None:
        end(self._connection)

    def _send(self) -> None:
        with contextlib.suppress(OSError):  # then `_receive` finds the end of the connection too
            while (work := self._to_send.get()) is not None:
                number, samples, owned, rewards = work
                self._connection.send_bytes(submission(number, samples, owned, rewards))
                for sample in samples:
                    self._connection.send_bytes(sample)

    def _receive(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                message = json.loads(self._connection.recv_bytes())
                with self._lock:
                    result = self._open.pop(message["number"])
                if "error" in message:
                    result.set_exception(PoolError(message["error"]))
                else:
                    result.set_result([[_answer(value) for value in of_reward] for of_reward in message["answers"]])
        with self._lock:
            self._is_lost = True
            left = list(self._open.values())
            self._open.clear()
            self._to_send.put(None)
        self._connection.close()
        for result in left:
            result.set_exception(self._loss)


def _answer(value: float | dict[str, float] | list[str]) -> Answer:
    return (value[0], value[1]) if isinstance(value, list) else value
