"""``platform.layers: transformer_engine``, pretended: fused norms are found wherever norms are."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.launching.launch import REPO, ranks
from tests.models import tiny_models
from tests.models.layouts import Case

SCRIPT = REPO / "tests" / "distributed" / "megatron" / "layers" / "run_fused_norms.py"
CASE = Case(2, tensor=2, sequence=True, families=("qwen2", "qwen3", "qwen3_moe"))


@pytest.mark.slow
def test_a_trainer_with_fused_norms_is_the_one_with_norms_apart(tmp_path: Path) -> None:
    """Parameters, checkpoint, steps, master weights and what is frozen, with layers that stand in for the real ones."""
    for family in CASE.families:
        tiny_models.make(family, 2).save_pretrained(tmp_path / family)
    launched = ranks(SCRIPT, "--dir", tmp_path, "--case", json.dumps(asdict(CASE)), nproc=2).check()
    lines = launched.stdout.splitlines()
    assert [line for line in lines if line.startswith("PASSED")] == [f"PASSED {family}" for family in CASE.families]
    (refused,) = (line for line in lines if line.startswith("REFUSED"))
    assert "platform.layers is 'transformer_engine'" in refused and "or set the key to local" in refused
