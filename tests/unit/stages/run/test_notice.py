"""Which ranks a rank that is to end takes for its neighbours; ``tests/distributed/stages/run`` has the signals."""

from __future__ import annotations

import os
import signal

import pytest

from mega_rl.parallel.watch.watch import machine
from mega_rl.stages.run import notice
from mega_rl.stages.run.notice import Notice

FAR = 1 << 22  # no process id of this host


def test_ranks_of_a_machine_with_the_same_name_are_no_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the process ids there would be looked for here, and taken for those of ranks that have died."""
    neighbour = os.getppid()
    others = [(machine(), neighbour), ("another boot, another list of processes", FAR)]
    monkeypatch.setattr(notice, "gather_objects", lambda own: [*others, own])
    before = signal.getsignal(signal.SIGTERM)
    with Notice(30.0, print) as found:
        assert found._neighbours == [neighbour] and not found._is_first
    assert signal.getsignal(signal.SIGTERM) == before
