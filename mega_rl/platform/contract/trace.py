"""Recording what a device and its host do, as a trace that browsers draw (chrome://tracing, ui.perfetto.dev)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

TRACE = "trace.json.gz"


@contextmanager
def recorded(directory: Path, activities: Sequence[ProfilerActivity]) -> Iterator[None]:
    """The block's operators and kernels as ``TRACE`` in a new directory; nothing is written if the block raises."""
    with profile(activities=activities) as profiler:
        yield
    directory.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(directory / TRACE))
