"""An engine that goes wrong in the middle of a run, or in a resumed one, is found before a token is learnt."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launching.launch import ENGINE, ranks
from tests.launching.training import TinyWorld, metrics_of

pytestmark = pytest.mark.slow
SCRIPT = "tests/distributed/stages/weights/run_broken_engine.py"


def test_other_weights_after_five_steps_and_raw_log_probabilities_after_a_resume(
    tiny_world: TinyWorld, tmp_path: Path
) -> None:
    overrides = (
        "bridge.verify=off",
        "aqn.enabled=false",
        "validation.val_before_train=false",
        "validation.test_freq=-1",
        "checkpoint.save_freq=4",
        f"trainer.output_dir={tmp_path / 'run'}",
    )
    launched = ranks(SCRIPT, "weights", 5, "--config", tiny_world.rl, *overrides, modules=ENGINE)
    assert launched.returncode != 0 and "GateFailure: step 6 is not what it must be" in launched.stdout
    assert re.search(
        r"  engine: mean \|trainer - engine\| per token is \S+, and trainer\.gates\.engine allows 0\.0001\n",
        launched.stdout,
    )
    assert re.search(r"worst token: prompt \d+, sample \d+, response token \d+ \(id \d+\): trainer", launched.stdout)
    assert list(metrics_of(tmp_path / "run")) == [1, 2, 3, 4, 5]

    hot = (*overrides, "rollout.temperature=0.7")
    launched = ranks(SCRIPT, "raw", 0, "--config", tiny_world.rl, *hot, modules=ENGINE)
    assert launched.returncode != 0 and "resuming after step 4" in launched.stdout
    assert "own loader" not in launched.stdout, "the engine's load is compared with model.path, not with the checkpoint"
    (sentence,) = set(re.findall(r"InputError: (rollout engine 0 returns .*)", launched.stdout))
    assert "they show 1), so rollout.temperature=0.7 would give wrong importance weights" in sentence
    assert list(metrics_of(tmp_path / "run")) == [1, 2, 3, 4], "nothing was learnt"
