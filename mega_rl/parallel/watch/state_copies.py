"""The ranks' side of the copy server of their node: copies of their states that outlive them under torchrun."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from mega_rl.errors import InputError
from mega_rl.parallel.collectives import gather_objects, smallest
from mega_rl.parallel.watch import copy_server

_START_S = 20.0


class StateCopies:
    """The copies that this run's nodes hold. Every method is for all ranks to call together.

    Args:
        run: what tells this run's states from others that the same torchrun may have started.

    Raises:
        InputError: on every rank, if nodes have different numbers of ranks, whose places on them do not correspond.
    """

    def __init__(self, run: str) -> None:
        world, here = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        fewest, most = smallest(here), -smallest(-here)
        if fewest != most:
            raise InputError(
                "checkpoint.local keeps a copy of each rank's state on the next node, and the nodes of this run have "
                f"from {fewest} to {most} ranks: start equally many on each, or set checkpoint.local to 0"
            )
        self._run = run
        self._connection = _connect(os.getppid())
        self._stream = self._connection.makefile("rwb")
        self._is_first_here = os.environ.get("LOCAL_RANK", "0") == "0"
        # The rank of the next node with the same place holds a copy too; alone there is none.
        self._distance = here if world > here else 0

    def keep(self, step: int, content: bytes) -> None:
        """Have this rank's state after ``step`` kept on its node, and on the next one."""
        self._put(dist.get_rank(), step, content)
        if self._distance:
            rank, world = dist.get_rank(), dist.get_world_size()
            received = _exchange(content, (rank + self._distance) % world, (rank - self._distance) % world)
            self._put((rank - self._distance) % world, step, received)

    def newest(self) -> int | None:
        """The newest step of which every rank's copy is somewhere."""
        held = self._held()
        steps = [{step for ranks in held for r, step in ranks if r == rank} for rank in range(dist.get_world_size())]
        return max(set.intersection(*steps), default=None)

    def get(self, step: int) -> bytes:
        """This rank's state after ``step``, which ``newest`` has named; from its node if that has it."""
        held, rank = self._held(), dist.get_rank()
        own = self._fetch(rank, step) if (rank, step) in self._here else None
        lacking = [r for r, has in enumerate(gather_objects(own is not None)) if not has]
        for other in lacking:
            holder = next(r for r, copies in enumerate(held) if (other, step) in copies)
            if rank == holder:
                content = self._fetch(other, step)
                dist.send(torch.tensor([len(content)]), other)
                dist.send(torch.frombuffer(bytearray(content), dtype=torch.uint8), other)
            elif rank == other:
                own = _received(holder)
        assert own is not None
        return own

    def _held(self) -> list[set[tuple[int, int]]]:
        """By rank what its node holds, as (rank, step); a node answers through its first rank."""
        copy_server.send(self._stream, {"do": "list"})
        message, _ = copy_server.receive(self._stream)
        own = [kept for kept in message["copies"] if kept["run"] == self._run]
        self._here = {(kept["rank"], kept["step"]) for kept in own}
        found: list[set[tuple[int, int]]] = gather_objects(self._here if self._is_first_here else set())
        return found

    def _put(self, rank: int, step: int, content: bytes) -> None:
        message = {"do": "put", "rank": rank, "step": step, "run": self._run, "size": len(content)}
        copy_server.send(self._stream, message | {"digest": copy_server.digest_of(content)}, content)
        answer, _ = copy_server.receive(self._stream)
        assert answer["is_kept"], "bytes changed between two processes of one machine"

    def _fetch(self, rank: int, step: int) -> bytes:
        copy_server.send(self._stream, {"do": "get", "rank": rank, "step": step})
        message, content = copy_server.receive(self._stream)
        assert copy_server.digest_of(content) == message["digest"], "a copy in memory has changed"
        return bytes(content)


def _received(source: int) -> bytes:
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, source)
    content = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(content, source)
    return content.numpy().tobytes()


def _exchange(content: bytes, target: int, source: int) -> bytes:
    """Send bytes to one rank and take those of another one."""
    size = torch.zeros(1, dtype=torch.int64)
    for operation in (dist.isend(torch.tensor([len(content)]), target), dist.irecv(size, source)):
        assert operation is not None
        operation.wait()
    taken = torch.empty(int(size), dtype=torch.uint8)
    outgoing = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    for operation in (dist.isend(outgoing, target), dist.irecv(taken, source)):
        assert operation is not None
        operation.wait()
    return taken.numpy().tobytes()


def _connect(launcher: int) -> socket.socket:
    """To the copy server of this node, which is started if there is none yet."""
    name = f"mega_rl_keeper_{os.geteuid()}_{launcher}"
    end = time.monotonic() + _START_S
    is_started = False
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect("\0" + name)
        except ConnectionRefusedError:
            connection.close()
            if not is_started:  # of several, the first takes the name and the others end
                arguments = (name, str(launcher), copy_server.start_of(launcher))
                command = (sys.executable, "-I", "-S", str(Path(copy_server.__file__)), *arguments)
                subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, close_fds=True, cwd="/")
                is_started = True
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
            continue
        if not copy_server.is_own_user(connection):
            raise InputError(
                f"checkpoint.local: another user of this machine has taken the socket {name}: start the run again, or "
                "set checkpoint.local=0"
            )
        return connection
