"""What is said of one metric, and of a section of metrics."""

from __future__ import annotations

from dataclasses import dataclass

# A reduction: the metric is all values of a step, for a histogram (``Observer.distribution``); it has no single number.
DISTRIBUTION = "distribution"


@dataclass(frozen=True)
class MetricSpec:
    """One metric, or a family of them."""

    name: str
    unit: str
    description: str
    # mean (weighted) | sum | max | min | last: over the add() calls and ranks of one step
    # (distribution: all values of the step, see DISTRIBUTION)
    reduction: str = "mean"
    console: str | None = None  # format string of ``value`` and the texts that the stars matched, {0}, {1}
    section: str = ""  # key of ``SECTIONS``; METRICS fills it in


@dataclass(frozen=True)
class Section:
    """A part of every dashboard, of the report and of the table of metrics."""

    key: str  # a word, first part of the names in wandb and swanlab
    title: str
    meaning: str
