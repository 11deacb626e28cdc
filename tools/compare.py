"""Compare runs: ``python tools/compare.py BASELINE RUN [RUN ...] [--metric NAME[=LIMIT] ...] [--plot FILE.png]``.

The error of a metric is the mean absolute difference over the steps of both runs, relative to the baseline's mean
absolute value. Without ``--metric``: the usual acceptance of a new platform against a known one, the loss within 2 %
for the stages that learn from files and the mean reward within 4 % for reinforcement learning, whose loss, a difference
of large terms near 0, is shown without a limit. Exit status 0: everything within its limits, 1: something is not, 2:
bad input.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mega_rl.errors import InputError
from mega_rl.observe.analysis.compare import MetricDifference, Run, Throughput, difference, read_run, series, throughput
from mega_rl.observe.metrics.from_files import LOSSES

# By a metric that only the baseline of such a stage has.
DEFAULT_METRICS = {loss: (f"{loss}=0.02",) for loss in LOSSES} | {"reward/mean": ("reward/mean=0.04", "actor/loss")}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("baseline", type=Path, help="output directory of a run, or its metrics.jsonl")
    parser.add_argument("runs", type=Path, nargs="+", metavar="run", help="what to compare with it")
    default = ", or ".join(" and ".join(metrics) for metrics in DEFAULT_METRICS.values())
    parser.add_argument("--metric", action="append", metavar="NAME[=LIMIT]", help=f"default: {default}, by the stage")
    parser.add_argument("--throughput", default="throughput/tokens_per_s", metavar="NAME", help="a rate; '' for none")
    parser.add_argument("--min-throughput", type=float, metavar="RATIO", help="least steady rate, in baselines")
    parser.add_argument("--names", nargs="+", help="of the runs in table and plot, the baseline's first")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the metrics (needs matplotlib)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    return parser.parse_args(arguments)


def metric_and_limit(text: str) -> tuple[str, float | None]:
    name, equals, limit = text.partition("=")
    try:
        return name, float(limit) if equals else None
    except ValueError:
        raise InputError(f"--metric {text}: {limit!r} is no number; write NAME=0.02 for 2 %") from None


def default_metrics(baseline: Run) -> Sequence[str]:
    for mark, metrics in DEFAULT_METRICS.items():
        if series(baseline, mark):
            return metrics
    raise InputError(f"the baseline logged none of {', '.join(DEFAULT_METRICS)}: say what to compare with --metric")


def names_of(options: argparse.Namespace) -> list[str]:
    paths = [options.baseline, *options.runs]
    names = options.names or [path.parent.name if path.is_file() else path.name for path in paths]
    if len(names) != len(paths):
        raise InputError(f"--names has {len(names)} names for {len(paths)} runs: give one for each")
    return names


def print_table(names: Sequence[str], rows: Sequence[tuple[str, MetricDifference | Throughput]]) -> None:
    table = Table(title=f"Against {names[0]}")
    for column in ("run", "metric", "steps", "baseline", "run", "error", "limit", ""):
        table.add_column(column, overflow="fold")
    for name, row in rows:
        verdict = "" if row.limit is None else ("pass" if row.passed else "FAIL")
        if isinstance(row, MetricDifference):
            error, limit = f"{row.relative_error:.2%}", "" if row.limit is None else f"{row.limit:.2%}"
            figures = (row.metric, str(row.num_steps), f"{row.baseline_mean:.5g}", f"{row.mean:.5g}", error, limit)
        else:
            limit = "" if row.limit is None else f">= {row.limit:g}x"
            figures = ("throughput", "", "1x", f"{row.steady:.3g}x, first steps {row.first_steps:.3g}x", "", limit)
        table.add_row(name, *figures, verdict)
    Console().print(table)


def plot(path: Path, names: Sequence[str], runs: Sequence[Run], metrics: Sequence[str]) -> None:
    """One panel per metric, one line per run."""
    try:
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        raise InputError("--plot needs matplotlib: pip install matplotlib, or leave --plot out") from None
    figure, axes = pyplot.subplots(1, len(metrics), figsize=(6 * len(metrics), 4), squeeze=False)
    for panel, metric in zip(axes[0], metrics, strict=True):
        for name, run in zip(names, runs, strict=True):
            values = series(run, metric)
            panel.plot(list(values), [float("nan") if v is None else v for v in values.values()], label=name)
        panel.set_xlabel("step")
        panel.set_title(metric)
        panel.grid(alpha=0.3)
        panel.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    names = names_of(options)
    baseline, *others = runs = [read_run(path) for path in (options.baseline, *options.runs)]
    wanted = [metric_and_limit(text) for text in options.metric or default_metrics(baseline)]
    rows: list[tuple[str, MetricDifference | Throughput]] = []
    for name, run in zip(names[1:], others, strict=True):
        rows += [(name, difference(baseline, run, metric, limit)) for metric, limit in wanted]
        if options.throughput:
            rows.append((name, throughput(baseline, run, options.throughput, options.min_throughput)))
    print_table(names, rows)
    if options.plot:
        plot(options.plot, names, runs, [metric for metric, _ in wanted])
    if options.json:
        figures = [{"run": name, **asdict(row), "passed": row.passed} for name, row in rows]
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0 if all(row.passed for _, row in rows) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
