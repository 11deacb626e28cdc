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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SCRIPT = "tests/distributed/run_fleet.py"
STEPS = 4
SETTINGS = (
    "data.val_files=[]",
    "validation={test_freq: -1, val_before_train: false}",
    "rollout={placement: separate, n: 2, tensor_parallel_size: 1}",
    "algorithm={dynamic_sampling: {enabled: true, budget: 3}, minibatches_per_step: 2}",
    "aqn.enabled=false",
    "bridge.verify=off",
    "parallel={tensor: 1, sequence: false}",
    "trainer={total_steps: 4, gates: {disabled: [engine]}}",
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
    assert list(learnt(one)) == [1, 2, 3, 4] and learnt(four) == learnt(one)
    assert sampled(four) == sampled(one) and any(row["outcome"] == "dropped" for row in sampled(one))
    assert [row["rollout/staleness_max"] for row in learnt(one).values()] == [0, 1, 1, 1]
    assert [row["rollout/staleness_mean"] for row in learnt(one).values()] == [0, 1, 1, 1]
    assert steps_saved(one) == steps_saved(four) == [1, 2, 3, 4]


def test_a_killed_run_goes_on_exactly(tiny_world: TinyWorld, tmp_path: Path) -> None:
    """With two steps in the air, on two data-parallel ranks, with other engines before and after."""
    pinned = ("rollout.mode=pinned", "rollout.max_staleness=2", "checkpoint.async_save=true")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(tiny_world, whole, *pinned, nproc=2).check()
    assert train(tiny_world, cut, *pinned, engines=2, seed=3, deaths=30, crash=2, nproc=2).returncode != 0
    saved = steps_saved(cut)
    assert saved and max(saved) < 3
    again = train(tiny_world, cut, *pinned, engines=4, seed=4, deaths=30, nproc=2).check()
    assert f"resuming after step {max(saved)}" in again.stdout
    assert learnt(cut) == learnt(whole) and sampled(cut) == sampled(whole)
    assert [row["rollout/staleness_max"] for row in learnt(whole).values()] == [0, 1, 2, 2]
    progress = json.loads((cut / "checkpoints" / "step_00000002" / "progress.json").read_text())
    state = progress["data"]["fleet"]
    assert state["trained"] == 2 and sorted(state["steps"]) == ["2", "3"]  # sampled by weights that it has not


def test_without_staleness_it_is_the_synchronous_run(tiny_world: TinyWorld, tmp_path: Path) -> None:
    plain = "algorithm.dynamic_sampling.enabled=false"  # replacements come of another order
    train(tiny_world, tmp_path / "synchronous", plain, "rollout.mode=synchronous").check()
    train(tiny_world, tmp_path / "pinned", plain, "rollout.mode=pinned", engines=3, seed=1, deaths=30).check()
    synchronous, pinned = learnt(tmp_path / "synchronous"), learnt(tmp_path / "pinned")
    carried = {"rollout/groups_carried_in", "rollout/groups_carried_out"}
    assert pinned == {step: {k: v for k, v in row.items() if k not in carried} for step, row in synchronous.items()}


def test_a_run_in_flight_keeps_the_bound_and_is_replayed(tiny_world: TinyWorld, tmp_path: Path) -> None:
    mode = ("rollout.mode=in_flight", "rollout.max_staleness=2")
    first, cut = tmp_path / "first", tmp_path / "cut"
    assert died(train(tiny_world, first, *mode, engines=2, seed=5, deaths=30)) > 3
    rows = sampled(first)
    assert any(len(row["spans"]) > 1 for row in rows if "spans" in row)
    for row in rows:
        versions = [span["version"] for span in row["spans"]] if "spans" in row else [row["weight_version"]]
        assert row["sampled_for"] == row["step"] and row["step"] - 3 <= min(versions) <= max(versions) < row["step"]
    metrics = learnt(first)
    shares = [sum(v for k, v in row.items() if "/tokens_of_staleness/" in k) for row in metrics.values()]
    assert shares == pytest.approx([1.0] * STEPS)
    assert all(0 < row["rollout/ess"] <= 1 for row in metrics.values())
    replayed = train(tiny_world, tmp_path / "again", *mode, f"rollout.replay={first / 'rollouts'}", engines=3)
    replayed.check()
    assert learnt(tmp_path / "again") == metrics
    # its partial responses are gone on with
    assert train(tiny_world, cut, *mode, engines=2, seed=6, crash=2).returncode != 0
    train(tiny_world, cut, *mode, engines=1, seed=7).check()
    assert list(learnt(cut)) == [1, 2, 3, 4]
