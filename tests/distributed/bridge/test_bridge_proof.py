"""Syncs between real processes: what the proof must refuse is injected, and it names tensor and rank."""

from __future__ import annotations

from tests.distributed.bridge.run_bridge_proof import CHECKS
from tests.launching.launch import REPO, ranks

SCRIPT = REPO / "tests" / "distributed" / "bridge" / "run_bridge_proof.py"


def test_every_injected_fault_stops_the_run() -> None:
    launched = ranks(SCRIPT, nproc=4).check()
    passed = [line for line in launched.stdout.splitlines() if line.startswith("CHECK ")]
    assert passed == [f"CHECK {check.__name__} ok" for check in CHECKS]
