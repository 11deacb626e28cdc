"""How far tokens of older weights are from the trainer in runs that are well: what the engine gate's floors must allow.

    python -m benchmarks.asynchronous.gate_floors --dir DIR [--rates 0.1 1 10] [--staleness 1 4 8] [--warm-up 0 20]
        [--seed 0] [--json F] [key=value ...]

The runs are those of ``benchmarks.asynchronous.staleness``, without noise: the quickstart's GRPO, a real trainer and a
real engine, ``pinned``. A rate is that of learning, in proportion to the quickstart's, reached after so many steps of
warm-up. The engine gate measures and does not stop a run.

Of every step there is the mean |trainer - engine| of its tokens, by how many steps older their weights are. "first" is
of the first step that had older tokens, which nothing before it can be compared with: what ``FIRST_SIGHT`` must allow.
"step / history" is the largest that a step was in proportion to what the steps before it allow by themselves, without
any floor: above 1 a run that is well would have ended. "needs a floor" is the largest distance of such a step: what
``STALE_FLOOR`` must allow. "step / allowed" is the same with the floors. Exit status 1 where it is above 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

from benchmarks.asynchronous.staleness import QUICKSTART, SETTINGS, train, warm_up
from benchmarks.report import publish, table
from mega_rl.config import RunConfig, load_config
from mega_rl.stages.learn import engine_distance
from mega_rl.stages.learn.engine_distance import BY_STALENESS, FIRST_SIGHT, STALE_FLOOR, Histories

HEADER = [
    *("max_staleness", "learning rate", "warm-up", "steps", "reward", "first, nats", "median", "largest"),
    *("step / history", "needs a floor, nats", "step / allowed"),
]


class Case(NamedTuple):
    """What one run is of."""

    rate: float  # in proportion to the quickstart's
    warm_up: int  # steps
    staleness: int


def of_run(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The figures of one run from the metrics of its steps, in their order; the first one is of weight version 0."""
    histories = Histories(RunConfig().trainer.gates.engine_factor)
    distances, by_history, by_gate, first, floor = list[float](), [0.0], [0.0], None, 0.0
    for version, row in enumerate(rows):
        found = {
            int(name.removeprefix(BY_STALENESS)): value for name, value in row.items() if name.startswith(BY_STALENESS)
        }
        for age, distance in ((age, distance) for age, distance in found.items() if age):
            distances.append(distance)
            by_gate.append(distance / histories.allows(version, age))
            if first is None:
                first = distance
            else:
                with patch.object(engine_distance, "STALE_FLOOR", 0.0):
                    by_history.append(distance / histories.allows(version, age))
                floor = max(floor, distance * (by_history[-1] > 1))
        for age, distance in found.items():
            if age:
                histories.add(version, age, distance)
    return {
        "first": first,
        "median": median(distances),
        "largest": max(distances),
        "by_history": max(by_history),
        "floor": floor,
        "by_gate": max(by_gate),
    }


def measured(folder: Path, model: Path, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    rate, warm_up_steps, staleness = case
    least = load_config(list(QUICKSTART)).optimizer
    run = folder / f"rate{rate:g}_warm_up{warm_up_steps}_staleness{staleness}_seed{options.seed}"
    settings = (
        *SETTINGS,
        "aqn.enabled=false",
        "trainer.gates.disabled=[engine]",
        "checkpoint.export_hf=false",
        f"model.path={model}",
        f"data.train_files=[{folder}/data/train.jsonl]",
        "rollout.mode=pinned",
        f"rollout.max_staleness={staleness}",
        f"optimizer.lr={rate * least.lr}",
        f"optimizer.min_lr={rate * least.min_lr}",
        f"optimizer.warmup_steps={warm_up_steps}",
        f"trainer.output_dir={run}",
        f"trainer.seed={options.seed}",
        f"data.seed={options.seed}",
    )
    train(run.with_suffix(".log"), 1, QUICKSTART, *settings, *options.changes)
    rows = [json.loads(line)["metrics"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [row["reward/mean"] for row in rows[-5:]]
    found = {
        "of_quickstart": rate,
        "staleness": staleness,
        "rate": rate * least.lr,
        "warm_up": warm_up_steps,
        "steps": len(rows),
        "reward": sum(last) / len(last),
    }
    return found | of_run(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("changes", nargs="*", metavar="key=value", help="for all runs")
    parser.add_argument("--dir", type=Path, required=True, help="of all runs")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.1, 1.0, 10.0])
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--warm-up", type=int, nargs="+", default=[0, 20])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="default: DIR/gate_floors.json")
    options = parser.parse_intermixed_args()
    folder = options.dir.resolve()
    file: Path = options.json or folder / "gate_floors.json"
    rows = json.loads(file.read_text())["runs"] if file.exists() else []
    model = warm_up(folder)
    for case in map(Case._make, product(options.rates, options.warm_up, options.staleness)):
        if any(Case(row["of_quickstart"], row["warm_up"], row["staleness"]) == case for row in rows):
            continue
        rows.append(measured(folder, model, case, options))
        cells = [[value for name, value in row.items() if name != "of_quickstart"] for row in rows]
        title = f"Tokens of older weights; floors {STALE_FLOOR:g} and {FIRST_SIGHT:g} nats"
        publish(title, table(HEADER, cells), "cpu", {"runs": rows}, file)
    return 1 if any(row["by_gate"] > 1 for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
