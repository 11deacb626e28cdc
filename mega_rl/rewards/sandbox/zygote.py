"""A warm interpreter from which untrusted programs are forked, each in namespaces and limits of its own.

It runs by itself, started by `mega_rl.rewards.sandbox.sandbox` with a bare interpreter, and imports the standard
library and what it is told to. Its memory is the start of every program, so nothing of a program ever comes into it:
texts and answers pass through as descriptors, which only the forked process reads.

Of a call there are two processes below this one: the outer one keeps the time, tells the end and leaves nothing
running; the inner one becomes the program.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mega_rl.rewards.sandbox import execution, launcher, program_host

# Started where this package lies; nothing else of what it is told stands where a program could read it.
BOOT = "import os, sys; sys.path.insert(0, os.getcwd()); from mega_rl.rewards.sandbox.zygote import main; main({}, {})"
# What most programs import: loaded once, and not by each.
USUAL = "array bisect cmath collections copy dataclasses datetime decimal fractions functools heapq io itertools json "
USUAL += "math operator random re statistics string textwrap time traceback typing"
POLL_S = 2.0  # how often a zygote looks whether its parent is still there
SETUP_S = 60.0  # for namespaces and mounts, on however busy a machine
NUM_DESCRIPTORS = 4  # of a call: program, standard input, standard output, answer
MAX_MESSAGE_BYTES = 1 << 16
READY, STARTED = b"ready", b"started"
STATE = "state"
PARTS = ("execution", "program_host", "launcher", "zygote")
OWN = [
    "mega_rl",
    "mega_rl.rewards",
    "mega_rl.rewards.sandbox",
    *(f"mega_rl.rewards.sandbox.{name}" for name in PARTS),
]  # not for programs


@dataclass(frozen=True)
class ZygoteSetup:
    """The first message to a zygote."""

    parent: int  # process; the zygote ends with it
    namespaces: bool
    preload: Sequence[str]  # modules, besides the usual ones
    trusted_paths: Sequence[str] | None  # where modules are looked for by code of the user's; None: code of nobody
    pairs: Sequence[Sequence[str]]  # what programs see of the system: source and place of each file or directory


def command(control: int, is_bare: bool) -> tuple[str, ...]:
    """What starts a zygote that takes calls from a descriptor.

    Args:
        is_bare: it is to start the interpreter a second time, in mounts of its own: for namespaces.
    """
    return sys.executable, "-ISBc" if is_bare else "-IBc", BOOT.format(control, is_bare)


def main(descriptor: int, is_bare: bool) -> None:
    """Serve calls until the parent ends; the process of a program ends with it."""
    os.umask(0o022)
    control = socket.socket(fileno=descriptor)
    try:
        if is_bare:
            launcher.gain_nothing()
            launcher.own_interpreter()
            os.set_inheritable(descriptor, True)
            started = command(descriptor, is_bare=False)
            os.execv(started[0], started)
    except (launcher.StepError, OSError) as error:
        control.recv(MAX_MESSAGE_BYTES)  # closed with this unread, the other end would lose what is sent to it
        control.send(str(error).encode(errors="replace"))
        os._exit(1)
    sys.path.remove(os.getcwd())
    os.chdir("/")
    setup = ZygoteSetup(**json.loads(control.recv(MAX_MESSAGE_BYTES)))
    if setup.trusted_paths is not None:
        sys.path[:] = setup.trusted_paths
    for name in (*USUAL.split(), *setup.preload):
        with contextlib.suppress(Exception):  # the program's own import tells
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a program does not copy the pages of what is loaded here
    control.send(READY)
    (program, given, printed, answer), fields = _serve(control, setup.parent)
    _outer(setup, ProgramCall(program, given, printed, answer, **fields))
    path = os.path.abspath(program_host.PROGRAM)
    execution.run_and_end(path, execution.new_main(path))


def _serve(control: socket.socket, parent: int) -> tuple[list[int], dict[str, Any]]:
    """Fork for every call that comes; returns in the forked processes only, with descriptors and limits of the call."""
    zygote = os.getpid()
    while True:
        is_called = bool(select.select([control], [], [], POLL_S)[0])
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if os.getppid() != parent:
            os._exit(0)
        if not is_called:
            continue
        data, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, NUM_DESCRIPTORS)
        if not data:  # the parent closed its end, or ended
            os._exit(0)
        if os.fork() == 0:
            launcher.end_with_parent()
            if os.getppid() != zygote:
                os._exit(0)
            control.close()
            return descriptors, json.loads(data)
        for descriptor in descriptors:
            os.close(descriptor)


@dataclass(frozen=True)
class ProgramCall:
    """One run of a program."""

    program: int  # descriptors
    given: int
    printed: int
    answer: int
    folder: str
    timeout_s: float
    memory_bytes: int
    file_bytes: int
    temporary_bytes: int
    num_files: int
    num_processes: int
    with_errors: bool
    keep: str | None  # of one program for the next: files, state; None: there is one program only


def _outer(setup: ZygoteSetup, call: ProgramCall) -> None:
    """Start the program, wait for its end and tell it; returns in the program's process only."""
    answer = socket.socket(fileno=call.answer)
    os.setsid()
    _send(answer, {"process": os.getpid()})
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # what has ended is looked at when it is waited for
    ours, theirs = socket.socketpair()
    try:
        if setup.namespaces:
            launcher.unshare(launcher.NAMESPACES)
        else:
            launcher.adopt_orphans()
        inner = os.fork()
    except (launcher.StepError, OSError) as error:
        _send(answer, {"refused": str(error)})
        os._exit(1)
    if inner == 0:
        ours.close()
        return _inner(setup, call, theirs, answer)
    theirs.close()
    ours.settimeout(SETUP_S)
    try:
        told = ours.recv(MAX_MESSAGE_BYTES)
    except TimeoutError:
        _end(inner, setup.namespaces)
        told = f"the program has not begun after {SETUP_S:g} s".encode()
    if told != STARTED:
        _send(answer, {"refused": told.decode(errors="replace") or "the program's process ended before it began"})
        os._exit(1)
    code = execution.wait(inner, call.timeout_s)
    _end(inner, setup.namespaces)
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    _send(answer, {"exit_code": code, "cpu_s": sum(usage.ru_utime + usage.ru_stime for usage in spent)})
    os._exit(0)


def _send(answer: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # who asked has gone
        answer.send(json.dumps(message).encode())


def _end(inner: int, namespaces: bool) -> None:
    """Leave nothing of the program running."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(inner, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(inner, signal.SIGKILL)
    os.waitpid(inner, 0)  # with namespaces the kernel ends what is left in there first
    if not namespaces:
        launcher.kill_children()


def _inner(setup: ZygoteSetup, call: ProgramCall, outer: socket.socket, answer: socket.socket) -> None:
    """Give up what the program must not have; what fails is told and ends the process."""
    try:
        os.setsid()  # out of the outer process's group, which the program could otherwise signal
        launcher.end_with_parent()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        os.dup2(call.given, 0)
        os.dup2(call.printed, 1)
        if call.with_errors:
            os.dup2(call.printed, 2)
        if setup.namespaces:
            launcher.see_only(setup.pairs, call.temporary_bytes)
        else:
            os.chdir(call.folder)
        if call.keep is None:
            launcher.write_program(call.program)
            _give_up(setup, call, call.timeout_s)
        outer.send(STARTED)
        outer.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            if not outer.recv(1):  # it ended before this process asked for the signal that tells of it
                os._exit(1)
    except (launcher.StepError, OSError) as error:
        outer.send(str(error).encode(errors="replace")[:MAX_MESSAGE_BYTES])
        os._exit(1)
    outer.detach()
    if call.keep is not None:
        give_up = functools.partial(_give_up, setup, call)
        return program_host.ProgramHost(answer, give_up, call.keep == STATE, call.timeout_s, setup.namespaces).serve()
    answer.detach()
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    execution.new_streams()


def _give_up(setup: ZygoteSetup, call: ProgramCall, timeout_s: float) -> None:
    """Rights, resources, environment and modules that the program has no business with. Raises StepError, OSError."""
    if setup.trusted_paths is not None:
        return launcher.limit_memory_and_files(call.memory_bytes, call.file_bytes)
    launcher.gain_nothing()
    launcher.drop_privileges()
    launcher.limit_resources(int(timeout_s) + 1, call.memory_bytes, call.file_bytes, call.num_files, call.num_processes)
    os.environ.clear()
    os.environ.update(PATH="/usr/bin:/bin", LANG="C.UTF-8", HOME=call.folder, TMPDIR=call.folder)
    for name in [name for name in sys.modules if name in OWN]:
        del sys.modules[name]
