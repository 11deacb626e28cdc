"""How well a run uses its devices: operations per second, their share of what a device can do, and memory."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mega_rl import platform
from mega_rl.observe.metrics.declared import PHASES, PHASES_OF_TRAINER, Metrics
from mega_rl.observe.timers import GIB, Timers
from mega_rl.observe.work import WORK
from mega_rl.parallel.collectives import numbers_to_first
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.platform import DeviceLoad

# The metrics of a report, which go to rank 0 as numbers in this order.
_OF_PHASES = tuple(f"time/{phase}_s" for phase in PHASES)
_OF_DEVICES = (
    *("memory/peak_host_gib", *(f"memory/peak_host_gib/{phase}" for phase in PHASES)),
    *("memory/peak_device_gib", *(f"memory/peak_device_gib/{phase}" for phase in PHASES)),
    *("device/utilisation", "device/memory_used_gib", "device/memory_reserved_gib", "device/memory_total_gib"),
)
INTERVAL_S = 1.0  # between two looks at the device; a driver averages over a part of this


class LoadWatch:
    """Looks at the device now and then in a thread of its own; without a device of its own it does nothing.

    Args:
        look: what the device does now; None: it cannot be told.
    """

    def __init__(self, look: Callable[[], DeviceLoad | None]) -> None:
        self._look = look
        self._seen: list[DeviceLoad] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="device load", daemon=True)
        if self._see():
            self._thread.start()

    def collect(self) -> dict[str, float]:
        """Metrics of the time since the last call: mean use, and the most memory."""
        self._see()
        seen, self._seen = self._seen, []
        if not seen:
            return {}
        found = {"device/memory_used_gib": max(load.used_bytes for load in seen) / GIB}
        busy = [load.busy for load in seen if load.busy is not None]
        return found | ({"device/utilisation": sum(busy) / len(busy)} if busy else {})

    def end(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _see(self) -> bool:
        load = self._look()
        if load is not None:
            self._seen.append(load)
        return load is not None

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            self._see()


@dataclass(frozen=True)
class RankReport:
    """What one rank tells of the step that ends."""

    devices: dict[str, float]  # metrics, of which the largest rank's counts
    flops: float  # of its share of the models
    trainer_s: float  # in which the trainer's models computed
    phases: dict[str, float]  # metric name -> seconds

    def numbers(self) -> list[float]:
        """For rank 0; NaN stands for what there is not."""
        unknown = sorted((self.devices.keys() - set(_OF_DEVICES)) | (self.phases.keys() - set(_OF_PHASES)))
        assert not unknown, f"{unknown} are not among the metrics of a report"
        devices, phases = (
            [found.get(name, math.nan) for name in names]
            for found, names in ((self.devices, _OF_DEVICES), (self.phases, _OF_PHASES))
        )
        return [self.flops, self.trainer_s, *devices, *phases]


def report_of(numbers: Sequence[float]) -> RankReport:
    """The inverse of ``RankReport.numbers``."""
    flops, trainer_s, *values = numbers
    named = [(name, one) for name, one in zip(_OF_DEVICES + _OF_PHASES, values, strict=True) if not math.isnan(one)]
    devices, phases = ({name: value for name, value in named if name in names} for names in (_OF_DEVICES, _OF_PHASES))
    return RankReport(devices, flops, trainer_s, phases)


def reports_of_step(timers: Timers, layout: ParallelLayout, watch: LoadWatch) -> list[RankReport]:
    """Of every rank, on rank 0; nothing on the others. Before ``timers.collect``. Collective."""
    stats = platform.current().memory()
    seconds = sum(timers.seconds.get(f"time/{phase}_s", 0.0) for phase in PHASES_OF_TRAINER)
    # Every rank counts the whole model for the micro-batches of its data-parallel replica.
    flops = WORK.collect(PHASES_OF_TRAINER) * layout.data / layout.world_size
    own = {
        "memory/peak_host_gib": stats.host_peak_bytes / GIB,
        "memory/peak_device_gib": stats.device_peak_bytes / GIB,
        **timers.collect_peaks(),
        **watch.collect(),
    }
    if stats.device_total_bytes:
        own |= {
            "device/memory_reserved_gib": stats.device_reserved_bytes / GIB,
            "device/memory_total_gib": stats.device_total_bytes / GIB,
        }
    return [report_of(row) for row in numbers_to_first(RankReport(own, flops, seconds, dict(timers.seconds)).numbers())]


def device_metrics(reports: Sequence[RankReport], peak: float | None) -> dict[str, float]:
    """Speed and memory of the trainer's devices.

    Args:
        reports: of all ranks; none: nothing is known here.
        peak: operations per second of a device; None: not known, and no share of it is told.
    """
    if not reports:
        return {}
    total: dict[str, float] = {}
    for report in reports:
        for name, value in report.devices.items():
            total[name] = max(value, total.get(name, 0.0))
    busy = [report.devices["device/utilisation"] for report in reports if "device/utilisation" in report.devices]
    if busy:
        total["device/utilisation"] = sum(busy) / len(busy)
    per_s = sum(report.flops for report in reports) / len(reports) / max(*(r.trainer_s for r in reports), 1e-9)
    total["throughput/tflops_per_device"] = per_s / 1e12
    return total | ({} if peak is None else {"throughput/mfu": per_s / peak})


def slowest(phases: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Seconds of every phase, of the rank that took longest."""
    found = Metrics()
    for of_rank in phases:
        for name, seconds in of_rank.items():
            found.add(name, seconds)
    return found.result()
