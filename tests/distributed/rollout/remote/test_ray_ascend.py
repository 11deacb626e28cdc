"""Ray's resources, masks and device ids as on an Ascend host, with real actors and no device."""

from __future__ import annotations

import sys

import pytest

from tests.launching.launch import REPO, once, run

pytest.importorskip("ray", reason="engines in other processes need Ray: install mega_rl[separate]")
pytestmark = pytest.mark.slow

SCRIPT = REPO / "tests" / "distributed" / "rollout" / "remote" / "run_ray_ascend.py"
CHECKS = (
    "each_worker_finds_its_own_device",
    "too_few_devices_are_counted",
    "devices_in_use_are_waited_for_and_said",
    "a_cluster_of_gpus_is_named",
    "a_fleet_says_so_before_it_starts_anything",
)


@once
def verdicts() -> dict[str, str]:
    launched = run([sys.executable, str(SCRIPT)])
    lines = [line for line in launched.check().stdout.splitlines() if line.startswith("CHECK ")]
    return {line.split(" ", 3)[1]: line.split(" ", 3)[3] for line in lines}


@pytest.mark.parametrize("name", CHECKS)
def test_ray_on_ascend(name: str) -> None:
    assert verdicts()[name] == "ok"
