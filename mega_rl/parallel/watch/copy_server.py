"""A process of each node that holds copies of the ranks' states in its memory for as long as torchrun lives.

Started as a script, with nothing but the standard library: ``copy_server.py NAME LAUNCHER START``. It listens at the
abstract socket NAME, which is no file and is gone with the process, to processes of its own user only, and ends with
the process LAUNCHER that began at START (as ``/proc/PID/stat`` has it).

A message is one line of JSON and, where it says so, as many bytes as its ``size``:
``{"do": "put", "rank": R, "step": S, "run": TEXT, "size": N, "digest": D}`` and N bytes; the
answer is ``{"is_kept": BOOL}``.
``{"do": "list"}``: ``{"copies": [...]}``, what was put, without the bytes.
``{"do": "get", "rank": R, "step": S}``: what was put, with the bytes; ``{}`` if there is none.
A copy whose bytes did not all arrive, or have another digest, is not kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import socket
import struct
import sys
import threading
from io import BufferedRWPair
from typing import Any

NUM_KEPT = 2  # newest steps of each rank: while some ranks have put a step, others have the one before


def digest_of(content: bytes | bytearray | memoryview) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def start_of(pid: int) -> str:
    """When a process began, which tells it from a later one with its number; empty if there is none."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def is_own_user(connection: socket.socket) -> bool:
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.geteuid())


def send(stream: BufferedRWPair, message: dict[str, Any], content: bytes | bytearray = b"") -> None:
    stream.write(json.dumps(message).encode() + b"\n")
    stream.write(content)
    stream.flush()


def receive(stream: BufferedRWPair) -> tuple[dict[str, Any], bytearray]:
    """A message and its bytes.

    Raises:
        EOFError: the other side ended within it, or before it.
    """
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    message = json.loads(line)
    content = bytearray(message.get("size", 0) if message.get("do") in ("put", "copy") else 0)
    if content and stream.readinto(content) != len(content):
        raise EOFError
    return message, content


class CopyServer:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._copies: dict[tuple[int, int], tuple[dict[str, Any], bytearray]] = {}  # rank, step -> what was put

    def serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rwb") as stream:
            try:
                while True:
                    message, content = receive(stream)
                    answer, body = self._answer(message, content)
                    send(stream, answer, body)
            except (EOFError, OSError, ValueError):
                return

    def _answer(self, message: dict[str, Any], content: bytearray) -> tuple[dict[str, Any], bytes | bytearray]:
        if message["do"] == "put":
            is_whole = digest_of(content) == message["digest"]  # unlocked: ranks of a node hash side by side
            if is_whole:
                with self._lock:
                    self._put(message, content)
            return {"is_kept": is_whole}, b""
        with self._lock:
            if message["do"] == "list":
                return {"copies": [kept for kept, _ in self._copies.values()]}, b""
            kept, body = self._copies.get((message["rank"], message["step"]), ({}, bytearray()))
            return ({**kept, "do": "copy"} if kept else {}), body

    def _put(self, message: dict[str, Any], content: bytearray) -> None:
        rank, step = message["rank"], message["step"]
        self._copies[rank, step] = message, content
        of_rank = sorted(s for r, s in self._copies if r == rank and s <= step)
        later = [s for r, s in self._copies if r == rank and s > step]  # of before a restart that went further back
        for old in [*of_rank[:-NUM_KEPT], *later]:
            del self._copies[rank, old]


def main(name: str, launcher: int, start: str) -> None:
    end = os.pidfd_open(launcher)
    if start_of(launcher) != start:
        return
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind("\0" + name)
    except OSError:  # there is one already
        return
    listener.listen(64)
    server = CopyServer()
    while True:
        ready, _, _ = select.select([end, listener.fileno()], [], [])
        if end in ready:
            os._exit(0)
        connection, _ = listener.accept()
        if is_own_user(connection):
            threading.Thread(target=server.serve, args=(connection,), daemon=True).start()
        else:
            connection.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
