"""What other processes have written to shared storage, as this one sees it: network file systems tell it late."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 30.0  # a file that another machine has closed is there within this time, or on other storage
_PAUSE_S = 0.2


def patiently(problem: Callable[[], str | None]) -> str | None:
    """The answer of ``problem``, asked again and again while it is not None, for at most ``PATIENCE_S``."""
    end = time.monotonic() + PATIENCE_S
    while (answer := problem()) is not None and time.monotonic() < end:
        time.sleep(_PAUSE_S)
    return answer


def size_of(path: Path) -> int | None:
    """Bytes of a file, None if it is not there.

    It is opened and its directory listed, because that is when a client of NFS asks the server instead of its cache.
    """
    try:
        os.listdir(path.parent)
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size
    except (FileNotFoundError, NotADirectoryError):
        return None
