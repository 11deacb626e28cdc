"""A critic of adapters on the policy's frozen weights is the critic that has a copy of these weights for itself."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.launching.launch import REPO, ranks
from tests.models.layouts import Case

SCRIPT = REPO / "tests" / "distributed" / "stages" / "learn" / "run_shared_critic.py"
CASES = (
    Case(2, tensor=2, sequence=True, families=("qwen2",)),  # tied embeddings: the policy's head is the critic's input
    Case(2, pipeline=2, virtual_pipeline=2, families=("qwen2",)),
    Case(2, expert=2, overlap=True, families=("qwen3_moe",)),
)


@pytest.mark.slow
def test_values_checkpoint_and_memory(tmp_path: Path) -> None:
    """Values bit for bit after steps of both, the weights once in memory, the same steps after a resume."""
    cases = json.dumps([asdict(case) for case in CASES])
    lines = ranks(SCRIPT, "--cases", cases, "--dir", tmp_path, nproc=2).check().stdout.splitlines()
    expected = [f"PASSED {case.name} {family}" for case in CASES for family in case.families]
    assert [line for line in lines if line.startswith("PASSED")] == expected
    refused = [line for line in lines if line.startswith("REFUSED")]
    assert len(refused) == 2 * len(expected)
    assert all("critic.shares_base=true, and this run has false" in line for line in refused)
