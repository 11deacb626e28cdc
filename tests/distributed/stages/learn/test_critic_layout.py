"""A critic with a layout of its own is the critic at the policy's layout."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.launching.launch import REPO, ranks
from tests.models.layouts import Case

SCRIPT = REPO / "tests" / "distributed" / "stages" / "learn" / "run_critic_layout.py"
DATA, TENSOR = Case(2), Case(2, tensor=2, sequence=True)
STAGES, CONTEXT = Case(2, pipeline=2), Case(2, context=2)
PAIRS = ((DATA, TENSOR), (TENSOR, DATA), (STAGES, CONTEXT), (DATA, STAGES))  # of the policy, of the critic


@pytest.mark.slow
def test_values_weights_and_checkpoints(tmp_path: Path) -> None:
    """Values, advantages, metrics and updated weights to 1e-5; a checkpoint at either layout bit for bit."""
    cases = json.dumps([[asdict(case) for case in pair] for pair in PAIRS])
    lines = ranks(SCRIPT, "--cases", cases, "--dir", tmp_path, nproc=2).check().stdout.splitlines()
    expected = [f"PASSED {policy.name} {critic.name}" for policy, critic in PAIRS]
    assert [line for line in lines if line.startswith("PASSED")] == expected
