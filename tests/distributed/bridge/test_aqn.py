"""Noise and simulated quantisation over a real trainer and a real engine: one launch, read by every test."""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.launching.launch import ENGINE, REPO, once, ranks
from tests.models.layouts import AQN_CASES

SCRIPT = REPO / "tests" / "distributed" / "bridge" / "run_aqn.py"
NUM_RANKS = 4
CHECKS = [f"stream_{case.name}" for case in AQN_CASES] + [
    "cut_blocks_are_refused",
    "float32_is_refused",
    "behaviour_is_recomputed",
    "training_is_untouched",
    "read_back",
    "hundred_syncs",
]

pytestmark = pytest.mark.slow


@once
def verdicts() -> dict[str, list[str]]:
    """What every check said, on every rank."""
    launched = ranks(SCRIPT, nproc=NUM_RANKS, modules=ENGINE)
    found: dict[str, list[str]] = defaultdict(list)
    for line in launched.check().stdout.splitlines():
        if line.startswith("CHECK "):
            _, name, _, verdict = line.split(" ", 3)
            found[name].append(verdict)
    return found


@pytest.mark.parametrize("name", CHECKS)
def test_four_ranks(name: str) -> None:
    assert verdicts()[name] == ["ok"] * NUM_RANKS
