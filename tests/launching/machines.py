"""Several machines on one host: namespaces with addresses, host names, processes and disks of their own, and a network.

    with machines(3, shared=[folder]) as cluster:
        cluster.run(1, (sys.executable, "-c", "print('hello')")).check()

What is the same on all of them: the kernel, the files that can only be read, and the directories in ``shared``, which
are there under the same path on each, as a network file system is. Everything else that can be written is in memory of
the machine and ends with it. The namespaces, the links and the bridge between them end with the first processes in
them, and these with the process that made them, however it ends: nothing has to be cleared up by name.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

from tests.launching.launch import LIMIT_S, REPO, Launched, Running, started

FIRST = Path(__file__).with_name("machine.py")
NETWORK = "10.77.0"  # of a bridge that nothing else is connected to
BRIDGE = "switch"
SEARCHED = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
OF_A_MACHINE = ("--net", "--mount", "--uts", "--ipc", "--pid")
HOME = "/tmp/user"
MORE = 8  # machines that may come later
LISTEN = """
import socket
with socket.create_server(("", 4000)) as server:
    print(socket.gethostname(), flush=True)
    server.accept()
"""
CONNECT = "import socket; socket.create_connection(('machine0', 4000), timeout=60).close()"


class NoMachines(Exception):
    """This host cannot have them; the reason in words."""


@dataclass(frozen=True)
class Machine:
    """One of them, as the host sees it."""

    number: int
    name: str
    address: str
    first: subprocess.Popen[bytes]  # ``unshare``, which ends when the machine does
    init: int  # its first process


class Machines:
    """They are numbered from 0. A command on one of them has the environment of the test."""

    def __init__(self, number: int, shared: Sequence[Path]) -> None:
        self._shared = [str(path.resolve()) for path in shared]
        self._is_user = () if os.geteuid() == 0 else ("--user",)
        self._all: dict[int, Machine] = {}
        self._names = [f"machine{i}" for i in range(number)]
        self._switch: subprocess.Popen[bytes] | None = None

    def open(self) -> None:
        """
        Raises:
            NoMachines: this host cannot have them.
        """
        for tool in ("unshare", "nsenter", "ip", "mount"):
            if shutil.which(tool, path=SEARCHED) is None:
                raise NoMachines(f"there is no {tool} command here (packages util-linux and iproute2)")
        # ``cat`` holds the namespaces until this process closes its input, or ends
        held = ("unshare", *self._is_user, *(("--map-root-user",) if self._is_user else ()), "--net", "cat")
        self._switch = subprocess.Popen(held, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self._echo(self._switch, held)
        self._ip("link", "add", BRIDGE, "type", "bridge")
        self._ip("link", "set", BRIDGE, "up")
        for number in range(len(self._names)):
            self.add(number)

    def add(self, number: int) -> None:
        """Start a machine that is not there: the next one, or one that was lost, which then has empty disks."""
        if number == len(self._names):
            self._names.append(f"machine{number}")
        assert self._switch is not None and number not in self._all and number < len(self._names)
        told = {
            "name": self._names[number],
            "hosts": "".join(f"{address} {name}\n" for address, name in self._known(number)),
            "shared": self._shared,
            "visible": [str(REPO), sys.prefix, sys.base_prefix],
        }
        first = (sys.executable, "-I", str(FIRST), json.dumps(told))
        inner = ("unshare", *OF_A_MACHINE, "--fork", "--kill-child", "--mount-proc", *first)
        command = (*self._in_switch(), *inner)
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise NoMachines(_failed(inner[: -len(first)], process))
        (init,) = psutil.Process(process.pid).children()
        self._all[number] = Machine(number, self._names[number], self.address(number), process, init.pid)
        port = f"port{number}"
        self._ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(init.pid))
        self._ip("link", "set", port, "master", BRIDGE, "up")
        own = [("link", "set", "lo", "up"), ("addr", "add", f"{self.address(number)}/24", "dev", "eth0")]
        for words in (*own, ("link", "set", "eth0", "up")):
            subprocess.run((*self._in_net(init.pid), "ip", *words), env=_found(), check=True)

    def __contains__(self, number: int) -> bool:
        return number in self._all

    def name(self, number: int) -> str:
        return self._names[number]

    def address(self, number: int) -> str:
        return f"{NETWORK}.{number + 1}"

    def command(self, number: int, command: Sequence[str]) -> tuple[str, ...]:
        """The command line that does the same on that machine, in the repository."""
        enter = ("--mount", "--uts", "--ipc", "--pid")
        inside = ("env", f"--chdir={REPO}", f"HOME={HOME}", "TMPDIR=/tmp")
        return (*self._in_net(self._all[number].init, *enter), *inside, *map(str, command))

    @contextmanager
    def started(self, number: int, command: Sequence[str], env: Mapping[str, str] | None = None) -> Iterator[Running]:
        """``tests.launching.launch.started`` on that machine."""
        with started(self.command(number, command), env=env) as running:
            yield running

    def run(
        self, number: int, command: Sequence[str], timeout: float = LIMIT_S, env: Mapping[str, str] | None = None
    ) -> Launched:
        """``tests.launching.launch.run`` on that machine."""
        with self.started(number, command, env) as running:
            status = running.wait(timeout)
            return Launched(running.args, status, running.output(), 0.0)

    def unplug(self, number: int) -> None:
        """Take its cable: it runs on, and nobody hears of it any more."""
        self._ip("link", "set", f"port{number}", "down")

    def lose(self, number: int) -> None:
        """Its power fails: no process of it says a last word, and no connection of it is closed."""
        self.unplug(number)
        machine = self._all.pop(number)
        os.kill(machine.init, signal.SIGKILL)
        _end(machine.first)
        with suppress(NoMachines):  # it has gone with the machine's end of the cable, or goes a little later
            self._ip("link", "del", f"port{number}")

    def processes(self, number: int) -> list[psutil.Process]:
        """All that runs there, but its first one."""
        space = os.readlink(f"/proc/{self._all[number].init}/ns/pid")
        found = []
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                if os.readlink(f"/proc/{process.pid}/ns/pid") == space and process.pid != self._all[number].init:
                    found.append(process)
        return found

    def close(self) -> None:
        for machine in self._all.values():
            _end(machine.first)
        self._all.clear()
        if self._switch is not None:
            _end(self._switch)

    def _known(self, number: int) -> Iterator[tuple[str, str]]:
        """What a machine takes names for: its own for an address of loopback, as Debian has it."""
        yield "127.0.0.1", "localhost"
        for other in range(len(self._names) + MORE):  # machines that come later are known before
            yield "127.0.1.1" if other == number else self.address(other), f"machine{other}"

    def _in_switch(self) -> tuple[str, ...]:
        assert self._switch is not None
        return self._in_net(self._switch.pid)

    def _in_net(self, process: int, *more: str) -> tuple[str, ...]:
        as_root = ("--user", "--preserve-credentials") if self._is_user else ()
        return ("nsenter", "--target", str(process), *as_root, "--net", *more)

    def _ip(self, *words: str) -> None:
        command = (*self._in_switch(), "ip", *words)
        found = subprocess.run(command, env=_found(), capture_output=True, text=True, check=False)
        if found.returncode != 0:
            raise NoMachines(f"`ip {' '.join(words)}` in a network namespace: {found.stderr.strip()}")

    def _echo(self, process: subprocess.Popen[bytes], command: Sequence[str]) -> None:
        """Wait until ``cat`` runs."""
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write(b"ready\n")
            process.stdin.flush()
        if process.stdout.readline() != b"ready\n":
            raise NoMachines(_failed(command, process))


@contextmanager
def machines(number: int, shared: Sequence[Path] = ()) -> Iterator[Machines]:
    """That many machines; nothing of them is left when the block ends.

    Raises:
        NoMachines: this host cannot have them.
    """
    cluster = Machines(number, shared)
    try:
        cluster.open()
        yield cluster
    finally:
        cluster.close()


@cache
def obstacle() -> str | None:
    """Why this host cannot have machines, in words; None: it can."""
    try:
        with machines(2) as cluster:
            with cluster.started(0, (sys.executable, "-c", LISTEN)) as running:
                running.wait_for("machine0", timeout=60)
                found = cluster.run(1, (sys.executable, "-c", CONNECT), timeout=120)
            return None if found.returncode == 0 else f"no connection between two of them: {found.stdout[-300:]}"
    except NoMachines as error:
        return str(error)


def _found() -> dict[str, str]:
    return {**os.environ, "PATH": SEARCHED}


def _failed(command: Sequence[str], process: subprocess.Popen[bytes]) -> str:
    process.kill()
    _, said = process.communicate()
    return f"`{' '.join(command)}`: {said.decode(errors='replace').strip()[-500:] or 'it said nothing'}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a first process by its input, and wait until it is gone, and its namespace with it."""
    for file in (process.stdin, process.stdout, process.stderr):
        if file is not None:
            file.close()
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=60)
