"""Runs untrusted Python programs, with limits, from an interpreter that is warm. Imports no torch.

There are two levels of isolation. With namespaces the program is nobody, has no capability, and lives in user, mount,
process, network, IPC and host-name namespaces of its own: it sees the system's programs and libraries read-only, its
own processes, and a small private directory for temporary files. Without them (``limits``) it is a process of the
trainer's user like any other, but for the limits on its resources: see docs/rewards.md for what that means.

A zygote (`mega_rl.rewards.sandbox.zygote`), a process of the one that asks, forks for every program; namespaces,
directory and limits are made anew each time.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, Any, Literal

from mega_rl.rewards.sandbox import launcher, zygote
from mega_rl.rewards.sandbox.scratch import remove_tree

NUM_OPEN_FILES = 64
ROOT = str(Path(__file__).resolve().parents[3])
MARGIN_S = 30.0  # beyond all limits of a call; then its processes were stopped from outside
START_S = 120.0  # of a zygote, with what it loads, on however busy a machine
MAX_TRIES, TRY_AGAIN_S = 5, 0.2  # of a call whose zygote was ended from outside
# Libraries that a zygote loads compute in one thread, as only one is left after a fork.
THREADS = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
# What of a tree of installed programs may be seen: not what else a project keeps beside them, such as data and output.
INSTALLED = ("bin", "sbin", "lib", "lib32", "lib64", "libexec", "share", "pyvenv.cfg")
LOADER = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime")


class NotIsolatedError(OSError):
    """The program was not run: this system does not allow the isolation that was asked for. Names the step."""


class SessionEndedError(OSError):
    """A session cannot run another program."""


Kind = tuple[bool, tuple[str, ...], tuple[str, ...] | None]  # namespaces, preload, trusted_paths


@dataclass(frozen=True)
class ProgramLimits:
    """The limits of one run of a program."""

    timeout_s: float  # wall clock; CPU time is limited to the same, rounded up
    memory_bytes: int  # address space of each of its processes
    file_bytes: int = 1 << 24  # of each file it writes, standard output included
    num_processes: int = 32  # per user of this system before Linux 5.14, per program since
    temporary_bytes: int = 1 << 26  # of all its files together, with namespaces
    namespaces: bool = True


@dataclass(frozen=True)
class ProgramRun:
    """What became of a program."""

    exit_code: int | None  # None: out of time; negative: ended by that signal
    output: str  # standard output, up to the limit of a file
    cpu_s: float = field(default=0.0, repr=False, compare=False)  # of its processes, and of starting and ending it


def run_program(
    source: str,
    stdin: str,
    limits: ProgramLimits,
    with_errors: bool = False,
    preload: tuple[str, ...] = (),
    trusted_paths: tuple[str, ...] | None = None,
) -> ProgramRun:
    """Run a program in a temporary directory of its own, without environment, descriptors or terminal.

    Args:
        with_errors: standard error is part of the output.
        preload: modules that are loaded before the program starts, besides the usual ones of the standard library.
        trusted_paths: the program is code of the user's, not of a model: it keeps this process's user, environment and
            network, and looks for modules there. Without namespaces. Time, memory, file size and the end of all that
            it started hold for it too.

    Raises:
        NotIsolatedError: namespaces are asked for and this system does not allow them, or this user is root and they
            are not asked for.
    """
    kind = _kind(limits, preload, trusted_paths)
    with contextlib.ExitStack() as stack:
        folder = _folder(limits, stack)
        descriptors, printed = _files(source, stdin, stack)
        ended = _call(_fields(limits, folder, with_errors), descriptors, kind)
        return ProgramRun(ended["exit_code"], _printed(printed, limits), ended["cpu_s"])


class SandboxSession:
    """Programs one after another in one place, until `close`; not for several threads at once.

    They share a directory of their own and, with namespaces, all namespaces; nothing of it is seen by other sessions.
    Each program has the limits of `run_program`, the files of all together `temporary_bytes`.
    """

    def __init__(
        self,
        limits: ProgramLimits,
        preload: tuple[str, ...] = (),
        keep: Literal["files", "state"] = "files",
        lifetime_s: float = 600.0,
    ) -> None:
        """Make the place.

        Args:
            keep: files: each program is a process of its own; state: they run in one live interpreter, which begins
                anew after a program that ran out of time or ended it. Its processor time is that of the lifetime.
            lifetime_s: after that the session has ended by itself.

        Raises:
            NotIsolatedError: see `run_program`.
        """
        self._limits = limits
        self._number = 0
        self._stack = contextlib.ExitStack()
        kind = _kind(limits, preload, None)
        try:
            folder = _folder(limits, self._stack)
            with contextlib.ExitStack() as files:
                descriptors, _ = _files("", "", files)
                fields = _fields(limits, folder, False) | {"keep": keep, "timeout_s": lifetime_s}
                self._answer, _ = _begin(fields, descriptors, kind)
        except BaseException:
            self._stack.close()
            raise

    def run(self, source: str, stdin: str = "", with_errors: bool = False) -> ProgramRun:
        """Run the next program.

        Raises:
            SessionEndedError: its time is over, or a program without namespaces ended it.
            NotIsolatedError: see `run_program`.
        """
        self._number += 1
        call = {"number": self._number, "timeout_s": self._limits.timeout_s, "with_errors": with_errors}
        with contextlib.ExitStack() as stack:
            descriptors, printed = _files(source, stdin, stack)
            self._answer.settimeout(zygote.SETUP_S + self._limits.timeout_s + MARGIN_S)
            try:
                socket.send_fds(self._answer, [json.dumps(call).encode()], descriptors)
                ended = _receive(self._answer)
            except OSError as error:
                raise SessionEndedError(f"the session has ended ({error})") from error
            if ended is not None and "refused" in ended:
                raise NotIsolatedError(ended["refused"])
            if ended is None or ended.get("number") != self._number:
                raise SessionEndedError("the session has ended")
            return ProgramRun(ended["exit_code"], _printed(printed, self._limits), ended["cpu_s"])

    def close(self) -> None:
        """End whatever still runs, and remove the directory."""
        with contextlib.suppress(OSError):
            self._answer.shutdown(socket.SHUT_WR)
            self._answer.settimeout(MARGIN_S)
            while self._answer.recv(zygote.MAX_MESSAGE_BYTES):
                pass
        self._answer.close()
        self._stack.close()


def _kind(limits: ProgramLimits, preload: tuple[str, ...], trusted_paths: tuple[str, ...] | None) -> Kind:
    """What zygote a program needs. Raises NotIsolatedError."""
    if not limits.namespaces and trusted_paths is None and os.geteuid() == 0:
        raise NotIsolatedError("a program is not run as root without namespaces")
    return limits.namespaces, preload, trusted_paths


def _folder(limits: ProgramLimits, stack: contextlib.ExitStack) -> str:
    """The working directory of a program, removed with the stack."""
    if limits.namespaces:
        return launcher.WORKING_DIRECTORY  # a directory inside the namespaces: there is nothing to remove outside
    folder = tempfile.mkdtemp(prefix="program_")
    stack.callback(remove_tree, folder)
    return folder


def _files(source: str, stdin: str, stack: contextlib.ExitStack) -> tuple[list[int], IO[bytes]]:
    """Descriptors of program, standard input and output, and the file of the last."""
    # Files without a name: no other program finds them.
    program, given, printed = [stack.enter_context(tempfile.TemporaryFile()) for _ in "123"]  # noqa: SIM115
    for file, text in ((program, source), (given, stdin)):
        file.write(text.encode(errors="replace"))
        file.seek(0)
    return [program.fileno(), given.fileno(), printed.fileno()], printed


def _printed(file: IO[bytes], limits: ProgramLimits) -> str:
    file.seek(0)
    return file.read(limits.file_bytes).decode(errors="replace")


def _fields(limits: ProgramLimits, folder: str, with_errors: bool) -> dict[str, Any]:
    """Of a `zygote.ProgramCall`, the descriptors aside."""
    fields = {name: value for name, value in vars(limits).items() if name != "namespaces"}
    return fields | {"folder": folder, "num_files": NUM_OPEN_FILES, "with_errors": with_errors, "keep": None}


def _call(call: dict[str, Any], descriptors: list[int], kind: Kind) -> dict[str, Any]:
    """How a program ended. Raises NotIsolatedError."""
    answer, process = _begin(call, descriptors, kind)
    with answer:
        answer.settimeout(zygote.SETUP_S + call["timeout_s"] + MARGIN_S)
        try:
            ended = _receive(answer)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            return {"exit_code": None, "cpu_s": 0.0}
    if ended is None:  # only a program without namespaces can end the process that waits for it
        return {"exit_code": -signal.SIGKILL, "cpu_s": 0.0}
    if "refused" in ended:
        raise NotIsolatedError(ended["refused"])
    return dict(ended)


def _begin(call: dict[str, Any], descriptors: list[int], kind: Kind) -> tuple[socket.socket, int]:
    """Where a call is answered, and the process that waits for its program. Raises NotIsolatedError."""
    for _ in range(MAX_TRIES):
        with contextlib.suppress(_Gone):
            return _zygote(kind).begin(call, descriptors)
        time.sleep(TRY_AGAIN_S)  # one that was killed is not seen to have ended at once
    raise NotIsolatedError("the process that programs are forked from was ended from outside again and again")


class _Gone(Exception):
    """The zygote ended before it began the call, which nothing of the program can have caused."""


class _Zygote:
    """A zygote as the process sees it that started it; calls may come from several threads at once."""

    def __init__(self, kind: Kind) -> None:
        """Raises NotIsolatedError."""
        namespaces, preload, trusted_paths = kind
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pairs = _visible_paths() if namespaces else ()
        setup = zygote.ZygoteSetup(os.getpid(), namespaces, preload, trusted_paths, pairs)
        # Where temporary files are is how leftovers of a reward worker are found: see `mega_rl.rewards.pool.process`.
        folder = launcher.WORKING_DIRECTORY if namespaces else tempfile.gettempdir()
        clean = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": folder, "TMPDIR": folder}
        with theirs:
            self._process = subprocess.Popen(
                zygote.command(theirs.fileno(), is_bare=namespaces),
                cwd=ROOT,
                env=THREADS | (clean if trusted_paths is None else os.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._control.settimeout(START_S)
        try:
            with contextlib.suppress(BrokenPipeError):  # it has said why
                self._control.send(json.dumps(vars(setup)).encode())
            told = self._control.recv(zygote.MAX_MESSAGE_BYTES)
        except TimeoutError:
            told = f"not ready after {START_S:g} s".encode()
        except OSError as error:
            told = str(error).encode()
        if told != zygote.READY:
            self.close()
            raise NotIsolatedError(told.decode(errors="replace") or "the process that programs are forked from ended")
        self._control.settimeout(None)

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def begin(self, call: dict[str, Any], descriptors: list[int]) -> tuple[socket.socket, int]:
        """Where a call is answered, and the process that waits for its program. Raises _Gone."""
        answer, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        answer.settimeout(START_S)
        try:
            with theirs:
                socket.send_fds(self._control, [json.dumps(call).encode()], [*descriptors, theirs.fileno()])
            begun = _receive(answer)
        except OSError as error:
            answer.close()
            raise _Gone from error
        if begun is None:
            answer.close()
            raise _Gone
        return answer, begun["process"]

    def close(self) -> None:
        self._control.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()  # its children go with it
        self._process.wait()


_zygotes: dict[tuple[int, Kind], _Zygote] = {}  # by process and kind
_gates: dict[tuple[int, Kind], threading.Lock] = {}  # held while a zygote of the kind starts
_lock = threading.Lock()  # of both; never for long


def _receive(answer: socket.socket) -> Any:
    data = answer.recv(zygote.MAX_MESSAGE_BYTES)
    return json.loads(data) if data else None


def _zygote(kind: Kind) -> _Zygote:
    """The zygote of this process, started if there is none; a process that was forked from this one gets its own."""
    key = os.getpid(), kind
    with _lock:
        gate = _gates.setdefault(key, threading.Lock())
    with gate:  # whoever wants one of another kind does not wait until this one has started
        found = _zygotes.get(key)
        if found is None or found.has_ended():
            if found is not None:
                found.close()
            found = _Zygote(kind)
            with _lock:
                _zygotes[key] = found
        return found


def zygote_pids() -> set[int]:
    """The processes that this one keeps to fork programs from."""
    return {found.pid for (process, _), found in list(_zygotes.items()) if process == os.getpid()}


def close_zygotes() -> None:
    """End the zygotes of this process and the programs that still run; the next program starts a new one."""
    with _lock:
        for key in [key for key in _zygotes if key[0] == os.getpid()]:
            _zygotes.pop(key).close()


atexit.register(close_zygotes)


@cache
def _visible_paths() -> tuple[tuple[str, str], ...]:
    """Source and place of what a program sees: the system's programs and libraries, and this interpreter's."""
    prefixes = ("/", "/usr", "/usr/local", sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parents[1]))
    places = [os.path.join(prefix, name) for prefix in prefixes for name in INSTALLED]
    found = {place: os.path.realpath(place) for place in (*places, *LOADER) if os.path.exists(place)}
    found |= {source: source for source in found.values()}  # what links within them point to
    return tuple((source, place) for place, source in found.items())


def obstacle() -> str | None:
    """Why this system does not let a program be cut off from everything else; None if it does."""
    try:
        code = run_program("", "", ProgramLimits(timeout_s=30.0, memory_bytes=1 << 30)).exit_code
    except OSError as error:
        return str(error)
    return None if code == 0 else f"{sys.executable} does not run in there, exit status {code}"


def has_namespaces() -> bool:
    """Whether this system lets a program be cut off from everything else."""
    return obstacle() is None
