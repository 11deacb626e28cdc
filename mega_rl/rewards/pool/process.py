"""One reward worker as the pool sees it: started clean, spoken to with deadlines, killed with all that it started."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import psutil

from mega_rl.rewards.pool import memory
from mega_rl.rewards.pool.worker import EXITED, GARBLED, HEADER, WorkerProgress
from mega_rl.rewards.sandbox.scratch import Scratch

# A fresh interpreter, never a fork of the trainer: it inherits none of the trainer's locks, devices or process groups.
BOOT = (
    "import sys; sys.path[:] = {path!r}; from mega_rl.rewards.pool.worker import main; main({fd}, {parent}, {progress})"
)
MAX_REPLY_BYTES = 1 << 20
SEND_TIMEOUT_S = 60.0  # a worker that is idle reads at once
MAX_KILL_ROUNDS = 100
EXIT_WAIT_S = 1.0
FORGED = "wrote to the channel between worker and trainer"


class WorkerFailure(Exception):
    """The worker can no longer be used: cause and detail."""


class WorkerProcess:
    """A running worker; not usable after `kill`."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair()
        self._buffer = b""
        self._scratch = Scratch()  # its temporary files, removed with it
        self.scratch = self._scratch.path
        shared = _sealed_memory(WorkerProgress.SIZE)
        boot = BOOT.format(path=sys.path, fd=theirs.fileno(), parent=os.getpid(), progress=shared)
        # A fixed hash seed: values that follow the order of a set are the same in every worker.
        environment = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "TMPDIR": self.scratch}
        with theirs:
            self._process = subprocess.Popen(
                (sys.executable, "-c", boot),
                env=environment,
                pass_fds=(theirs.fileno(), shared),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a signal to the trainer's process group does not reach it, nor the reverse
            )
        self.progress = WorkerProgress(shared)

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self._channel.fileno()

    def has_ended(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def send(self, message: Any) -> None:
        """Raises WorkerFailure if the worker does not read."""
        data = pickle.dumps(message)
        self._channel.settimeout(SEND_TIMEOUT_S)
        try:
            self._channel.sendall(HEADER.pack(len(data)) + data)
        except OSError as error:
            raise self.failure() from error

    def receive(self) -> dict[str, Any] | None:
        """What came in: one whole message, or None while it is incomplete. Does not block.

        Raises:
            WorkerFailure: the worker ended, or something else wrote to the channel.
        """
        self._channel.setblocking(False)
        try:
            part = self._channel.recv(MAX_REPLY_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            part = b""
        if not part:
            raise self.failure()
        self._buffer += part
        line, end, rest = self._buffer.partition(b"\n")
        if not end and len(line) <= MAX_REPLY_BYTES:
            return None
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise WorkerFailure(GARBLED, FORGED) from error
        if rest or not isinstance(message, dict):
            raise WorkerFailure(GARBLED, FORGED)
        self._buffer = b""
        return message

    def exceeds(self, limit_bytes: int) -> bool:
        """Whether it or a descendant has more memory than the limit, shared memory included; see `memory.exceeds`."""
        return memory.exceeds(self.pid, limit_bytes)

    def kill(self) -> None:
        """End the worker and every process that it started, sessions of their own included."""
        self._channel.close()
        with contextlib.suppress(psutil.NoSuchProcess):
            _kill_tree(psutil.Process(self._process.pid))
        with contextlib.suppress(ProcessLookupError):  # what an ended worker left in its group
            os.killpg(self._process.pid, signal.SIGKILL)
        _kill_named(self.scratch)
        self._process.wait()
        self._scratch.remove()

    def failure(self) -> WorkerFailure:
        """The failure of a worker that ended or no longer listens."""
        return WorkerFailure(EXITED, self._how_it_ended())

    def _how_it_ended(self) -> str:
        deadline = time.monotonic() + EXIT_WAIT_S
        while time.monotonic() < deadline:
            # Seen, but not reaped: until `kill` its number stays that of its process group.
            status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status is not None and status.si_code == os.CLD_EXITED:
                return f"ended the worker with exit status {status.si_status}"
            if status is not None:
                return f"ended the worker by signal {status.si_status}"
            time.sleep(0.005)
        return "closed the channel between worker and trainer"


def _kill_tree(worker: psutil.Process) -> None:
    """Kill all descendants, then the worker: stopped, it starts no more of them and adopts the orphans among them."""
    worker.suspend()
    for _ in range(MAX_KILL_ROUNDS):  # more than one if they multiply
        running = [child for child in worker.children(recursive=True) if _is_running(child)]
        if not running:
            break
        for child in running:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    worker.kill()


def _kill_named(scratch: str) -> None:
    """Kill what still has the worker's temporary directory in its environment.

    A worker that ended by itself no longer adopts orphans, so that a process that left its session is in no tree.
    """
    entry = os.fsencode(f"TMPDIR={scratch}")
    for _ in range(MAX_KILL_ROUNDS):
        running = [pid for pid in psutil.pids() if _has_variable(pid, entry)]
        if not running:
            break
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _has_variable(pid: int, entry: bytes) -> bool:
    """Whether a process was started with that variable, or with a directory in it; an ended one has none."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return any(own == entry or own.startswith(entry + b"/") for own in file.read().split(b"\0"))
    except OSError:  # another user's, or it ended
        return False


def _sealed_memory(num_bytes: int) -> int:
    """A descriptor of memory, zeros, whose size nobody can change any more."""
    descriptor = os.memfd_create("mega_rl_progress", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
