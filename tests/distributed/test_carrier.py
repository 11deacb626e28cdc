"""Engines that are killed and stopped while they have work: nothing is lost, and no token changes."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

import pytest

from tests.launch import REPO, once, run

pytest.importorskip("ray", reason="engines in other processes need Ray: install mega_rl[separate]")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = REPO / "tests" / "distributed" / "run_carrier.py"
CHECKS = (
    "everything_is_answered",
    "deaths_change_no_token",
    "both_were_replaced",
    "served_only_after_proof",
    "versions_crossed_nodes",
)


@once
def verdicts(path: Path) -> dict[str, str]:
    closed = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # to everybody else
    patient = {"RAY_raylet_start_wait_time_s": "300", "RAY_worker_niceness": "0"}
    lines = (
        run([sys.executable, str(SCRIPT), str(path)], timeout=500, env={**closed, **patient})
        .check()
        .stdout.splitlines()
    )
    found = (line.split(" ", 3) for line in lines if line.startswith("CHECK "))
    return {name: verdict for _, name, _, verdict in found}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("carrier") / "model"


@pytest.mark.parametrize("name", CHECKS)
def test_engines_die(name: str, model_path: Path) -> None:
    assert verdicts(model_path)[name] == "ok"
