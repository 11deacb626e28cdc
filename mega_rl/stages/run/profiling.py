"""``trainer.profile``: traces of single steps of single ranks, and what was costliest in each of their phases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import record_function

from mega_rl import platform
from mega_rl.config.schema.sections import ProfileConfig
from mega_rl.observe.analysis import trace
from mega_rl.observe.heartbeat import HEART
from mega_rl.observe.sinks.sinks import replace_file

PROFILE = "profile"  # under the output directory


class Profiling:
    """Records the steps that ``settings`` names, if it names this rank.

    Args:
        settings: which steps and ranks.
        output_dir: of the run.
        rank: of this process.
        say: tells the user, on whatever rank.
    """

    def __init__(self, settings: ProfileConfig, output_dir: Path, rank: int, say: Callable[[str], None]) -> None:
        self._steps = frozenset(settings.steps if rank in settings.ranks else ())
        self._directory, self._rank, self._say = output_dir / PROFILE, rank, say
        self._is_on = False

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """The block is this step, from 1."""
        if number not in self._steps:
            yield
            return
        directory = self._directory / f"step_{number:08d}" / f"rank_{self._rank:05d}"
        self._is_on = True
        try:
            with platform.current().recorded(directory):
                yield
        finally:
            self._is_on = False
        with HEART.waiting("the table of the profile", is_for_ranks=False):
            try:
                costs = trace.costs_of(trace.read_events(directory))
            except (OSError, ValueError):  # the profiler was stopped while it wrote
                costs = {}
        if not costs:
            self._say(f"warning: the profiler left no trace of step {number}, rank {self._rank}, in {directory}")
            return
        title = f"Step {number}, rank {self._rank}: the costliest operators of each phase"
        replace_file(directory / trace.TABLE, trace.as_text(costs, title))
        self._say(f"profile of step {number}, rank {self._rank}: {directory / trace.TABLE}")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The block is this phase of a step; if the step is recorded, it lasts until the device has done its work."""
        if not self._is_on:
            yield
            return
        with record_function(trace.PHASE + name):
            yield
            platform.current().synchronize()
