"""Two ranks that take themselves for two nodes: the first uses the reward workers of both, until the other dies."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import torch.distributed as dist

from mega_rl.config.schema.sampling import RewardConfig, RewardWorkersConfig
from mega_rl.errors import InputError
from mega_rl.parallel.collectives import gather_objects
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.rewards.pool import node
from mega_rl.rewards.scorer import Scorer
from mega_rl.rollout.collect.handed_trajectories import handed
from mega_rl.rollout.collect.trajectory_store import TrajectoryStore
from mega_rl.stages.score.scoring import scorer_of_node, share_nodes
from mega_rl.types import Outcome, Trajectory, UnknownReward
from tests.distributed.rewards.run_reward_node import trajectory

OWNED = 5  # trajectories of each rank
REWARD = """
import os, time

def length(data_source, solution_str, ground_truth, extra_info):
    while solution_str.startswith("wait") and not os.path.exists(solution_str[5:]): time.sleep(0.01)
    if solution_str == "raise": raise ValueError("no")
    if solution_str == "die": os._exit(1)
    return len(solution_str) / 3

def elsewhere(data_source, solution_str, ground_truth, extra_info):
    return float(data_source == "elsewhere")

def worker(data_source, solution_str, ground_truth, extra_info):
    return float(os.getpid())
"""


def scores_come_of_both(scorer: Scorer, workers: list[set[int]]) -> None:
    """The same as of one node, and about as many of each."""
    started = [scorer.start(trajectory("x" * i, i)) for i in range(100)]
    scores = [future.result(timeout=60) for future in started]
    assert [score.parts["length"] for score in scores] == [i / 3 for i in range(100)]
    by_node = [sum(score.parts["worker"] in of_node for score in scores) for of_node in workers]
    assert sum(by_node) == 100 and min(by_node) >= 10, by_node
    assert {name for score in scores for name in score.parts} == {"length", "worker"}
    of_others = [scorer.start(of_source(trajectory("x", i), "elsewhere")) for i in range(20)]
    assert {future.result(timeout=60).parts["elsewhere"] for future in of_others} == {1.0}
    raised = [scorer.start(trajectory("raise")) for _ in range(4)]
    (unknown,) = {str(future.result(timeout=60).unknown) for future in raised}
    assert "raised ValueError: no" in unknown


def what_a_rank_owns_is_scored_on_its_node(scorer: Scorer, workers: list[set[int]]) -> None:
    """And the rank that asks has not even its text; an environment's failure needs no worker."""
    for rank, of_node in enumerate(workers):
        for number in range(OWNED):
            told = handed(owned(rank, number), rank, number)
            score = scorer.start(told).result(timeout=60)
            assert score.parts.keys() == {"length", "worker"}
            assert score.parts["length"] == len(owned(rank, number).text) / 3
            assert score.parts["worker"] in of_node
    failed = Outcome("failed", 1, None, UnknownReward("raised", "said no"), {})
    (unknown,) = (
        scorer.start(replace(handed(owned(1, 0), 1, 10**6), episode=failed)).result(timeout=60).unknown.values()
    )
    assert unknown == failed.failure


def of_source(found: Trajectory, source: str) -> Trajectory:
    return replace(found, prompt=replace(found.prompt, data_source=source))


def owned(rank: int, number: int) -> Trajectory:
    return trajectory("x" * (10 * rank + number), number)


def what_ends_them_is_told(scorer: Scorer, folder: Path) -> None:
    """The other node's workers die, and cannot load the reward again."""
    waiting = scorer.start(trajectory(f"wait {folder}/go"))  # on this node, so the next one is the other's
    (folder / "mine.py").rename(folder / "gone.py")
    (unknown,) = scorer.start(trajectory("die")).result(timeout=60).unknown.values()
    assert unknown.cause == "exited"
    try:
        while True:  # until it is noticed
            scorer.start(trajectory("x")).result(timeout=60)
    except InputError as error:
        print(f"said: {error}", flush=True)
    (folder / "gone.py").rename(folder / "mine.py")
    (folder / "go").touch()
    assert waiting.result(timeout=60).is_known


def a_dead_rank_is_told_of(scorer: Scorer, folder: Path) -> None:
    first, hanging = (scorer.start(trajectory(f"wait {folder}/{name}")) for name in ("first", "never"))
    dist.barrier()  # the other ends
    try:
        raise AssertionError(hanging.result(timeout=60))
    except InputError as error:
        print(f"said: {error}", flush=True)
    (folder / "first").touch()
    assert first.result(timeout=60).is_known


def opened(folder: Path) -> tuple[Scorer, list[set[int]]]:
    """A scorer, and the workers of both nodes."""
    before = {child.pid for child in psutil.Process().children()}
    rewards = [RewardConfig(f"{folder}/mine.py:{name}") for name in ("length", "elsewhere", "worker")]
    rewards[1].only = ["elsewhere"]
    scorer = scorer_of_node(rewards, RewardWorkersConfig(num_workers=2, timeout_s=600.0))
    workers = gather_objects({child.pid for child in psutil.Process().children()} - before)
    assert list(map(len, workers)) == [2, 2], workers
    store = TrajectoryStore(ParallelLayout.create(2), rank := dist.get_rank())
    for number in range(OWNED):
        store.add(owned(rank, number))
    share_nodes(scorer, store)
    return scorer, workers


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        (folder / "mine.py").write_text(REWARD)
    dist.barrier()
    node.machine = lambda: f"node {rank}"
    scorer, workers = opened(folder)
    if rank == 0:
        scores_come_of_both(scorer, workers)
        what_a_rank_owns_is_scored_on_its_node(scorer, workers)
        what_ends_them_is_told(scorer, folder)
        scorer.close()
    dist.barrier()
    scorer, _ = opened(folder)
    if rank == 0:
        a_dead_rank_is_told_of(scorer, folder)
    else:
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
