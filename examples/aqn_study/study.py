"""Four arms x seeds of the quickstart's GRPO: trains what is missing, then writes table.md and curves.png."""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
ARMS = {
    name: [f"aqn.enabled={aqn}", f"rollout.simulated_quantization={four_bits}"]
    for name, aqn, four_bits in (
        ("off", "false", "null"),
        ("AQN", "true", "null"),
        ("4-bit", "false", "nvfp4"),
        ("4-bit+AQN", "true", "nvfp4"),
    )
}
ACCURACY = "val-core/arithmetic/acc/mean@1"
LAST, MEAN = (lambda series: series[-1]), statistics.mean  # over the steps of a run
COLUMNS = {"accuracy, end": (ACCURACY, LAST), "accuracy, mean of curve": (ACCURACY, MEAN)} | {
    f"{metric}, mean": (metric, MEAN) for metric in ("reward/mean", "rollout/entropy", "rollout/kl")
}


def run(base: Path, out: Path, arm: str, seed: int) -> dict[str, dict[int, float]]:
    """Metric -> step -> value of one run, trained first where it is not there."""
    run_dir = out / f"{arm}_{seed}"
    if not (run_dir / "huggingface").exists():
        keys = [f"model.path={base}/sft/huggingface", f"data.train_files=[{base}/data/train.jsonl]", *ARMS[arm]]
        keys += [f"data.val_files=[{base}/data/val.jsonl]", f"trainer.output_dir={run_dir}", "checkpoint.save_freq=-1"]
        keys += [f"{key}={seed}" for key in ("trainer.seed", "data.seed", "aqn.seed")]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        files = ["--config", "configs/quickstart/base.yaml", "--config", "configs/quickstart/grpo.yaml"]
        subprocess.run([*torchrun, "tools/train.py", *files, *keys], check=True)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    names = {metric for metric, _ in COLUMNS.values()}
    return {n: {row["step"]: row["metrics"][n] for row in rows if n in row["metrics"]} for n in names}


def cell(numbers: list[float]) -> tuple[float, float]:
    """Mean over seeds and its standard error."""
    return statistics.mean(numbers), statistics.stdev(numbers) / len(numbers) ** 0.5


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--base", type=Path, default=Path("runs/quickstart"), help="what `make quickstart` left")
parser.add_argument("--out", type=Path, default=Path("runs/aqn_study"))
parser.add_argument("--seeds", type=int, default=3)
given = parser.parse_args()
runs = {arm: [run(given.base, given.out, arm, seed) for seed in range(given.seeds)] for arm in ARMS}
lines = [["arm", *COLUMNS], ["---"] * (1 + len(COLUMNS))] + [[arm] for arm in ARMS] + [[f"{a} - off"] for a in ARMS]
for metric, reduce in COLUMNS.values():
    figures = {arm: [reduce(list(series[metric].values())) for series in seeds] for arm, seeds in runs.items()}
    for i, arm in enumerate(ARMS):
        lines[2 + i].append("{:.4f} ± {:.4f}".format(*cell(figures[arm])))
        mean, error = cell([a - b for a, b in zip(figures[arm], figures["off"], strict=True)])  # paired by seed
        lines[2 + len(ARMS) + i].append(
            ("**{:+.4f} ± {:.4f}**" if abs(mean) > 2 * error else "{:+.4f} ± {:.4f}").format(mean, error)
        )
del lines[2 + len(ARMS)]  # off - off
(HERE / "table.md").write_text("".join(f"| {' | '.join(line)} |\n" for line in lines))
figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
for axis, metric in zip(axes, (ACCURACY, "rollout/entropy"), strict=True):
    for arm, seeds in runs.items():
        cells = {step: cell([series[metric][step] for series in seeds]) for step in seeds[0][metric]}
        axis.errorbar(list(cells), *zip(*cells.values(), strict=True), label=arm, capsize=2, linewidth=1)
    axis.set(xlabel="step", title=metric)
axes[0].legend(title=f"mean ± standard error, {given.seeds} seeds")
figure.savefig(HERE / "curves.png", dpi=110)
