"""Every guard against a silent wrong result is needed: a step equals transformers with it and is off without."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.launching.launch import REPO, once, ranks
from tests.models.layouts import GUARDS

SCRIPT = REPO / "tests" / "distributed" / "megatron" / "run_engine_guards.py"
LIMIT = 1e-5  # of every figure with all guards
WRONG = {  # guard -> the figures that show that it is gone
    "token_count": {"gradients", "norm"},
    "positions": {"gradients", "loss"},
    "gathered_weights": {"weights"},
    "experts": {"gradients"},
    "single_messages": {"gradients", "loss"},
}


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], list[str]]:
    @once
    def launch() -> list[str]:
        launched = ranks(SCRIPT, "--dir", tmp_path_factory.mktemp("models"), nproc=2).check()
        return launched.stdout.splitlines()

    return launch


@pytest.mark.slow
@pytest.mark.parametrize("guard", GUARDS)
def test_a_step_is_right_with_the_guard_and_wrong_without(lines: Callable[[], list[str]], guard: str) -> None:
    reports: list[dict[str, Any]] = [json.loads(x.removeprefix("GUARD ")) for x in lines() if x.startswith("GUARD ")]
    with_guard, without = (
        next(r["errors"] for r in reports if r["guard"] == guard and r["is_there"] is is_there)
        for is_there in (True, False)
    )
    assert {name: error for name, error in with_guard.items() if error[0] > LIMIT} == {}
    assert {name for name in WRONG[guard] if without[name][0] > 100 * LIMIT} == WRONG[guard], without


@pytest.mark.slow
def test_outputs_are_kept_while_they_are_sent(lines: Callable[[], list[str]]) -> None:
    """Only the setting: see ``keeps_outputs``."""
    assert [x for x in lines() if x.startswith("KEEPS ")] == ["KEEPS true"]
