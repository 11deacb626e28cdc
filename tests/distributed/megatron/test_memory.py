"""Recompute, offload, weight decay, skipped steps and two models at once, at two layouts of two ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.launching.launch import REPO, Launched, once, ranks

SCRIPT = REPO / "tests" / "distributed" / "megatron" / "run_memory.py"


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Launched]:
    @once
    def run() -> Launched:
        return ranks(SCRIPT, "--dir", tmp_path_factory.mktemp("model"), nproc=2)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2_sp_pp1_dp1", "tp1_pp1_dp2"])
@pytest.mark.parametrize("check", ["recompute", "offload", "reference", "decay", "skipped", "two_models"])
def test_memory(launch: Callable[[], Launched], layout: str, check: str) -> None:
    launched = launch()
    assert f"PASSED {layout} {check}\n" in launched.stdout, launched.stdout[-4000:]
