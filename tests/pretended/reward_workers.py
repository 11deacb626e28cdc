"""Reward workers without processes: each sample says in its own bytes what comes back over the channel."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from mega_rl.rewards.pool import dispatch
from mega_rl.rewards.pool.pool import WorkerPool
from mega_rl.rewards.pool.process import WorkerFailure, WorkerProcess, _sealed_memory
from mega_rl.rewards.pool.worker import EXITED, WorkerCall, WorkerProgress, WorkerSetup

ENDED = WorkerFailure(EXITED, "ended the worker with exit status 3")


class PretendedWorker(WorkerProcess):
    """The pool's end of a worker is the real one; the other end answers each sample with the bytes of the sample.

    ``NUMBER`` in them is the call's number. Without an end of the line the worker closes its end, as one that died. A
    sample ``hang`` is answered with 1 when ``released`` is set.
    """

    released = threading.Event()
    num_started = 0

    def __init__(self) -> None:
        self._channel, self._theirs = socket.socketpair()
        self._buffer = b""
        self.scratch = "none"
        self.progress = WorkerProgress(_sealed_memory(WorkerProgress.SIZE))
        type(self).num_started += 1

    @property
    def pid(self) -> int:
        return 0

    def has_ended(self) -> bool:
        return False

    def exceeds(self, limit_bytes: int) -> bool:
        return False

    def failure(self) -> WorkerFailure:
        return ENDED

    def kill(self) -> None:
        self._channel.close()
        self._theirs.close()

    def send(self, message: Any) -> None:
        if isinstance(message, WorkerSetup):
            self._theirs.sendall(json.dumps({"ready": ["sample"] * len(message.rewards)}).encode() + b"\n")
            return
        assert isinstance(message, WorkerCall)
        (sample,) = message.samples
        data = sample.replace(b"NUMBER", str(message.number).encode())
        threading.Thread(target=self._answer, args=(data, message.number), daemon=True).start()

    def _answer(self, data: bytes, number: int) -> None:
        if data == b"hang":
            self.released.wait()
            data = right(1.0).replace(b"NUMBER", str(number).encode())
        try:
            self._theirs.sendall(data)
            if b"\n" not in data:
                self._theirs.close()
        except OSError:  # the pool has heard enough
            pass


def right(value: float) -> bytes:
    return b'{"number": NUMBER, "answers": [%s]}\n' % json.dumps(value).encode()


@contextmanager
def pretended_pool(kind: Callable[[], WorkerProcess], num_workers: int) -> Iterator[WorkerPool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "WorkerProcess", kind)
        patch.setattr(dispatch, "CALL_S", 0.0)  # one sample per call
        pool = WorkerPool(WorkerSetup((("mine.py:reward", {}),), 600.0, 1 << 30), num_workers)
        try:
            yield pool
        finally:
            pool.close()
