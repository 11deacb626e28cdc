"""How well a run uses its devices: operations per second, their share of what a device can do, and memory."""

from __future__ import annotations

import threading
from collections.abc import Callable

from mega_rl import platform
from mega_rl.observe.metrics.declared import PHASES_OF_TRAINER
from mega_rl.observe.timers import GIB, Timers
from mega_rl.observe.work import WORK
from mega_rl.parallel.collectives import gather_objects
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.platform import DeviceLoad

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


def device_metrics(timers: Timers, layout: ParallelLayout, watch: LoadWatch, peak: float | None) -> dict[str, float]:
    """Speed and memory of the trainer's devices in the step that ends; before ``timers.collect``. Collective.

    Args:
        peak: operations per second of a device; None: not known, and no share of it is told.
    """
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
    parts = gather_objects((own, flops, seconds))
    total: dict[str, float] = {}
    for part, _, _ in parts:
        for name, value in part.items():
            total[name] = max(value, total.get(name, 0.0))
    busy = [part["device/utilisation"] for part, _, _ in parts if "device/utilisation" in part]
    if busy:
        total["device/utilisation"] = sum(busy) / len(busy)
    per_s = sum(part[1] for part in parts) / len(parts) / max(*(part[2] for part in parts), 1e-9)
    total["throughput/tflops_per_device"] = per_s / 1e12
    return total | ({} if peak is None else {"throughput/mfu": per_s / peak})
