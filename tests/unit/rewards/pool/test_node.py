"""A pool that another rank uses, within one process; `tests/distributed/rewards/test_reward_node.py` has real ranks."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection
from pathlib import Path

import pytest

from mega_rl.rewards.pool import node
from mega_rl.rewards.pool.dispatch import PoolError
from mega_rl.rewards.pool.node import WorkerAddress, _path_of, offer, reach
from mega_rl.rewards.pool.nodes import connection_of, listen
from mega_rl.rewards.pool.pool import WorkerPool
from mega_rl.rewards.pool.process import FORGED
from mega_rl.rewards.pool.worker import GARBLED
from tests.pretended.reward_workers import PretendedWorker, pretended_pool, right


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    with pretended_pool(PretendedWorker, 2) as made:
        yield made


def test_another_rank_gets_the_same_answers(pool: WorkerPool) -> None:
    address = offer(pool, 1)
    assert os.stat(address.directory).st_mode & 0o777 == 0o700
    remote = reach(address, "rank 0")
    values = [0.1, 1 / 3, -1e30, 5e-324]
    samples = [*map(right, values), b"rubbish\n"]
    many = [remote.submit(samples) for _ in range(20)]
    assert {str(future.result(timeout=60)) for future in many} == {str([[*values, (GARBLED, FORGED)]])}
    assert pool.submit(samples).result(timeout=60) == many[0].result()
    assert remote.submit([]).result(timeout=60) == [[]]
    assert remote.submit(samples, (0,)).result(timeout=60) == many[0].result()
    assert remote.submit(samples, ()).result(timeout=60) == []
    remote.close()
    with pytest.raises(PoolError, match="rank 0, which has the reward workers of this node, ended"):
        while True:  # until the end has been noticed
            remote.submit([right(1.0)]).result(timeout=60)


def test_whoever_has_no_key_is_not_let_in(pool: WorkerPool) -> None:
    address = offer(pool, 2)
    for key in (b"", b"x" * 32, b"x" * 100_000):
        ended = pytest.raises((EOFError, OSError))
        with _path_of(address.directory) as path, Client(path, "AF_UNIX") as stranger, ended:
            stranger.send_bytes(key)
            stranger.recv_bytes()
    with pytest.raises(PoolError, match="rank 3, .* ended"):
        reach(WorkerAddress(address.directory, b"y" * 32), "rank 3")
    remotes = [reach(address, "rank 0") for _ in range(2)]
    assert [remote.submit([right(2.0)]).result(timeout=60) for remote in remotes] == [[[2.0]]] * 2
    for remote in remotes:
        remote.close()


@pytest.mark.parametrize("said", [b"", b"\n", b"\0\0\0\x20half"])
def test_who_falls_silent_before_the_key_is_whole_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(node, "GREETING_S", 0.05)
    with listen(is_here=True) as listener, socket.create_connection(listener.getsockname()) as stranger:
        stranger.sendall(said)
        with connection_of(listener.accept()[0]) as connection:
            assert not node.knows(connection, bytes(32))
    with listen(is_here=True) as listener, connection_of(socket.create_connection(listener.getsockname())) as friend:
        friend.send_bytes(bytes(32))
        with connection_of(listener.accept()[0]) as connection:
            assert node.knows(connection, bytes(32)), "who has the key is let in"
            assert struct.unpack("@ll", _receiving_limit(connection)) == (0, 0), "and may be silent from then on"


def _receiving_limit(connection: Connection) -> bytes:
    with socket.socket(fileno=os.dup(connection.fileno())) as both_ends:
        return both_ends.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)


def test_what_ends_the_workers_is_told_to_the_other_ranks(pool: WorkerPool) -> None:
    remote = reach(offer(pool, 1), "rank 0")
    assert remote.submit([right(2.0)]).result(timeout=60) == [[2.0]]
    pool.close()
    with pytest.raises(PoolError, match="the workers were closed"):
        remote.submit([right(2.0)]).result(timeout=60)
    remote.close()


def test_no_owner_is_a_sentence(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "gone"):
        with pytest.raises(PoolError, match="rank 0, .* ended; see what it said"):
            reach(WorkerAddress(str(directory), b""), "rank 0")
