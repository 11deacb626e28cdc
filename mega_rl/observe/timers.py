"""Seconds and peak memory per phase of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from mega_rl.observe.heartbeat import HEART
from mega_rl.observe.metrics.declared import match

GIB = 1 << 30


class Timers:
    """``with timers("generate"): ...`` adds wall time to a phase; phases may nest, but not inside themselves.

    With ``memory`` each phase also has its peaks, those of the phases within it included. ``within`` is a context that
    every phase runs in, given its name.

    Accelerator work that was only queued is not waited for: synchronise inside the block if that matters.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        memory: Callable[[], Mapping[str, int]] = dict,
        within: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._clock = clock  # seconds, monotonic
        self._seconds: dict[str, float] = {}
        self._running: set[str] = set()
        self._memory = memory  # peak bytes since its last call, by place: "host", "device"
        self._peaks: dict[str, int] = {}  # metric name -> bytes
        self._within = within
        self.watch: Callable[[str, float], None] | None = None  # told of every phase that has ended, with its seconds

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Times the block as metric ``time/<phase>_s``, also when it raises.

        Raises:
            KeyError: no such metric is declared.
        """
        name = f"time/{phase}_s"
        match(name)
        assert name not in self._running, f"timer {phase!r} is already running"
        self._take_peaks()
        self._running.add(name)
        begin = self._clock()
        try:
            with HEART.during(phase), self._within(phase):
                yield
        finally:
            self._take_peaks()
            self._running.remove(name)
            seconds = self._clock() - begin
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            if self.watch is not None:
                self.watch(phase, seconds)

    def add(self, phase: str, seconds: float) -> None:
        """Counts seconds that were measured elsewhere, such as in a thread beside the phases."""
        name = f"time/{phase}_s"
        match(name)
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    @property
    def seconds(self) -> Mapping[str, float]:
        """Metric name -> seconds of all blocks that ended since the last ``collect``."""
        return self._seconds

    def collect(self) -> dict[str, float]:
        """Metric name -> seconds of all blocks that ended since the last call, and begins anew."""
        seconds = self._seconds
        self.reset()
        return seconds

    def collect_peaks(self) -> dict[str, float]:
        """Metric name -> GiB: ``memory/peak_<place>_gib/<phase>`` of the blocks since the last call, and the largest.

        The largest one, ``memory/peak_<place>_gib``, is that of the whole run.
        """
        self._take_peaks()
        peaks = {name: value / GIB for name, value in self._peaks.items()}
        self._peaks = {name: value for name, value in self._peaks.items() if name.count("/") == 1}
        return peaks

    def _take_peaks(self) -> None:
        """Count what was used since the last call to every running phase."""
        phases = [name.removeprefix("time/").removesuffix("_s") for name in self._running]
        for place, peak in self._memory().items():
            for suffix in ("", *(f"/{phase}" for phase in phases)):
                name = f"memory/peak_{place}_gib{suffix}"
                self._peaks[name] = max(self._peaks.get(name, 0), peak)

    def reset(self) -> None:
        """Forgets the seconds so far; blocks that are still running will count whole."""
        self._seconds = {}
