"""The first step of a run whose policy, reference and engine are not the same: it stops, and says where."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launching.launch import ENGINE, REPO, ranks
from tests.launching.training import TinyWorld, metrics_of

pytestmark = pytest.mark.slow
BROKEN = REPO / "tests" / "distributed" / "stages" / "learn" / "run_broken_first_step.py"


def test_every_gate_stops_the_run_and_names_what_is_wrong(tiny_world: TinyWorld, tmp_path: Path) -> None:
    output_dir = tmp_path / "run"
    overrides = ("bridge.verify=off", "validation.val_before_train=false", f"trainer.output_dir={output_dir}")
    launched = ranks(BROKEN, "--config", tiny_world.rl, *overrides, modules=ENGINE)
    assert launched.returncode != 0, launched.stdout
    text = launched.stdout
    assert "GateFailure: the first step is not what it must be" in text
    for name in ("reference", "ppo_kl", "ratio", "engine"):
        assert re.search(rf"  {name}: .* is \S+, and trainer\.gates\.{name} allows", text), (name, text)
    assert "another decoder.final_layernorm.weight" in text
    assert "bridge.verify=all, which names the first tensor" in text
    assert len(re.findall(r"worst token: prompt \d+, sample \d+, response token \d+ \(id \d+\)", text)) >= 3
    assert not (output_dir / "checkpoints").exists() or not list((output_dir / "checkpoints").glob("step_*"))
    assert metrics_of(output_dir) == {}
