"""A checkpoint whose last part comes later: rank 0 is waited for in pieces, so that no collective lasts long."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from mega_rl.megatron.checkpoint import saving
from mega_rl.megatron.checkpoint.saving import LATE_WAIT_S, CheckpointWriter


class Part:
    def __init__(self, num_waits: int) -> None:
        self.left, self.waits = num_waits, list[float]()

    def get_late(self, wait_s: float) -> dict[str, Any] | None:
        self.waits.append(wait_s)
        self.left -= wait_s > 0
        return {"it": "is there"} if self.left < 0 else None


def test_a_late_part_is_waited_for_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    meetings: list[bool] = []
    monkeypatch.setattr(saving.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(saving, "is_any", lambda flag: meetings.append(flag) or flag)
    writer, part, published = CheckpointWriter.__new__(CheckpointWriter), Part(3), list[Mapping[str, Any]]()
    writer._calls, writer._open = None, saving._Open(part, published.append)
    writer.poll()
    assert not published and meetings == [False] and part.waits == [0.0]
    writer.finish()
    assert published == [{"it": "is there"}] and part.waits[1:] == [LATE_WAIT_S] * 4
    assert meetings == [False] * 4 + [True], "the ranks met after every piece"
    writer.finish()  # there is nothing more
    assert len(published) == 1
