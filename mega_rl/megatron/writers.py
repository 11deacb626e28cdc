"""The processes that Megatron forks to write a checkpoint: how they report to their rank, and end with it."""

from __future__ import annotations

import ctypes
import os
import pickle
import queue
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem_async

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class _WriteResults:
    """What the writer process of this rank reports, in a file that has no name and that no other rank has.

    Megatron's own channel is a manager process that imports the entry script again, which takes seconds and hangs
    scripts without a main guard; a pipe would fill up, since the writer's end is awaited before its report is read.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - open as long as the process
        self.process_id = os.getpid()

    def put(self, results: Any) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._file.write(pickle.dumps(results))

    def get_nowait(self) -> Any:
        self._file.seek(0)
        content = self._file.read()
        if not content:
            raise queue.Empty
        self._file.seek(0)
        self._file.truncate()
        return pickle.loads(content)


def prepare_writers() -> None:
    """Give Megatron the file of this process; ranks that are copies of one process would read each other's."""
    present = filesystem_async._results_queue
    if not isinstance(present, _WriteResults) or present.process_id != os.getpid():
        filesystem_async._results_queue = _WriteResults()


class _Forks:
    """Lets a process that is forked while ``is_bound`` end with the one that forked it, and so on down the line.

    A writer whose rank was killed would wait for ever to be told that its report has been read.
    """

    def __init__(self) -> None:
        self.is_bound = False
        self._parent = 0
        os.register_at_fork(before=self._before, after_in_child=self._in_child)

    def _before(self) -> None:
        self._parent = os.getpid()

    def _in_child(self) -> None:
        if self.is_bound:
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != self._parent:  # it ended before this process could ask
                os._exit(1)


_forks = _Forks()


@contextmanager
def writers_end_with_us() -> Iterator[None]:
    """What is forked in this block, and what that forks, is killed when its parent has ended, however it ended."""
    _forks.is_bound = True
    try:
        yield
    finally:
        _forks.is_bound = False
