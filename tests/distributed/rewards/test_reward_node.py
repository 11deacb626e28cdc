"""The ranks of a machine share one pool of reward workers, and rank 0 may use those of all nodes."""

from __future__ import annotations

from pathlib import Path

from tests.launching.launch import ranks


def test_ranks_of_a_machine_share_the_workers_of_the_first(tmp_path: Path) -> None:
    result = ranks("tests/distributed/rewards/run_reward_node.py", tmp_path, nproc=3).check()
    assert {f"rank {rank} knows" for rank in (1, 2)} <= set(result.stdout.splitlines())


def test_the_first_rank_uses_the_workers_of_all_nodes(tmp_path: Path) -> None:
    result = ranks("tests/distributed/rewards/run_reward_nodes.py", tmp_path, nproc=2).check()
    unloadable, ended = (line for line in result.stdout.splitlines() if line.startswith("said: "))
    said, path = unloadable.split("' names "), tmp_path / "mine.py"
    assert said == [f"said: rewards: '{path}:length", f"{path}, which is no file; correct the path"], "as on one node"
    assert ended == "said: rewards: rank 1, which has the reward workers of its node, ended; see what it said"
