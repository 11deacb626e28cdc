"""The trainer's weights in the host memory of a node, where engines fetch them."""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.launching.launch import REPO, once, ranks

pytestmark = pytest.mark.slow

CHECKS = (
    "versions_arrive_1_2",
    "versions_arrive_1_1",
    "versions_arrive_2_2",
    "versions_arrive_2_1",
    "only_what_changes_is_written_2",
    "only_what_changes_is_written_1",
    "engines_add_adapters_2",
    "engines_add_adapters_1",
    "every_byte_is_written_once",
    "other_bytes_are_refused",
    "host_without_room_is_refused",
    "nodes_of_several_sizes",
)


@once
def verdicts() -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    script = REPO / "tests" / "distributed" / "rollout" / "remote" / "run_weight_store.py"
    for line in ranks(script, nproc=2, timeout=250).check().stdout.splitlines():
        if line.startswith("CHECK "):
            _, name, _, verdict = line.split(" ", 3)
            found[name].append(verdict)
    return found


@pytest.mark.parametrize("name", CHECKS)
def test_store(name: str) -> None:
    assert verdicts()[name] == ["ok", "ok"]
