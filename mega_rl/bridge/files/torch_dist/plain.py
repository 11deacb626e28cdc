"""Opening files that others may have made: nothing but regular files, so that no open or read waits for ever."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

MAX_JSON_BYTES = 1 << 28
MAX_PATH_BYTES = 1024  # below a directory; the system takes 4096 for the whole


def open_plain(path: Path) -> BinaryIO:
    """A regular file, or a link to one, to read.

    Raises:
        OSError: it is missing or unreadable, or a pipe, a device or a directory.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe nobody writes to opens at once so
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(None, "it is no regular file", str(path))
    return os.fdopen(handle, "rb")


def read_json(path: Path) -> Any:
    """
    Raises:
        OSError: as ``open_plain``.
        ValueError: the file is no JSON, or larger than any of ours.
    """
    with open_plain(path) as file:
        text = file.read(MAX_JSON_BYTES + 1)
    if len(text) > MAX_JSON_BYTES:
        raise ValueError(f"it has more than {MAX_JSON_BYTES} bytes")
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested without end") from error


def is_name_below(name: str) -> bool:
    """Whether a path that a file names leads to something below the directory that it is meant for."""
    try:
        path = os.fsencode(name)
    except UnicodeEncodeError:  # half of a character, which no file's name has
        return False
    parts = path.split(b"/")
    return (
        len(path) <= MAX_PATH_BYTES
        and b"\0" not in path
        and all(0 < len(part) < 256 and part not in (b".", b"..") for part in parts)
    )
