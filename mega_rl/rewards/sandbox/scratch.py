"""Temporary directories of processes that may be killed, and those that killed ones left behind. Imports no torch.

The owner of a directory holds a lock on it for as long as it lives. The kernel gives the lock up when the owner ends,
however that happens, so a directory that can be locked has no owner. Process numbers are not trusted: another process
may have the number by then, and in another container the same number means another process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile

PREFIX = "mega_rl_reward_scratch_"  # of those of reward workers


class Scratch:
    """A directory of the temporary folder that this process owns until `remove`; its name begins with the prefix."""

    def __init__(self, prefix: str = PREFIX) -> None:
        while True:
            self.path = tempfile.mkdtemp(prefix=prefix)
            lock = _locked(self.path)
            if lock is not None:
                break  # else a `sweep` locked the directory first, and removes it
        self._lock = lock

    def remove(self) -> None:
        remove_tree(self.path)
        os.close(self._lock)


def sweep(prefix: str = PREFIX) -> None:
    """Remove the directories of this user and prefix in the temporary folder whose owners have ended."""
    with os.scandir(tempfile.gettempdir()) as entries:
        found = [entry for entry in entries if entry.name.startswith(prefix)]
    for entry in found:
        with contextlib.suppress(OSError):  # another process removes it too
            is_own = entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
            if is_own and (lock := _locked(entry.path)) is not None:
                remove_tree(entry.path)
                os.close(lock)


def remove_tree(path: str) -> None:
    """Remove a directory, as far as this user may, however deep a program nested others in it."""
    try:
        shutil.rmtree(path, ignore_errors=True)
    except RecursionError:
        subprocess.run(("rm", "-rf", "--", path), stderr=subprocess.DEVNULL, check=False)


def _locked(path: str) -> int | None:
    """A descriptor that holds the lock on a directory that is still there; None if it has an owner."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.stat(path), os.fstat(descriptor)):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None
