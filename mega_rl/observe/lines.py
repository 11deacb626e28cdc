"""How this process prints where others print too: whole lines."""

from __future__ import annotations

import io
import sys


def write_whole_lines() -> None:
    """Have this process write each line that it prints at once, so that no other rank cuts it.

    With PYTHONUNBUFFERED a line would be as many writes as ``print`` has arguments, and one more for its end. Of a text
    of several lines the end is a write of its own still, unless it is a part of the text.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not what somebody has put in its place
            stream.reconfigure(line_buffering=True, write_through=False)
