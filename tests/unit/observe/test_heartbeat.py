"""What a process says of itself."""

from __future__ import annotations

import pytest

from mega_rl.observe import timers as under_test
from mega_rl.observe.heartbeat import Heart, Wait
from mega_rl.observe.timers import Timers


def test_phases_nest_and_their_ends_are_progress() -> None:
    heart = Heart()
    assert heart.phase == "start"
    with heart.during("step"):
        with pytest.raises(ValueError, match="x"), heart.during("generate"):
            assert heart.phase == "generate"
            raise ValueError("x")
        assert heart.phase == "step"
    assert heart.count == 4
    heart.step = 1
    assert heart.phase == "between phases"


def test_a_timer_is_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    heart, timers = Heart(), Timers()  # of its own: whatever goes on in this process is progress of ``HEART``
    monkeypatch.setattr(under_test, "HEART", heart)
    before = heart.count
    with timers("generate"):
        assert heart.phase == "generate"
    assert heart.count == before + 2


def test_the_innermost_wait_counts() -> None:
    heart = Heart()
    with heart.waiting("the other ranks"):
        with heart.waiting("the rewards", is_for_ranks=False):
            assert heart.wait == Wait("the rewards", is_for_ranks=False)
        assert heart.wait == Wait("the other ranks", is_for_ranks=True)
    assert heart.wait is None


def test_a_gauge_that_moves_is_progress_and_one_that_does_not_is_none() -> None:
    heart, values = Heart(), iter([5, 5, 6, 6, 6])
    counts = []
    with heart.measured(lambda: next(values)):
        for _ in range(5):
            heart.read_gauges()
            counts.append(heart.count)
    assert counts == [1, 1, 2, 2, 2]
