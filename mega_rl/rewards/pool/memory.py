"""Shared memory of a reward worker, which no resource limit counts: looked at from outside. Imports no torch."""

from __future__ import annotations

import os

SMALL_BYTES = 1 << 20  # of shared memory: ignored, because libraries keep some
MEMFD = "/memfd:"  # how the kernel calls files that exist in memory only


def exceeds(pid: int, limit_bytes: int) -> bool:
    """Whether a process or a descendant has shared memory, and together with its private memory more than the limit.

    Counted are shared pages that are mapped and present, or, if that is more, the files in memory that are open. What
    comes and goes between two looks is not seen, nor a file in memory that is neither mapped nor open, such as one on
    its way through a socket.
    """
    return any(_exceeds(process, limit_bytes) for process in _tree(pid))


def _exceeds(pid: int, limit_bytes: int) -> bool:
    try:
        with open(f"/proc/{pid}/status") as file:
            lines = dict(line.split(":", 1) for line in file)
        private, mapped = (int(lines.get(key, "0").split()[0]) << 10 for key in ("RssAnon", "RssShmem"))
        shared = max(mapped, _open_bytes(pid))
    except OSError:  # it ended
        return False
    return shared > SMALL_BYTES and private + shared > limit_bytes


def _open_bytes(pid: int) -> int:
    """Bytes of the files in memory that the process has open, each counted once."""
    found = {}
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{descriptor}"
        try:
            if os.readlink(path).startswith(MEMFD):
                status = os.stat(path)
                found[status.st_dev, status.st_ino] = status.st_blocks * 512
        except OSError:  # closed meanwhile
            continue
    return sum(found.values())


def _tree(pid: int) -> list[int]:
    """The process and its descendants; only the process on a kernel that does not list children."""
    found = [pid]
    for parent in found:
        try:
            for thread in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{thread}/children") as file:
                    found += map(int, file.read().split())
        except OSError:
            continue
    return found
