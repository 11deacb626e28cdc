"""What a person sees: one line per step, a progress bar if there is a terminal, and small tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from mega_rl.observe.metrics.declared import CONSOLE_METRICS, match
from mega_rl.observe.sinks.sinks import Sink

_ORDER = {spec.name: position for position, spec in enumerate(CONSOLE_METRICS)}


def format_line(step: int, total_steps: int, metrics: Mapping[str, float]) -> str | None:
    """One line such as ``step  12/60 | reward 0.431 | loss +0.012 | 1.4 s``; None if nothing is worth a line.

    Metrics that are not finite are always named, those that the line usually leaves out too.
    """
    shown: list[tuple[int, str]] = []
    hidden: list[str] = []
    for name, value in metrics.items():
        spec, stars = match(name)
        if spec.console:
            shown.append((_ORDER[spec.name], spec.console.format(*stars, value=value)))
        elif not math.isfinite(value):
            hidden.append(f"{name} {value}")
    if not shown and not hidden:
        return None
    width = len(str(total_steps)) + 1
    parts = [f"step {step:>{width}}/{total_steps}", *(text for _, text in sorted(shown, key=lambda item: item[0]))]
    return " | ".join([*parts, *(["NOT FINITE: " + ", ".join(hidden)] if hidden else [])])


class ConsoleSink(Sink):
    """Lines on the console, one per step; a bar with the remaining time under them if it is a terminal."""

    def __init__(self, total_steps: int, progress: bool, first_step: int = 0, console: Console | None = None) -> None:
        """
        Args:
            total_steps: of the whole run, for ``12/60``.
            progress: show the bar if the console is a terminal.
            first_step: where a resumed run begins, so that the bar does not begin at 0.
        """
        self._console = console or Console(highlight=False)
        self._total_steps = total_steps
        self._progress: Progress | None = None
        if progress and self._console.is_terminal:
            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._progress = Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=self._console)
            self._task = self._progress.add_task("training", total=total_steps, completed=first_step)
            self._progress.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        line = format_line(step, self._total_steps, metrics)
        if line is not None:
            self.message(line)
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def message(self, message: str) -> None:
        # Text, not str: a completion may hold what rich would take for markup; soft_wrap: a log file gets whole lines
        self._console.print(Text(message), soft_wrap=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def before_after_table(title: str, rows: Sequence[tuple[str, float, float]], console: Console | None = None) -> None:
    """Prints name, before, after and change of each row; with or without a terminal.

    Close an ``Observer`` with a progress bar first, else the bar stands amid the table.
    """
    table = Table(title=Text(title), title_justify="left")
    table.add_column("measure")
    for header in ("before", "after", "change"):
        table.add_column(header, justify="right")
    for name, before, after in rows:
        table.add_row(Text(name), f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}")
    (console or Console(highlight=False)).print(table)
