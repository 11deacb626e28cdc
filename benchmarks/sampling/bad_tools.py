"""Tools of ``episodes.py`` that do anything but answer."""

from __future__ import annotations

import os
import time

HANG_S = 600.0


def tool(how: str) -> object:
    """Do as it is told.

    Args:
        how: the way.
    """
    match how:
        case "hang":
            time.sleep(HANG_S)
        case "die":
            os._exit(3)
        case "flood":
            return "x" * (1 << 25)
        case "raise":
            raise ValueError("no")
        case "binary":
            return bytes(range(256))
    return how
