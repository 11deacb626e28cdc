"""State of the optimizer on the host and moments in bfloat16: the same bits as on the device, saved and resumed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.launching.launch import REPO, Launched, once, ranks

pytestmark = pytest.mark.slow
SCRIPT = REPO / "tests" / "distributed" / "megatron" / "optim" / "run_frugal_adam.py"
CHECKS = [
    *[
        f"{name} {check}"
        for name in ("dp2", "dp2_float32", "tp2_overlap", "experts", "lora", "freeze")
        for check in ("host", "state")
    ],
    *[f"{name} checkpoints" for name in ("dp2", "experts", "lora")],
    "dp2 rounded_checkpoints",
]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Launched]:
    @once
    def run() -> Launched:
        return ranks(SCRIPT, "--dir", tmp_path_factory.mktemp("model"), nproc=2)

    return run


@pytest.mark.parametrize("check", CHECKS)
def test_frugal_adam(launch: Callable[[], Launched], check: str) -> None:
    launched = launch()
    assert f"PASSED {check}\n" in launched.stdout, launched.stdout[-4000:]
