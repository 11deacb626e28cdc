"""The first process of a pretended machine: ``python -I machine.py``, its description as JSON in the first argument.

It has been started in namespaces of its own (``machines.py``) and gives them what a machine has of its own: a host
name, a list of the others' addresses, a boot, empty disks. What is not listed to be kept can only be read. Then it says
``ready``, reaps what its processes leave behind, and ends with its standard input, and every process here with it.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import socket
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

OWN_DISKS = ("/tmp", "/dev/shm")  # empty, and gone with the machine
BOOT_ID = "/proc/sys/kernel/random/boot_id"
BIND = 0x1000 | 0x4000  # of mount(2): MS_BIND | MS_REC
LOOK_S = 0.2  # between two looks for processes that have ended


def mount(*arguments: str) -> None:
    subprocess.run(("mount", *arguments), check=True)


def bind(source: str, path: str) -> None:
    if ctypes.CDLL(None, use_errno=True).mount(source.encode(), path.encode(), None, BIND, None) != 0:
        raise OSError(ctypes.get_errno(), f"cannot bind {source} to {path}")


def furnish(name: str, hosts: str, shared: list[str], visible: list[str]) -> None:
    """
    Args:
        hosts: lines of ``/etc/hosts``.
        shared: directories of the network file system.
        visible: directories that are only read here.
    """
    socket.sethostname(name)
    kept = {path: os.open(path, os.O_PATH) for path in (*visible, *shared)}
    for place in OWN_DISKS:
        mount("-t", "tmpfs", "tmpfs", place)
    for path, descriptor in kept.items():
        if path in shared or path.startswith(OWN_DISKS):
            os.makedirs(path, exist_ok=True)
            bind(f"/proc/self/fd/{descriptor}", path)
        os.close(descriptor)
    for path in visible:
        if path.startswith(OWN_DISKS):
            mount("-o", "remount,bind,ro", path)
    for path, text in (("/etc/hosts", hosts), (BOOT_ID, f"{uuid.uuid4()}\n")):
        if os.path.exists(path):
            own = Path("/tmp") / f".{os.path.basename(path)}"
            own.write_text(text, encoding="utf-8")
            bind(str(own), path)
    mount("-o", "remount,bind,ro", "/")


def stay() -> None:
    """Until standard input ends."""
    while True:
        if select.select([sys.stdin], [], [], LOOK_S)[0] and not os.read(0, 1):
            return
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def main(told: dict[str, Any]) -> None:
    furnish(told["name"], told["hosts"], told["shared"], told["visible"])
    print("ready", flush=True)
    stay()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
