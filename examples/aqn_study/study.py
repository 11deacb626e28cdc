"""Four arms x seeds of the quickstart's GRPO: trains what is missing, then writes table.md and curves.png."""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
FOUR_BITS = "rollout.simulated_quantization=nvfp4"
ARMS = {
    "off": ["aqn.enabled=false"],
    "AQN": ["aqn.enabled=true"],
    "4-bit": ["aqn.enabled=false", FOUR_BITS],
    "4-bit + AQN": ["aqn.enabled=true", FOUR_BITS],
}
FIGURES = {  # column -> metric, of the last step or the mean over all steps
    "held-out accuracy, end": ("val-core/arithmetic/acc/mean@1", "last"),
    "training reward, mean": ("reward/mean", "mean"),
    "rollout entropy, mean": ("rollout/entropy", "mean"),
    "KL engine to trainer, mean": ("rollout/kl", "mean"),
}


def train(base: Path, out: Path, arm: str, seed: int) -> list[dict]:
    """The logged steps of one run, trained first where they are not there."""
    run = out / f"{arm.replace(' ', '')}_{seed}"
    if not (run / "huggingface").exists():
        keys = [f"model.path={base}/sft/huggingface", f"data.train_files=[{base}/data/train.jsonl]"]
        keys += [f"data.val_files=[{base}/data/val.jsonl]", f"trainer.output_dir={run}", "trainer.save_freq=-1"]
        keys += [f"{key}={seed}" for key in ("trainer.seed", "data.seed", "aqn.seed")]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [*torchrun, "tools/train.py", "--config", "configs/quickstart.yaml", *keys, *ARMS[arm]]
        subprocess.run(command, check=True, env={"OMP_NUM_THREADS": "1", **os.environ})
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def values(rows: list[dict], metric: str) -> dict[int, float]:
    return {row["step"]: row["metrics"][metric] for row in rows if metric in row["metrics"]}


def cell(numbers: list[float]) -> tuple[float, float]:
    """Mean and its standard error over seeds."""
    return statistics.mean(numbers), statistics.stdev(numbers) / len(numbers) ** 0.5


def table(runs: dict[str, list[list[dict]]]) -> str:
    """Means, and below them paired differences from "off"; bold where they clear two standard errors."""
    lines = [" | ".join(["arm", *FIGURES]), " | ".join(["---"] * (1 + len(FIGURES)))]
    figures = {}
    for arm, seeds in runs.items():
        for name, (metric, how) in FIGURES.items():
            series = [list(values(rows, metric).values()) for rows in seeds]
            figures[arm, name] = [s[-1] if how == "last" else statistics.mean(s) for s in series]
        lines.append(" | ".join([arm, *("{:.4f} ± {:.4f}".format(*cell(figures[arm, n])) for n in FIGURES)]))
    for arm in [arm for arm in runs if arm != "off"]:
        row = [f"{arm} − off"]
        for name in FIGURES:
            mean, error = cell([a - b for a, b in zip(figures[arm, name], figures["off", name], strict=True)])
            row.append(("**{:+.4f} ± {:.4f}**" if abs(mean) > 2 * error else "{:+.4f} ± {:.4f}").format(mean, error))
        lines.append(" | ".join(row))
    return "".join(f"| {line} |\n" for line in lines)


def plot(runs: dict[str, list[list[dict]]]) -> None:
    _, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, metric in zip(axes, ("val-core/arithmetic/acc/mean@1", "rollout/entropy"), strict=True):
        for arm, seeds in runs.items():
            steps = list(values(seeds[0], metric))
            cells = [cell([values(rows, metric)[step] for rows in seeds]) for step in steps]
            axis.errorbar(steps, [m for m, _ in cells], [e for _, e in cells], label=arm, capsize=2, linewidth=1)
        axis.set(xlabel="step", title=metric)
    axes[0].legend()
    plt.savefig(HERE / "curves.png", dpi=110)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--base", type=Path, default=Path("runs/quickstart"), help="of the quickstart: its data and sft")
parser.add_argument("--out", type=Path, default=Path("runs/aqn_study"))
parser.add_argument("--seeds", type=int, default=3)
given = parser.parse_args()
done = {arm: [train(given.base, given.out, arm, seed) for seed in range(given.seeds)] for arm in ARMS}
(HERE / "table.md").write_text(table(done))
plot(done)
