"""Three ranks of one machine share the reward workers of the first one, until that one dies."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import psutil
import torch.distributed as dist

from mega_rl.config.schema.sampling import RewardConfig, RewardWorkersConfig
from mega_rl.errors import InputError
from mega_rl.parallel.collectives import gather_objects
from mega_rl.rewards.sandbox.scratch import PREFIX
from mega_rl.stages.score.scoring import scorer_of_node
from mega_rl.types import Prompt, Trajectory

REWARD = """
import os, time

def length(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "hang": time.sleep(600)
    if solution_str == "raise": raise ValueError("no \\u00e9")
    return len(solution_str) / 3

def worker(data_source, solution_str, ground_truth, extra_info):
    return float(os.getpid())
"""


def trajectory(text: str, index: int = 0) -> Trajectory:
    return Trajectory.single_turn(Prompt(index, (1,), "?", "t", "src", {"a": (1, 2)}), 0, (1,), (0.0,), text, "stop", 0)


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    folder = folder / ("a directory whose name is longer than the path of a socket may be " * 2)
    if rank == 0:
        folder.mkdir()
        (folder / "mine.py").write_text(REWARD)
    dist.barrier()
    tempfile.tempdir = str(folder)

    for names, reason in (((), "rewards is empty"), (("no_such",), "is not a built-in"), (("gsm8k", "gsm8k"), "twice")):
        try:
            scorer_of_node([RewardConfig(name) for name in names], RewardWorkersConfig())
            raise AssertionError(f"accepted: {reason}")
        except InputError as error:
            assert reason in str(error), error

    rewards = [RewardConfig(f"{folder}/mine.py:length"), RewardConfig(f"{folder}/mine.py:worker")]
    scorer = scorer_of_node(rewards, RewardWorkersConfig(num_workers=2, timeout_s=60.0))
    workers = gather_objects([child.pid for child in psutil.Process().children()])
    assert list(map(len, workers)) == [2, 0, 0], workers
    dist.barrier()
    scores = scorer.score([trajectory("x" * (rank + i), i) for i in range(100)])
    assert [score.parts["length"] for score in scores] == [(rank + i) / 3 for i in range(100)]
    assert {score.parts["worker"] for score in scores} <= set(map(float, workers[0]))
    (unknown,) = scorer.start(trajectory("raise")).result().unknown.values()
    assert (unknown.cause, unknown.detail) == ("raised", "raised ValueError: no é")
    assert scorer.score([]) == []
    dist.barrier()  # all ranks are connected: nothing is left to find the workers by
    assert len([entry for entry in os.scandir(folder) if entry.name.startswith(PREFIX)]) == 2  # the workers' own

    hanging = scorer.start(trajectory("hang"))
    if rank == 0:
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)
    dist.barrier()
    for score in (hanging, scorer.start(trajectory("x"))):
        try:
            raise AssertionError(score.result(timeout=60))
        except InputError as error:
            assert str(error) == "rewards: rank 0, which has the reward workers of this node, ended; see what it said"
    print(f"rank {rank} knows\n", end="", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
