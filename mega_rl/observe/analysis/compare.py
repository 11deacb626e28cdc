"""How far the metrics of two runs are apart, step by step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mega_rl.errors import InputError
from mega_rl.observe.observer import JSONL_FILE
from mega_rl.observe.sinks.sinks import read_jsonl

NUM_FIRST_STEPS = 4  # throughput is looked at in the first steps, start-up effects included, and in the others
Run = Mapping[int, Mapping[str, float | None]]  # step -> metrics; None: not finite


@dataclass(frozen=True)
class MetricDifference:
    """One metric of a run beside the same metric of the baseline."""

    metric: str
    num_steps: int  # steps that both runs have
    baseline_mean: float
    mean: float
    relative_error: float  # sum of |a - b| over sum of |a|, over the steps; a: baseline
    limit: float | None  # of the relative error; None: only shown

    @property
    def passed(self) -> bool:
        return self.limit is None or self.relative_error <= self.limit


@dataclass(frozen=True)
class Throughput:
    """Speed of a run in terms of the baseline's: 2.0 is twice as fast."""

    first_steps: float  # ratio of the means over the first four training steps
    steady: float  # ratio of the medians over all later ones; NaN if there are none
    limit: float | None  # least steady ratio

    @property
    def passed(self) -> bool:
        return self.limit is None or self.steady >= self.limit


def read_run(path: Path) -> Run:
    """The metrics of a run directory, or of a metrics file.

    Raises:
        InputError: there is none, or it is damaged.
    """
    file = path / JSONL_FILE if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"{file} does not exist: name the output directory of a run with logging.jsonl=true")
    return {row["step"]: row["metrics"] for row in read_jsonl(file)}


def series(run: Run, metric: str) -> dict[int, float | None]:
    """Step -> value, of the steps that logged the metric."""
    return {step: metrics[metric] for step, metrics in run.items() if metric in metrics}


def difference(baseline: Run, other: Run, metric: str, limit: float | None) -> MetricDifference:
    """Mean absolute error relative to the baseline's mean absolute value, over the steps that both runs logged.

    A value that is not finite in either run makes the error NaN, which is above every limit.

    Raises:
        InputError: no step of both runs has the metric.
    """
    ours, theirs = series(baseline, metric), series(other, metric)
    steps = sorted(ours.keys() & theirs.keys())
    if not steps:
        known = sorted({name for run in (baseline, other) for metrics in run.values() for name in metrics})
        raise InputError(f"--metric {metric}: the runs have no step in common that logged it; there are {_some(known)}")
    pairs = [(_number(ours[step]), _number(theirs[step])) for step in steps]
    size, error = sum(abs(a) for a, _ in pairs), sum(abs(a - b) for a, b in pairs)
    relative = error / size if size else (0.0 if error == 0 else math.inf)
    return MetricDifference(
        metric,
        len(steps),
        statistics.fmean(a for a, _ in pairs),
        statistics.fmean(b for _, b in pairs),
        relative,
        limit,
    )


def throughput(baseline: Run, other: Run, metric: str, limit: float | None) -> Throughput:
    """Ratio of the rates; raises InputError if a run did not log them."""
    rates = []
    for run in (baseline, other):
        values = [_number(value) for step, value in sorted(series(run, metric).items()) if step > 0]
        if not values:
            raise InputError(f"--throughput {metric}: a run did not log it; name another metric")
        rates.append((statistics.fmean(values[:NUM_FIRST_STEPS]), values[NUM_FIRST_STEPS:]))
    (first_a, later_a), (first_b, later_b) = rates
    steady = statistics.median(later_b) / statistics.median(later_a) if later_a and later_b else math.nan
    return Throughput(first_b / first_a, steady, limit)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
