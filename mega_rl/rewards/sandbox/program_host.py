"""Programs of one episode, one after another in the same namespaces and directory: a library of `zygote`.

Without a state each program is a process of its own, and all that it started ends with it. With one there is a live
interpreter: what a program defines, the next knows, until one runs out of time or ends the interpreter.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mega_rl.rewards.sandbox import execution, launcher

NUM_DESCRIPTORS = 3  # of a program: text, standard input, standard output
MAX_MESSAGE_BYTES = 1 << 16
PROGRAM = "program.py"


@dataclass
class ProgramHost:
    """The process that stays for an episode. It starts the programs, and keeps their time."""

    channel: socket.socket  # to whoever asks for programs
    give_up: Callable[[float], None]  # what a program must not have, given its time limit
    has_state: bool
    lifetime_s: float
    namespaces: bool
    interpreter: int | None = None  # the process that keeps the state
    link: socket.socket | None = None  # to it

    def serve(self) -> None:
        """Run what is asked for until the other end is closed; returns in the processes of programs only."""
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        launcher.hide_memory()
        if not self.namespaces:
            launcher.adopt_orphans()
        while True:
            data, descriptors, _, _ = socket.recv_fds(self.channel, MAX_MESSAGE_BYTES, NUM_DESCRIPTORS)
            if not data:
                os._exit(0)
            call = json.loads(data)
            before_s = _cpu_s()
            if self.has_state:
                code = self._in_interpreter(call, descriptors)
            else:
                process = os.fork()
                if process == 0:
                    self._become(descriptors, call)
                    return
                code = execution.wait(process, call["timeout_s"])
                self._end(process)
            for descriptor in descriptors:
                os.close(descriptor)
            answer = {"number": call["number"], "exit_code": code, "cpu_s": _cpu_s() - before_s}
            self.channel.send(json.dumps(answer).encode())

    def _become(self, descriptors: list[int], call: dict[str, Any]) -> None:
        """Go on as the process of one program, which `execution.execute` then runs."""
        launcher.end_with_parent()
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        _connect(descriptors, call["with_errors"])
        self.give_up(call["timeout_s"])
        _write(descriptors[0])
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        execution.new_streams()

    def _end(self, process: int) -> None:
        """Leave nothing running but this process."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process, signal.SIGKILL)
        if not self.namespaces:
            return launcher.kill_children()
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # all of the namespace but its first process, which this is
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)

    def _in_interpreter(self, call: dict[str, Any], descriptors: list[int]) -> int | None:
        """Exit status of a program in the live interpreter, which is started if there is none."""
        if self.link is None:
            self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.interpreter = os.fork()
            if self.interpreter == 0:
                self._interpret(theirs)
            theirs.close()
        assert self.interpreter is not None
        with contextlib.suppress(OSError):  # it has ended: the waiting below says how
            socket.send_fds(self.link, [json.dumps(call).encode()], descriptors)
        if select.select([self.link], [], [], call["timeout_s"])[0]:
            with contextlib.suppress(OSError, ValueError):
                if told := self.link.recv(MAX_MESSAGE_BYTES):
                    return int(told)
            code = execution.wait(self.interpreter, call["timeout_s"])
        else:
            code = None
        self._end(self.interpreter)
        self.link.close()
        self.link = None
        return code

    def _interpret(self, link: socket.socket) -> None:
        """The live interpreter: run every program in the same main module. Does not return."""
        launcher.end_with_parent()
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        self.give_up(self.lifetime_s)
        os.closerange(3, link.fileno())
        os.closerange(link.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        names = execution.new_main(os.path.abspath(PROGRAM))
        while True:
            data, descriptors, _, _ = socket.recv_fds(link, MAX_MESSAGE_BYTES, NUM_DESCRIPTORS)
            if not data:
                os._exit(0)
            _connect(descriptors, json.loads(data)["with_errors"])
            _write(descriptors[0])
            for descriptor in descriptors[1:]:
                os.close(descriptor)
            execution.new_streams()
            try:
                status = execution.execute(os.path.abspath(PROGRAM), names)
            except SystemExit as error:
                status = error.code if isinstance(error.code, int) else int(error.code is not None)
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            link.send(str(status & 255).encode())


def _connect(descriptors: list[int], with_errors: bool) -> None:
    """Standard input and output of the next program."""
    _, given, printed = descriptors
    os.dup2(given, 0)
    os.dup2(printed, 1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(printed if with_errors else nowhere, 2)
    os.close(nowhere)


def _write(text: int) -> None:
    """The program's file, anew, from a descriptor, which is closed.

    What a program put in the way of the next one's file is its session's own affair.
    """
    with contextlib.suppress(OSError):
        os.unlink(PROGRAM)
    with contextlib.suppress(OSError):
        launcher.write_program(text)


def _cpu_s() -> float:
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in spent)
