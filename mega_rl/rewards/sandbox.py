"""Runs one Python program that nobody vouches for, with limits. Imports no torch.

What holds where: the wall-clock limit and the limits on CPU time, memory per process, file size and open files hold
everywhere; with ``namespaces`` the program also has no network and no way to leave a process behind. The limit on the
number of processes holds for users other than root. Nothing here keeps the program from reading files that this user
can read, from writing to them elsewhere than in its directory, or from using a hole in the kernel: see docs/rewards.md.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

CLONE_NEWUSER, CLONE_NEWNET, CLONE_NEWPID, CLONE_NEWIPC = 0x10000000, 0x40000000, 0x20000000, 0x08000000
NAMESPACES = CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWIPC
NO_NAMESPACES_EXIT = 86  # of the launcher, which prints nothing of its own
START_MARGIN_S = 0.5  # wall-clock time that is the launcher's, not the program's
NUM_OPEN_FILES = 64

# The launcher: a bare interpreter that gives up what it may, then becomes the program. With namespaces the program is
# the first process of one: when it ends, or when its launcher is killed, the kernel kills every other process in there.
LAUNCHER = """
import ctypes, os, resource, signal, sys
cpu_s, memory_bytes, file_bytes, num_files, num_processes, namespaces = map(int, sys.argv[1:7])
libc = ctypes.CDLL(None)
libc.prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS: set-user-id programs do not help
if namespaces:
    if libc.unshare(namespaces) != 0:
        os._exit({no_namespaces})
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        os._exit(os.waitstatus_to_exitcode(status) & 255)
    libc.prctl(1, 9, 0, 0, 0)
for limit, value in (
    (resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_FSIZE, file_bytes),
    (resource.RLIMIT_NOFILE, num_files), (resource.RLIMIT_NPROC, num_processes), (resource.RLIMIT_CORE, 0),
):
    hard = resource.getrlimit(limit)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, "-I", "-B", sys.argv[7]])
""".replace("{no_namespaces}", str(NO_NAMESPACES_EXIT))


@dataclass(frozen=True)
class Limits:
    """Of one run of a program."""

    timeout_s: float  # wall clock; CPU time is limited to the same, rounded up
    memory_bytes: int  # address space of each of its processes
    file_bytes: int = 1 << 24  # of each file it writes, standard output included
    num_processes: int = 32  # not for root
    namespaces: bool = True  # no network, no processes left


@dataclass(frozen=True)
class Run:
    """What became of a program."""

    exit_code: int | None  # None: out of time
    output: str  # standard output, up to the limit of a file


def run_program(source: str, stdin: str, limits: Limits) -> Run:
    """Run a program in a temporary directory of its own, without environment, descriptors or terminal.

    Raises:
        OSError: namespaces are asked for and this system does not allow them.
    """
    with tempfile.TemporaryDirectory(prefix="program_", ignore_cleanup_errors=True) as folder:
        program, given, printed = (Path(folder, name) for name in ("program.py", "stdin", "stdout"))
        program.write_text(source, encoding="utf-8", errors="replace")
        given.write_text(stdin, encoding="utf-8", errors="replace")
        cpu_s = int(limits.timeout_s) + 1
        numbers = (cpu_s, limits.memory_bytes, limits.file_bytes, NUM_OPEN_FILES, limits.num_processes)
        namespaces = NAMESPACES if limits.namespaces else 0
        with given.open("rb") as stdin_file, printed.open("wb") as stdout_file:
            launcher = subprocess.Popen(
                (sys.executable, "-I", "-S", "-c", LAUNCHER, *map(str, (*numbers, namespaces)), str(program)),
                cwd=folder,
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": folder, "TMPDIR": folder},
                stdin=stdin_file,
                stdout=stdout_file,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        exit_code: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                exit_code = launcher.wait(limits.timeout_s + START_MARGIN_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
        if limits.namespaces and exit_code == NO_NAMESPACES_EXIT:
            raise OSError("this system allows no unprivileged namespaces")
        with printed.open(encoding="utf-8", errors="replace") as file:
            return Run(exit_code, file.read(limits.file_bytes))


def has_namespaces() -> bool:
    """Whether this system lets a program be cut off from network and other processes."""
    try:
        return run_program("", "", Limits(timeout_s=30.0, memory_bytes=1 << 30)).exit_code == 0
    except OSError:
        return False
