"""Runs one untrusted Python program, with limits. Imports no torch.

There are two levels of isolation. With namespaces the program is nobody, has no capability, and lives in user, mount,
process, network, IPC and host-name namespaces of its own: it sees the system's programs and libraries read-only, its
own processes, and a small private directory for temporary files. Without them (``limits``) it is a process of the
trainer's user like any other, but for the limits on its resources: see docs/rewards.md for what that means.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mega_rl.rewards import launcher
from mega_rl.rewards.scratch import remove_tree

START_MARGIN_S = 0.5  # wall-clock time that is the launcher's, not the program's
NUM_OPEN_FILES = 64
# What of a tree of installed programs may be seen: not what else a project keeps beside them, such as data and output.
INSTALLED = ("bin", "sbin", "lib", "lib32", "lib64", "libexec", "share", "pyvenv.cfg")
LOADER = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime")


class NotIsolatedError(OSError):
    """The program was not run: this system does not allow the isolation that was asked for. Names the step."""


@dataclass(frozen=True)
class Limits:
    """The limits of one run of a program."""

    timeout_s: float  # wall clock; CPU time is limited to the same, rounded up
    memory_bytes: int  # address space of each of its processes
    file_bytes: int = 1 << 24  # of each file it writes, standard output included
    num_processes: int = 32  # per user of this system before Linux 5.14, per program since
    temporary_bytes: int = 1 << 26  # of all its files together, with namespaces
    namespaces: bool = True


@dataclass(frozen=True)
class Run:
    """What became of a program."""

    exit_code: int | None  # None: out of time
    output: str  # standard output, up to the limit of a file


def run_program(source: str, stdin: str, limits: Limits) -> Run:
    """Run a program in a temporary directory of its own, without environment, descriptors or terminal.

    Raises:
        NotIsolatedError: namespaces are asked for and this system does not allow them, or this user is root and they
            are not asked for.
    """
    if not limits.namespaces and os.geteuid() == 0:
        raise NotIsolatedError("a program is not run as root without namespaces")
    with contextlib.ExitStack() as stack:
        if limits.namespaces:
            folder = launcher.WORKING_DIRECTORY  # a directory inside the namespaces: there is nothing to remove outside
        else:
            folder = tempfile.mkdtemp(prefix="program_")
            stack.callback(remove_tree, folder)
        # Files without a name: no other program finds them.
        program, given, printed = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        for file, text in ((program, source), (given, stdin)):
            file.write(text.encode(errors="replace"))
            file.seek(0)
        report_read, report_write = os.pipe()
        stack.callback(os.close, report_read)
        numbers = [int(limits.timeout_s) + 1, limits.memory_bytes, limits.file_bytes, limits.temporary_bytes]
        numbers += [NUM_OPEN_FILES, limits.num_processes, int(limits.namespaces), program.fileno(), report_write]
        try:
            process = subprocess.Popen(
                (sys.executable, "-I", "-S", launcher.__file__, *map(str, numbers), *_visible_paths()),
                cwd=None if limits.namespaces else folder,
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": folder, "TMPDIR": folder},
                stdin=given,
                stdout=printed,
                stderr=subprocess.DEVNULL,
                pass_fds=(program.fileno(), report_write),
                start_new_session=True,
            )
        finally:
            os.close(report_write)
        exit_code = _wait(process, limits.timeout_s + START_MARGIN_S)
        os.set_blocking(report_read, False)
        with contextlib.suppress(BlockingIOError):
            if reason := os.read(report_read, 1000):
                raise NotIsolatedError(reason.decode(errors="replace"))
        printed.seek(0)
        return Run(exit_code, printed.read(limits.file_bytes).decode(errors="replace"))


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    """The exit code, or None if it had to be ended; nothing of its process group is left."""
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout_s)
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@cache
def _visible_paths() -> tuple[str, ...]:
    """Source and place of what a program sees: the system's programs and libraries, and this interpreter's."""
    prefixes = ("/", "/usr", "/usr/local", sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parents[1]))
    places = [os.path.join(prefix, name) for prefix in prefixes for name in INSTALLED]
    found = {place: os.path.realpath(place) for place in (*places, *LOADER) if os.path.exists(place)}
    found |= {source: source for source in found.values()}  # what links within them point to
    return tuple(path for place, source in found.items() for path in (source, place))


def obstacle() -> str | None:
    """Why this system does not let a program be cut off from everything else; None if it does."""
    try:
        code = run_program("", "", Limits(timeout_s=30.0, memory_bytes=1 << 30)).exit_code
    except OSError as error:
        return str(error)
    return None if code == 0 else f"{sys.executable} does not run in there, exit status {code}"


def has_namespaces() -> bool:
    """Whether this system lets a program be cut off from everything else."""
    return obstacle() is None
