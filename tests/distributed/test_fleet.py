"""Runs of the real loop whose engines are pretended: whatever those do, a pinned run learns the same.

``tests/pretended_fleet.py`` makes tokens of the weights that sample them, so every difference goes on into all metrics.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.distributed.training import CLOCKS, TinyWorld, metrics_of, steps_saved
from tests.launch import Launched, ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SCRIPT = "tests/distributed/run_fleet.py"
STEPS = 5
SETTINGS = (
    "data.val_files=[]",
    "validation={test_freq: -1, val_before_train: false}",
    "rollout={placement: separate, n: 2, tensor_parallel_size: 1}",
    "algorithm={dynamic_sampling: {enabled: true, budget: 3}, minibatches_per_step: 2}",
    "aqn.enabled=false",
    "bridge.verify=off",
    "parallel={tensor: 1, sequence: false}",
    "trainer={total_steps: 5, gates: {disabled: [engine]}}",
    "checkpoint={export_hf: false, save_freq: 1, keep_checkpoints: 0}",
    "logging={tensorboard: false, dump_rollouts: -1, progress: false, num_text_samples: 0}",
)


def train(
    world: TinyWorld,
    run: Path,
    *settings: str,
    engines: int = 1,
    seed: int = 0,
    deaths: int = 0,
    crash: int = 0,
    nproc: int = 1,
) -> Launched:
    arguments = ("--config", world.rl, f"trainer.output_dir={run}", *SETTINGS, *settings)
    return ranks(SCRIPT, engines, seed, deaths, crash, *arguments, nproc=nproc)


def learnt(run: Path) -> dict[int, dict[str, float]]:
    """What depends on what was computed only, step by step."""
    rows = metrics_of(run)
    return {step: {k: v for k, v in row.items() if not k.startswith(CLOCKS)} for step, row in rows.items()}


def sampled(run: Path) -> list[dict[str, object]]:
    paths = sorted((run / "rollouts").glob("*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def died(launched: Launched) -> int:
    (found,) = re.findall(r"(\d+) died, closed: True", launched.check().stdout)
    return int(found)


def test_pinned_runs_do_not_depend_on_engines(tiny_world: TinyWorld, tmp_path: Path) -> None:
    pinned = ("rollout.mode=pinned", "rollout.max_staleness=1")
    one, four = tmp_path / "one", tmp_path / "four"
    assert died(train(tiny_world, one, *pinned)) == 0
    assert died(train(tiny_world, four, *pinned, engines=4, seed=7, deaths=30)) > 3
    assert list(learnt(one)) == [1, 2, 3, 4, 5] and learnt(four) == learnt(one)
    assert sampled(four) == sampled(one) and any(row["outcome"] == "dropped" for row in sampled(one))
    assert [row["rollout/staleness_max"] for row in learnt(one).values()] == [0, 1, 1, 1, 1]
    assert [row["rollout/staleness_mean"] for row in learnt(one).values()] == [0, 1, 1, 1, 1]
    assert steps_saved(one) == steps_saved(four) == [1, 2, 3, 4, 5]
