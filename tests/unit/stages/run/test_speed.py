"""What a step says of its devices: from counted operations, timed phases and what the driver tells."""

from __future__ import annotations

import threading

import pytest

from mega_rl.observe.heartbeat import HEART
from mega_rl.observe.timers import GIB, Timers
from mega_rl.observe.work import WORK
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.platform import DeviceLoad
from mega_rl.stages.run import speed
from mega_rl.stages.run.speed import LoadWatch, RankReport, device_metrics, reports_of_step, slowest


def test_speed_is_of_the_phases_in_which_the_trainer_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    timers = Timers(clock=lambda: now)
    WORK.collect(())
    with timers("step"):
        WORK.add(7e12)  # outside of them all
        for phase, seconds, flops in (("update", 3.0, 6e12), ("generate", 5.0, 9e12), ("old_logprobs", 1.0, 2e12)):
            with timers(phase):
                WORK.add(flops)
                now += seconds
    # Of the four ranks each two compute one replica of the model, and all count what this one does.
    layout = ParallelLayout(world_size=4, tensor=2, context=1, data=2, pipeline=1, expert=1, expert_tensor=2)
    monkeypatch.setattr(speed, "numbers_to_first", lambda own: [own] * 4)
    watch = LoadWatch(lambda: None)
    found = device_metrics(reports_of_step(timers, layout, watch), peak=4e12)
    assert found["throughput/tflops_per_device"] == pytest.approx(8.0 / 2 / 4.0)
    assert found["throughput/mfu"] == pytest.approx(0.25)
    assert not any(name.startswith("device/") for name in found)
    nothing = device_metrics(reports_of_step(timers, layout, watch), peak=None)
    assert nothing["throughput/tflops_per_device"] == 0.0 and "throughput/mfu" not in nothing


def test_every_phase_has_the_seconds_of_the_rank_that_took_longest() -> None:
    """Also one that a rank did not come to; and ranks that have no reports say nothing."""
    phases = [{"time/step_s": 2.0, "time/save_s": 0.5}, {"time/step_s": 3.0}]
    assert slowest(phases) == {"time/step_s": 3.0, "time/save_s": 0.5}
    assert device_metrics([], peak=1e12) == {}
    busy = [
        RankReport({"device/utilisation": share, "memory/peak_host_gib": share}, 1.0, 1.0, {}) for share in (0.2, 0.6)
    ]
    found = device_metrics(busy, peak=None)
    assert (found["device/utilisation"], found["memory/peak_host_gib"]) == (0.4, 0.6)


def test_the_device_is_seen_while_a_step_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "INTERVAL_S", 1e-3)
    loads = [DeviceLoad(0.25, 3 * GIB), DeviceLoad(0.75, 5 * GIB), DeviceLoad(0.5, 4 * GIB)]
    is_seen = threading.Event()

    def look() -> DeviceLoad:
        if len(loads) > 1:
            return loads.pop(0)
        is_seen.set()
        return loads[0]

    watch = LoadWatch(look)
    assert is_seen.wait(60.0)
    watch.end()
    found = watch.collect()
    assert found["device/memory_used_gib"] == 5.0 and 0.25 < found["device/utilisation"] < 0.75
    assert watch.collect() == {"device/memory_used_gib": 4.0, "device/utilisation": 0.5}, "since the last call"


def test_a_driver_that_tells_only_of_memory() -> None:
    watch = LoadWatch(lambda: DeviceLoad(None, GIB))
    watch.end()
    assert watch.collect() == {"device/memory_used_gib": 1.0}


def test_work_belongs_to_the_innermost_phase() -> None:
    WORK.collect(())
    with HEART.during("step"), HEART.during("update"):
        WORK.add(2.0)
    assert WORK.collect(("step",)) == 0.0
    with HEART.during("step"), HEART.during("update"):
        WORK.add(3.0)
    assert WORK.collect(("update",)) == 3.0, "what was there at the last call is forgotten"
