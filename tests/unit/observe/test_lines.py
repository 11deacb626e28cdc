"""A line is one write, also where Python was told to keep nothing back."""

from __future__ import annotations

import io
import os
import sys

import pytest

from mega_rl.observe.lines import write_whole_lines


def printed(reading: int) -> list[bytes]:
    """What each write to the pipe was: one of packets gives no two at once."""
    os.set_blocking(reading, False)
    found = []
    try:
        while content := os.read(reading, 1 << 16):
            found.append(content)
    except BlockingIOError:
        pass
    return found


def test_a_line_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe2(os.O_DIRECT)
    with open(reading, "rb"), open(writing, "wb", buffering=0) as raw:
        unbuffered = io.TextIOWrapper(raw, write_through=True)  # as PYTHONUNBUFFERED has it
        monkeypatch.setattr(sys, "stdout", unbuffered)
        monkeypatch.setattr(sys, "stderr", io.StringIO())  # somebody else's
        print("rank", 0)
        assert printed(reading) == [b"rank", b" ", b"0", b"\n"]
        write_whole_lines()
        print("rank", 0)
        print("two\nlines\n", end="")
        assert printed(reading) == [b"rank 0\n", b"two\nlines\n"]
        print("the start of a line", end="")
        assert printed(reading) == []
        print("x" * 3000, "its end")
        assert printed(reading) == [b"the start of a line" + b"x" * 3000 + b" its end\n"]
