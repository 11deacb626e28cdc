"""What a user sees of an evaluation: its table, its curves, and two of them beside each other."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mega_rl.config.schema.sampling import RewardConfig
from mega_rl.data.rows.rows import atomic_path
from mega_rl.errors import InputError
from mega_rl.evaluation.comparison import compare
from mega_rl.evaluation.grading import Grading, outcomes
from mega_rl.evaluation.records import RESULTS, SUMMARY, read_results, read_settings
from mega_rl.evaluation.summary import Bootstrap, summarise, table

PLOT = "plot.png"


def report(out: Path, ks: Sequence[int], grading: Grading, bootstrap: Bootstrap) -> None:
    summary = summarise(outcomes(read_results(out), grading), ks, grading, bootstrap)
    write_json(out / SUMMARY, summary)
    print_table(f"{out} (95 % confidence)", table(summary))
    notes = [*summary["notes"], *plot(out / PLOT, summary)]
    print("\n".join([*notes, f"results: {out / RESULTS}, figures: {out / SUMMARY}"]), flush=True)


def write_json(path: Path, content: dict[str, Any]) -> None:
    with atomic_path(path) as fresh:
        fresh.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def print_table(title: str, rows: Sequence[Sequence[str]]) -> None:
    shown = Table(title=title)
    for number, name in enumerate(rows[0]):
        shown.add_column(name, overflow="fold", justify="right" if number else "left")
    for row in rows[1:]:
        shown.add_row(*row)
    Console().print(shown)


def plot(path: Path, summary: dict[str, Any]) -> list[str]:
    """pass@k and maj@k over k, one panel per data source; returns a sentence if there is nothing to draw with."""
    curves = {
        source: {
            kind: [(int(name.partition("@")[2]), m) for name, m in found["metrics"].items() if name.startswith(kind)]
            for kind in ("pass@", "maj@")
        }
        for source, found in summary["sources"].items()
    }
    if not any(len(points) > 1 for kinds in curves.values() for points in kinds.values()):
        return []
    try:
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        return ["no plot: matplotlib is not installed"]
    pyplot.switch_backend("agg")
    figure, axes = pyplot.subplots(1, len(curves), figsize=(5 * len(curves), 4), squeeze=False)
    for panel, (source, kinds) in zip(axes[0], curves.items(), strict=True):
        for kind, points in kinds.items():
            if points:
                ks, values = [k for k, _ in points], [metric for _, metric in points]
                panel.plot(ks, [metric["value"] for metric in values], marker="o", label=f"{kind}k")
                panel.fill_between(ks, [m["low"] for m in values], [m["high"] for m in values], alpha=0.2)
        panel.set(title=source, xlabel="k", ylim=(0, 1))
        panel.set_xscale("log", base=2)
        panel.grid(alpha=0.3)
        panel.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return [f"plot: {path}"]


def print_comparison(
    first: Path, second: Path, right_by: str | None, right_at: float, bootstrap: Bootstrap, written: Path | None
) -> None:
    """Two evaluations of the same data beside each other; ``written``: a file for the figures.

    Raises:
        InputError: they are of different data.
    """
    settings = [read_settings(directory) for directory in (first, second)]
    data = [sorted(file["sha256"] for file in of_one["data"]) for of_one in settings]
    if data[0] != data[1]:
        raise InputError(f"{first} and {second} are of different data: compare evaluations of the same files")
    rewards = [RewardConfig(r["name"], r["weight"], r["options"], r.get("only", [])) for r in settings[0]["rewards"]]
    grading = Grading.of(rewards, right_by, right_at, "environment" in settings[0])
    found = [outcomes(read_results(directory), grading) for directory in (first, second)]
    result = compare(found[0], found[1], bootstrap)
    rows: list[tuple[str, ...]] = [("", "problems", "A", "B", "B - A", "p", "significant")]
    for kind in ("greedy", "sampled"):
        if (of_kind := result[kind]) is not None:
            difference = f"{of_kind['second'] - of_kind['first']:+.4f}"
            if interval := of_kind.get("difference"):
                difference += f" [{interval['low']:+.4f}, {interval['high']:+.4f}]"
            figures = (f"{of_kind['first']:.4f}", f"{of_kind['second']:.4f}", difference, f"{of_kind['p_value']:.3g}")
            rows.append((kind, str(of_kind["num_problems"]), *figures, "yes" if of_kind["is_significant"] else "no"))
    print_table(f"A: {first}, B: {second}", rows)
    for kind in ("greedy", "sampled"):
        for way in ("right_to_wrong", "wrong_to_right") if result[kind] is not None else ():
            names = [f"{problem['data_source']} {problem['problem']}" for problem in result[kind][way]]
            print(f"{kind}, {way.replace('_', ' ')} ({len(names)}): {', '.join(names) or 'none'}")
    for place, directory in (("first", first), ("second", second)):
        if number := result[f"num_only_in_{place}"]:
            print(f"{number} problems are only in {directory}: left out")
    if written is not None:
        write_json(written, result)
