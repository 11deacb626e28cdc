"""The machine as checks see it: files, variables, packages and commands; tests replay a recorded one."""

from __future__ import annotations

import glob
import importlib.metadata
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

from mega_rl.platform.contract import versions

MAX_READ_BYTES = 1 << 20
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ran:
    """What a command left behind."""

    returncode: int  # 124 if it was ended at its time limit
    output: str  # stdout
    errors: str = ""  # stderr

    @property
    def is_late(self) -> bool:
        return self.returncode == 124

    @property
    def last_words(self) -> str:
        """The last line of its output: of a Python traceback, the exception."""
        lines = [line.strip() for line in (self.errors or self.output).splitlines() if line.strip()]
        return lines[-1] if lines else f"exit status {self.returncode} without a word"


@dataclass(frozen=True)
class Disk:
    total_bytes: int
    free_bytes: int  # bytes that this user may still write
    is_writable: bool = True


class Host(Protocol):
    environ: Mapping[str, str]
    python: tuple[int, int]
    machine: str  # "x86_64", "aarch64"

    @property
    def packages(self) -> Mapping[str, str]:
        """Installed distributions: normalised name -> version."""

    @property
    def cann_version(self) -> str | None:
        """The version of the toolkit that the environment points at."""

    def read(self, path: str) -> str | None:
        """The text of a file; None if it is not there or not readable."""

    def package_file(self, package: str, path: str) -> str | None:
        """The text of a file of an installed distribution, without importing it."""

    def glob(self, pattern: str) -> list[str]:
        """Existing paths, sorted."""

    def disk(self, path: str) -> Disk | None:
        """The space of the file system that holds ``path`` or its nearest existing parent."""

    def can_bind(self, port: int) -> bool:
        """Whether a TCP port is free on every interface."""

    def run(self, command: Sequence[str], timeout_s: float = 30.0) -> Ran | None:
        """Run a command that changes nothing, once; None if there is no such program."""

    def probe(self, name: str, platform_name: str, timeout_s: float) -> Ran:
        """Run ``mega_rl.doctor.probes.NAME`` in a process of its own, on that platform."""


def normalised(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass
class ThisHost:
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    python: tuple[int, int] = sys.version_info[:2]
    machine: str = platform.machine()
    _ran: dict[tuple[str, ...], Ran | None] = field(default_factory=dict)  # some tools take seconds to answer

    @cached_property
    def cann_version(self) -> str | None:
        return versions.cann_version(self.environ)

    @cached_property
    def packages(self) -> Mapping[str, str]:
        found: dict[str, str] = {}
        for distribution in importlib.metadata.distributions():
            name = distribution.metadata["Name"]
            if name:  # a half-removed package has none
                found.setdefault(normalised(name), distribution.version)  # the first on the path is what is imported
        return found

    def read(self, path: str) -> str | None:
        try:
            with open(path, "rb") as file:
                return file.read(MAX_READ_BYTES).decode(errors="replace")
        except OSError:
            return None

    def package_file(self, package: str, path: str) -> str | None:
        try:
            return self.read(str(importlib.metadata.distribution(package).locate_file(path)))
        except importlib.metadata.PackageNotFoundError:
            return None

    def glob(self, pattern: str) -> list[str]:
        return sorted(glob.glob(pattern))

    def disk(self, path: str) -> Disk | None:
        place = Path(path).absolute()
        while not place.exists() and place != place.parent:
            place = place.parent
        try:
            usage = shutil.disk_usage(place)
        except OSError:
            return None
        return Disk(usage.total, usage.free, os.access(place, os.W_OK))

    def can_bind(self, port: int) -> bool:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port just left is free
            try:
                listener.bind(("", port))
            except OSError:
                return False
        return True

    def run(self, command: Sequence[str], timeout_s: float = 30.0) -> Ran | None:
        if tuple(command) not in self._ran:
            is_there = shutil.which(command[0]) is not None
            self._ran[tuple(command)] = _run(command, timeout_s, self.environ) if is_there else None
        return self._ran[tuple(command)]

    def probe(self, name: str, platform_name: str, timeout_s: float) -> Ran:
        path = os.pathsep.join(p for p in (str(REPOSITORY), self.environ.get("PYTHONPATH", "")) if p)
        environ = {**self.environ, "PYTHONPATH": path, "MEGA_RL_PLATFORM": platform_name}
        for inherited in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            environ.pop(inherited, None)  # a probe belongs to no launch
        ran = _run((sys.executable, "-m", f"mega_rl.doctor.probes.{name}"), timeout_s, environ)
        assert ran is not None
        return ran


def _run(command: Sequence[str], timeout_s: float, environ: Mapping[str, str]) -> Ran:
    """Run a command in a session of its own, so that a late command takes its children with it."""
    process = subprocess.Popen(
        list(command),
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
        returncode = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        returncode = 124
    return Ran(returncode, output.decode(errors="replace"), errors.decode(errors="replace"))
