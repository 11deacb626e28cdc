"""The ranks of a machine share one pool of reward workers."""

from __future__ import annotations

from pathlib import Path

from tests.launching.launch import ranks


def test_ranks_of_a_machine_share_the_workers_of_the_first(tmp_path: Path) -> None:
    result = ranks("tests/distributed/rewards/run_reward_node.py", tmp_path, nproc=3).check()
    assert {f"rank {rank} knows" for rank in (1, 2)} <= set(result.stdout.splitlines())
