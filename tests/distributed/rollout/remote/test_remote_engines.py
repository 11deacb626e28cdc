"""Rollout engines in processes of their own: weights shard to shard, and a whole run with them."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from tests.launching.launch import REPO, once, torchrun
from tests.launching.training import TinyWorld, metrics_of, train

pytest.importorskip("ray", reason="engines in other processes need Ray: install mega_rl[separate]")
pytestmark = pytest.mark.slow

SCRIPT = REPO / "tests" / "distributed" / "rollout" / "remote" / "run_remote_engines.py"
CHECKS = (
    "temperature_is_probed",
    "every_parameter_is_the_trainers",
    "nobody_else_can_connect",
    "bytes_are_the_minimum",
    "output_follows_the_weights",
    "kept_prefixes_are_wrong",
    "responses_come_as_they_end",
    "dropped_work_leaves_no_trace",
    "flipped_bit_is_found",
    "stopped_engine_is_known",
    "dead_engine_is_named",
)


@once
def verdicts(path: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for line in torchrun(SCRIPT, path, nproc=2).check().stdout.splitlines():
        if line.startswith("CHECK "):
            _, name, _, verdict = line.split(" ", 3)
            found[name].append(verdict)
    return found


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("remote") / "model"


@pytest.mark.parametrize("name", CHECKS)
def test_engines_elsewhere(name: str, model_path: Path) -> None:
    assert verdicts(model_path)[name] == ["ok", "ok"]


def test_whole_run(tiny_world: TinyWorld, tmp_path: Path) -> None:
    """Two trainer ranks and one engine of two processes: noise, proof of every sync, validation; nothing is left."""
    overrides = (
        "rollout.placement=separate",
        "trainer.total_steps=4",
        "checkpoint.save_freq=-1",
        "checkpoint.export_hf=false",
        "aqn.num_stages=2",
    )
    launched = train(tiny_world.rl, tmp_path / "run", *overrides).check()
    assert "error" not in launched.stdout.lower()
    metrics = metrics_of(tmp_path / "run")
    assert list(metrics) == [0, 1, 2, 3, 4]
    for step in (1, 2, 3, 4):
        row = metrics[step]
        assert (row["aqn/sigma"] > 0) == (step > 2)  # the second step samples from weights that the first has changed
        assert row["rollout/logprob_diff_mean"] < (1e-5 if step <= 2 else 1.0)
        assert row["bridge/bytes_local"] == 0 < row["bridge/bytes_sent"]
    assert all("val-core/arithmetic/greedy/acc" in metrics[step] for step in (0, 3, 4))
