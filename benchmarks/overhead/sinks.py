"""Seconds that the sinks of a run take from each step: console, metrics.jsonl, TensorBoard and run.log.

    python -m benchmarks.overhead.sinks [--run DIRECTORY] [--quick] [--json PATH]

Logs what a step of the quickstart logs: every metric that there is, three histograms of 256 samples, a table of four
samples, every tenth step a second table, and five warnings. With ``--run`` the metrics are those of a run, from its
metrics.jsonl, and its mean step is what the shares are of; without, a step of 0.5 s. The processor's seconds have those
of TensorBoard's thread, which writes while the step goes on.
"""

from __future__ import annotations

import argparse
import io
import logging
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.report import publish, table
from mega_rl.observe.metrics.declared import DISTRIBUTION, METRICS
from mega_rl.observe.run_log import RunLog
from mega_rl.observe.sinks.console import ConsoleSink
from mega_rl.observe.sinks.sinks import JsonlSink, ShownSample, Sink, read_jsonl
from mega_rl.observe.sinks.tensorboard import TensorBoardSink

STEP_S = 0.5
PAUSE_S = 0.25  # after each step of TensorBoard's, less than a step takes: its thread writes meanwhile
NUM_SAMPLES, NUM_SHOWN, NUM_WARNINGS = 256, 4, 5
HEADER = ["sink", "ms of a step, mean", "ms, largest", "processor ms, mean", "share of a step"]
SHOWN = [ShownSample("12+34=" * 3, "46" * 8, "46", 1.0, 16, "stop")] * NUM_SHOWN


def made_up_steps(count: int) -> list[dict[str, float]]:
    """Every metric in every step."""
    names = [spec.name.replace("*", "x") for spec in METRICS if spec.reduction != DISTRIBUTION]
    generator = random.Random(0)
    return [{name: generator.random() for name in names} for _ in range(count)]


def steps_of(run: Path) -> tuple[list[dict[str, float]], float]:
    """The metrics of a run's steps, and the mean seconds of a step."""
    rows = [row["metrics"] for row in read_jsonl(run / "metrics.jsonl")]
    steps = [{name: value for name, value in row.items() if value is not None} for row in rows]
    return steps, statistics.fmean(step["time/step_s"] for step in steps if "time/step_s" in step)


def log_step(sink: Sink, step: int, metrics: Mapping[str, float], values: Sequence[float]) -> None:
    sink.samples(step, "rollout", SHOWN)
    for name in ("rewards", "advantages", "response_lengths"):
        sink.distribution(step, name, values)
    if step % 10 == 0:
        sink.samples(step, "validation", SHOWN)
    sink.log(step, metrics)


def measure(sink: Sink, steps: Sequence[Mapping[str, float]], pause_s: float) -> tuple[list[float], float]:
    """Seconds of each step, and the processor's seconds of all of them together.

    Args:
        pause_s: between two steps, as the work of a step would be.
    """
    generator = random.Random(0)
    seconds, processor = [], time.process_time()
    for step, metrics in enumerate(steps, start=1):
        values = [generator.random() for _ in range(NUM_SAMPLES)]
        start = time.perf_counter()
        log_step(sink, step, metrics, values)
        seconds.append(time.perf_counter() - start)
        time.sleep(pause_s)
    sink.close()
    return seconds, time.process_time() - processor


class WarningsSink(Sink):
    """Warnings of a step, to run.log; each is of an origin of its own, so none is left out."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for number in range(NUM_WARNINGS):
            logging.getLogger("benchmark").warning(f"step {step}: warning {number} of this step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, metavar="DIRECTORY", help="output directory of a run")
    parser.add_argument("--quick", action="store_true", help="5 steps, not 60")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    steps, step_s = steps_of(options.run) if options.run else (made_up_steps(60), STEP_S)
    steps = steps[:5] if options.quick else steps
    logging.getLogger("benchmark").propagate = False
    logging.getLogger("benchmark").addHandler(logging.NullHandler())
    results = {}
    with tempfile.TemporaryDirectory() as scratch, RunLog().opened(Path(scratch) / "run.log", 0, 1):
        sinks = {
            "console": ConsoleSink(len(steps), False, console=Console(file=io.StringIO())),
            "metrics.jsonl": JsonlSink(Path(scratch) / "metrics.jsonl", 0),
            "TensorBoard": TensorBoardSink(Path(scratch) / "tensorboard", 0, {"key": "value"}),
            "run.log": WarningsSink(),
        }
        for name, sink in sinks.items():
            results[name] = measure(sink, steps, PAUSE_S if name == "TensorBoard" and not options.quick else 0.0)
    rows: list[list[object]] = [
        [name, 1e3 * statistics.fmean(s), 1e3 * max(s), 1e3 * p / len(s), f"{statistics.fmean(s) / step_s:.3%}"]
        for name, (s, p) in results.items()
    ]
    total = sum(statistics.fmean(seconds) for seconds, _ in results.values())
    rows.append(
        ["all", 1e3 * total, "", 1e3 * sum(p for _, p in results.values()) / len(steps), f"{total / step_s:.3%}"]
    )
    figures = {"step_s": step_s, "num_metrics": len(steps[-1]), "seconds": {n: s for n, (s, _) in results.items()}}
    title = f"Time in the sinks, {len(steps)} steps of {step_s:.2f} s with {len(steps[-1])} metrics"
    publish(title, table(HEADER, rows), "cpu", {**figures, "share": total / step_s}, options.json)


if __name__ == "__main__":
    main()
