"""Whether GRPO learns as much from older weights: the quickstart with staleness 0, 1, 2 and 4, by seed.

    python -m benchmarks.asynchronous.staleness --dir DIR [--staleness 0 1 2 4] [--seeds 0 1 2] [--json F]
        [--plot F] [key=value ...]

The tiny model, its data and its supervised warm-up are the quickstart's, made once. Every run is the quickstart's GRPO
with one engine in a process of its own: 0 is ``rollout.mode: synchronous``, all others are ``pinned``. The trainer is
one process instead of two, and there is no validation on the way, which pinned runs have not. The weights at the end
answer the held-out sums, as ``tools/eval.py`` asks them: once greedy, and eight times sampled. Runs follow one another;
each is in the JSON file as soon as it is measured, and is not run again by the same command.

The target: right answers held out, sampled, at least 0.97 in every run and within 0.01 of the synchronous run's of the
same seed. Exit status 1 if a run is not so.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import publish, table

ROOT = Path(__file__).resolve().parents[2]
LEAST, DISTANCE = 0.97, 0.01  # right answers held out: at least, and from the synchronous run's
SAMPLES = 8
SMOOTH = 5  # steps of a moving mean, in the picture
SETTINGS = (
    "parallel={tensor: 1, sequence: false}",
    "rollout.tensor_parallel_size=1",
    "rollout.placement=separate",
    "data.val_files=[]",
    "validation={test_freq: -1, val_before_train: false}",
    "checkpoint.save_freq=1000",
    "logging={tensorboard: false, progress: false, num_text_samples: 0}",
)

WARM_UP = ("configs/quickstart_stages/sft.yaml",)
QUICKSTART = ("configs/quickstart/base.yaml", "configs/quickstart/grpo.yaml")


def named(files: Sequence[str]) -> list[str]:
    return [word for file in files for word in ("--config", file)]


def call(log: Path, *command: str) -> None:
    """Run a program of the repository; what it says is in the log.

    Raises:
        SystemExit: it failed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    environment.setdefault("OMP_NUM_THREADS", "1")
    with log.open("w") as file:
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed with {done.returncode}; what it said is in {log}")


def train(log: Path, processes: int, files: Sequence[str], *settings: str) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes))
    call(log, *launcher, "tools/train.py", *named(files), *settings)


def warm_up(folder: Path) -> Path:
    """The model that reinforcement learning begins with, as the quickstart makes it."""
    model = folder / "sft" / "huggingface"
    if not model.exists():
        made = ("--tokenizer", "arithmetic", "--seed", "0", "--out", f"{folder}/model")
        call(folder / "model.log", "tools/make_tiny_model.py", "--family", "qwen2", *made)
        call(folder / "data.log", "tools/prepare_data.py", "arithmetic", "--seed", "0", "--out", f"{folder}/data")
        files = (f"model.path={folder}/model", f"data.train_files=[{folder}/data/sft.jsonl]")
        seeds = ("trainer.seed=0", "data.seed=0")
        train(folder / "sft.log", 2, WARM_UP, *files, f"trainer.output_dir={folder}/sft", *seeds)
    return model


def measured(folder: Path, model: Path, staleness: int, seed: int, changes: Sequence[str]) -> dict[str, Any]:
    """One run from the warm-up's weights, and its held-out answers."""
    run, load = folder / f"staleness{staleness}_seed{seed}", os.getloadavg()[0]
    mode = "pinned" if staleness else "synchronous"
    settings = (
        *SETTINGS,
        f"model.path={model}",
        f"data.train_files=[{folder}/data/train.jsonl]",
        f"rollout.mode={mode}",
        f"rollout.max_staleness={staleness}",
        f"trainer.output_dir={run}",
        f"trainer.seed={seed}",
        f"data.seed={seed}",
    )
    if not (run / "huggingface").exists():
        train(run.with_suffix(".log"), 1, QUICKSTART, *settings, *changes)
    asked = (*named(QUICKSTART), "--data", f"{folder}/data/val.jsonl", "--samples", str(SAMPLES))
    call(run.with_suffix(".eval.log"), "tools/eval.py", f"{run}/huggingface", *asked, "--out", f"{run}/eval")
    (source,) = json.loads((run / "eval" / "summary.json").read_text())["sources"].values()
    rows = [json.loads(line)["metrics"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "staleness": staleness,
        "seed": seed,
        "sampled": source["metrics"]["pass@1"]["value"],
        "greedy": source["metrics"]["greedy"]["value"],
        "num_problems": source["num_problems"],
        "mean_staleness": rows[-1].get("rollout/staleness_mean", 0.0),
        "least_ess": min((row["rollout/ess"] for row in rows if "rollout/ess" in row), default=None),
        "largest_kl": max((row["rollout/kl"] for row in rows if "rollout/kl" in row), default=None),
        "rewards": [row["reward/mean"] for row in rows],
        "load_at_start": load,
    }


def verdict(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """What is not as it should be, in words; "" if all is."""
    synchronous = [other["sampled"] for other in rows if other["seed"] == row["seed"] and not other["staleness"]]
    wrong = [f"below {LEAST}"] * (row["sampled"] < LEAST)
    wrong += [f"more than {DISTANCE} from {of:.4f}" for of in synchronous if abs(row["sampled"] - of) > DISTANCE]
    return ", ".join(wrong)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """The reward of every step as a moving mean: the mean of the seeds as a line, from least to most as a band."""
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for staleness in sorted({row["staleness"] for row in rows}):
        curves = [row["rewards"] for row in rows if row["staleness"] == staleness]
        smooth = [
            [sum(curve[max(0, i - SMOOTH + 1) : i + 1]) / min(SMOOTH, i + 1) for i in range(len(curve))]
            for curve in curves
        ]
        columns = list(zip(*smooth, strict=True))
        steps = range(1, len(columns) + 1)
        (line,) = axes.plot(steps, [sum(c) / len(c) for c in columns], label=f"max_staleness {staleness}")
        axes.fill_between(steps, list(map(min, columns)), list(map(max, columns)), color=line.get_color(), alpha=0.15)
    axes.set(xlabel="step", ylabel="reward of the training prompts", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "changes", nargs="*", metavar="key=value", help="for the runs of GRPO, such as optimizer.lr=1e-4"
    )
    parser.add_argument("--dir", type=Path, required=True, help="of all runs")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path, help="default: DIR/staleness.json")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the rewards (needs matplotlib)")
    options = parser.parse_intermixed_args()
    folder = options.dir.resolve()
    file: Path = options.json or folder / "staleness.json"
    rows = json.loads(file.read_text())["runs"] if file.exists() else []
    model = warm_up(folder)
    for seed in options.seeds:
        for staleness in options.staleness:
            if any((row["staleness"], row["seed"]) == (staleness, seed) for row in rows):
                continue
            rows.append(measured(folder, model, staleness, seed, options.changes))
            header = ["max_staleness", "seed", "held out, sampled", "greedy", "least ess", "largest KL", "verdict"]
            names = ("staleness", "seed", "sampled", "greedy", "least_ess", "largest_kl")
            cells = [[*(row[name] for name in names), verdict(row, rows) or "ok"] for row in rows]
            publish("Learning from older weights", table(header, cells), "cpu", {"runs": rows}, file)
    if options.plot is not None:
        draw(rows, options.plot)
    return 1 if any(verdict(row, rows) for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
