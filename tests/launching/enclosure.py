"""A place for hostile programs: namespaces of its own, made before anything hostile starts.

Inside, there is an own process list, host name, network and System V memory, an empty /tmp, and a root directory that
is read-only. What is tried in there ends with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
UNSHARE = (
    "unshare",
    "--user",
    "--map-root-user",
    "--mount",
    "--pid",
    "--fork",
    "--kill-child",
    "--uts",
    "--ipc",
    "--net",
)
# The first process of a namespace cannot be killed from within: the program gets another one.
FIRST = """
import ctypes, os, subprocess, sys
def mount(*arguments):
    subprocess.run(("mount", *arguments), check=True)
mount("-t", "proc", "proc", "/proc")
kept = {path: os.open(path, os.O_PATH) for path in KEPT if path.startswith("/tmp/")}
mount("-t", "tmpfs", "tmpfs", "/tmp")
mount("-t", "tmpfs", "tmpfs", "/dev/shm")
for path, descriptor in kept.items():
    os.makedirs(path, exist_ok=True)
    source = f"/proc/self/fd/{descriptor}".encode()
    assert ctypes.CDLL(None).mount(source, path.encode(), None, 0x5000, None) == 0  # MS_BIND | MS_REC
    mount("-o", "remount,bind,ro", path)
mount("-o", "remount,bind,ro", "/")
code = subprocess.run(sys.argv[1:]).returncode
sys.exit(128 - code if code < 0 else code)
""".replace("KEPT", repr((str(REPO), sys.prefix, sys.base_prefix)))
# Without capabilities: they are lost when a user who is not root starts a program.
AS_ANOTHER = """
import ctypes, os, sys
user, group = os.getuid(), os.getgid()
assert ctypes.CDLL(None).unshare(0x10000000) == 0
for name, text in (("setgroups", "deny"), ("uid_map", f"1000 {user} 1"), ("gid_map", f"1000 {group} 1")):
    with open(f"/proc/self/{name}", "w") as file:
        file.write(text)
os.execv(sys.argv[1], sys.argv[1:])
"""


def run_enclosed(program: str, *arguments: str, is_root: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a Python program in there, as the root of those namespaces or as an ordinary user of them.

    A program that was ended by a signal has the exit status 128 and the signal's number, as in a shell.
    """
    command = (sys.executable, "-c", program, *arguments)
    if not is_root:
        command = (sys.executable, "-c", AS_ANOTHER, *command)
    environment = os.environ | {"PYTHONPATH": str(REPO), "TMPDIR": "/tmp", "API_KEY": "the-secret-of-the-trainer"}
    return subprocess.run(
        (*UNSHARE, sys.executable, "-c", FIRST, *command),
        env=environment,
        cwd=REPO,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


@cache
def has_enclosure() -> bool:
    """Whether this system allows such a place; hostile programs are not tried anywhere else."""
    try:
        return run_enclosed("print('inside')").stdout == "inside\n"
    except FileNotFoundError:  # no unshare command
        return False


def needs_enclosure() -> pytest.MarkDecorator:
    return pytest.mark.skipif(not has_enclosure(), reason="this system allows no unprivileged namespaces")
