"""The process that holds copies of states: whole ones only, the newest, and no longer than torchrun lives."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mega_rl.parallel.watch import copy_server

LIMIT_S = 60.0


@contextmanager
def kept(name: str) -> Iterator[tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]]:
    """A process in the place of torchrun, and the copy server that watches it."""
    launcher = subprocess.Popen(("sleep", "600"))
    arguments = (name, str(launcher.pid), copy_server.start_of(launcher.pid))
    process = subprocess.Popen((sys.executable, "-I", "-S", str(Path(copy_server.__file__)), *arguments))
    try:
        yield launcher, process
    finally:
        for each in (launcher, process):
            each.kill()
            each.wait()


def connect(name: str) -> socket.socket:
    end = time.monotonic() + LIMIT_S
    while True:
        try:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect("\0" + name)
            return connection
        except ConnectionRefusedError:
            assert time.monotonic() < end
            time.sleep(0.02)


def put(rank: int, step: int, content: bytes, digest: str | None = None) -> dict[str, Any]:
    size, own = len(content), copy_server.digest_of(content)
    return {"do": "put", "rank": rank, "step": step, "run": "a", "size": size, "digest": digest or own}


def ask(connection: socket.socket, message: dict[str, Any], content: bytes = b"") -> tuple[dict[str, Any], bytes]:
    with connection.makefile("rwb") as stream:
        copy_server.send(stream, message, content)
        answer, body = copy_server.receive(stream)
        return answer, bytes(body)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return f"mega_rl_test_{request.node.name}_{time.monotonic_ns()}"


def test_the_newest_copies_of_each_rank_are_kept_and_given_back(name: str) -> None:
    with kept(name), connect(name) as connection:
        for step in (1, 2, 3):
            for rank in (0, 1):
                content = f"{rank} {step}".encode() * 1000
                assert ask(connection, put(rank, step, content), content)[0] == {"is_kept": True}
        copies = ask(connection, {"do": "list"})[0]["copies"]
        assert sorted((copy["rank"], copy["step"]) for copy in copies) == [(0, 2), (0, 3), (1, 2), (1, 3)]
        assert ask(connection, {"do": "get", "rank": 1, "step": 3})[1] == b"1 3" * 1000
        assert ask(connection, {"do": "get", "rank": 1, "step": 1}) == ({}, b"")
        # A run that went on from step 2 has another step 3.
        assert ask(connection, put(0, 2, b"other"), b"other")[0] == {"is_kept": True}
        copies = ask(connection, {"do": "list"})[0]["copies"]
        assert sorted((copy["rank"], copy["step"]) for copy in copies) == [(0, 2), (1, 2), (1, 3)]


def test_no_copy_that_is_not_whole_is_kept(name: str) -> None:
    with kept(name), connect(name) as connection:
        assert ask(connection, put(0, 1, b"whole"), b"whole")[0] == {"is_kept": True}
        assert ask(connection, put(0, 2, b"other", copy_server.digest_of(b"bytes")), b"other")[0] == {"is_kept": False}
        with connect(name) as dying, dying.makefile("rwb") as stream:
            copy_server.send(stream, put(0, 3, bytes(1 << 20)), bytes(1 << 19))  # and no more
        copies = ask(connection, {"do": "list"})[0]["copies"]
        assert [(copy["rank"], copy["step"]) for copy in copies] == [(0, 1)]


def test_the_ranks_of_a_node_are_hashed_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each put waits for the hash of the other, so under one lock neither would end."""
    server, both, digest_of = copy_server.CopyServer(), threading.Barrier(2), copy_server.digest_of
    puts = [put(rank, 1, b"state") for rank in (0, 1)]

    def met(content: bytes) -> str:
        both.wait(LIMIT_S)
        return digest_of(content)

    monkeypatch.setattr(copy_server, "digest_of", met)
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(lambda message: server._answer(message, bytearray(b"state")), puts))
    assert answers == [({"is_kept": True}, b"")] * 2
    listed, _ = server._answer({"do": "list"}, bytearray())
    assert sorted(kept["rank"] for kept in listed["copies"]) == [0, 1]


def test_it_ends_with_torchrun_and_its_name_is_free(name: str) -> None:
    with kept(name) as (launcher, process):
        connect(name).close()
        launcher.kill()
        launcher.wait()
        assert process.wait(LIMIT_S) == 0
    with kept(name), connect(name) as connection:
        assert ask(connection, {"do": "list"})[0] == {"copies": []}


def test_it_does_not_begin_when_torchrun_is_gone(name: str) -> None:
    with kept(name) as (launcher, _):
        arguments = (name + "_late", str(launcher.pid), "1")  # another process with that number
        late = subprocess.run(
            (sys.executable, "-I", "-S", str(Path(copy_server.__file__)), *arguments), timeout=LIMIT_S
        )
    assert late.returncode == 0


def test_other_users_are_not_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    assert copy_server.is_own_user(one)
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    assert not copy_server.is_own_user(one)
    one.close()
    other.close()
