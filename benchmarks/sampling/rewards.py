"""Grading speed: responses per second of the built-in rewards in the worker pool, as a run scores them.

The synthetic responses are 300 words that end in a number behind ``####``, in a box, and on an ``Answer:`` line. With
``--data`` (a .jsonl of GSM8K: question, answer) the answers of that file are graded too. Starting the workers is
measured apart: it happens once per run.

With ``--hanging`` it measures scheduling instead: sleeping rewards, some of which run into their limit, submitted as a
run submits its samples, against the ideal schedule and, in the same run, groups that are scored one after another.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import publish, table
from mega_rl.config.schema.sampling import RewardConfig, RewardWorkersConfig
from mega_rl.rewards.scorer import build_scorer
from mega_rl.types import Prompt, Trajectory

NUM_WORDS = 300
REWARDS: dict[str, dict[str, Any]] = {
    "gsm8k": {},
    "boxed": {},
    "dapo_math": {},
    "repetition": {},
    "math_verify": {},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-responses", type=int, default=10_000)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--data", type=Path, help="GSM8K test.jsonl")
    parser.add_argument("--rewards", nargs="+", choices=REWARDS, default=["gsm8k", "boxed", "dapo_math", "repetition"])
    parser.add_argument("--hanging", type=float, help="fraction of the samples that hang: measures scheduling")
    parser.add_argument("--sleep-s", type=float, default=0.5, help="of a sample that does not hang")
    parser.add_argument("--timeout-s", type=float, default=3.0, help="of one that does")
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.hanging is not None:
        measure_schedule(arguments)
        return
    if "math_verify" in arguments.rewards and importlib.util.find_spec("math_verify") is None:
        parser.error("math_verify needs the math-verify package")
    trajectories = [synthetic(index) for index in range(arguments.num_responses)]
    if arguments.data:
        trajectories += [gsm8k(index, json.loads(line)) for index, line in enumerate(arguments.data.open())]
    rows = [measure(name, trajectories, arguments.num_workers) for name in arguments.rewards]
    header = ("reward", "responses", "workers' start, s", "grading, s", "responses/s", "mean reward")
    results = {"header": header, "rows": rows}
    publish("Rewards", table(header, rows), f"{arguments.num_workers} reward workers", results, arguments.json)


def synthetic(index: int) -> Trajectory:
    words = " ".join(f"step{(index + i) % 97}" for i in range(NUM_WORDS))
    given = index % 50 if index % 2 else 1234
    return trajectory(index, f"{words}\nAnswer: {given}\n\\boxed{{{given}}}\n#### {given}", str(index % 50))


def gsm8k(index: int, row: dict[str, str]) -> Trajectory:
    return trajectory(index, row["answer"], row["answer"].rpartition("####")[2].strip())


def trajectory(index: int, text: str, truth: str) -> Trajectory:
    return Trajectory.single_turn(Prompt(index, (1,), "?", truth, "benchmark"), 0, (1,), (0.0,), text, "stop", 0)


def measure(name: str, trajectories: list[Trajectory], num_workers: int) -> list[Any]:
    start = time.perf_counter()
    scorer = build_scorer([RewardConfig(name, options=REWARDS[name])], RewardWorkersConfig(num_workers=num_workers))
    ready = time.perf_counter()
    scores = scorer.score(trajectories)
    done = time.perf_counter()
    scorer.close()
    unknown = [score for score in scores if not score.is_known]
    assert not unknown, f"{len(unknown)} responses are unknown, such as {unknown[0]}"
    mean = sum(score.value for score in scores) / len(scores)
    return [name, len(scores), ready - start, done - ready, len(scores) / (done - ready), mean]


SLEEPER = """
import time

def sleeper(data_source, solution_str, ground_truth, extra_info):
    time.sleep(float(solution_str))
    return 1.0
"""


def measure_schedule(arguments: argparse.Namespace) -> None:
    """Prints the seconds of both ways of scoring, and their ratio to the ideal: work spread evenly over the workers."""
    generator = random.Random(0)
    num_hanging = round(arguments.hanging * arguments.num_responses)
    texts = ["1e6"] * num_hanging + [str(arguments.sleep_s)] * (arguments.num_responses - num_hanging)
    generator.shuffle(texts)
    trajectories = [trajectory(index, text, "") for index, text in enumerate(texts)]
    work_s = num_hanging * arguments.timeout_s + (len(texts) - num_hanging) * arguments.sleep_s
    ideal_s = max(work_s / arguments.num_workers, arguments.timeout_s)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "sleeper.py")
        path.write_text(SLEEPER)
        workers = RewardWorkersConfig(num_workers=arguments.num_workers, timeout_s=arguments.timeout_s)
        scorer = build_scorer([RewardConfig(f"{path}:sleeper")], workers)
        start = time.perf_counter()
        scores = [score.result() for score in [scorer.start(trajectory) for trajectory in trajectories]]
        together_s = time.perf_counter() - start
        assert [score.is_known for score in scores] == [text != "1e6" for text in texts]
        parts = range(0, len(texts) // 8, arguments.group_size)  # an eighth of the groups: it takes long
        start = time.perf_counter()
        for first in parts:
            scorer.score(trajectories[first : first + arguments.group_size])
        groups_s = (time.perf_counter() - start) * len(texts) / (len(parts) * arguments.group_size)
        scorer.close()
    rows: list[list[Any]] = [
        ["ideal", ideal_s, 1.0],
        ["all at once", together_s, together_s / ideal_s],
        [f"groups of {arguments.group_size}, one after another", groups_s, groups_s / ideal_s],
    ]
    header = ("way", "seconds", "of the ideal")
    what = f"{len(texts)} samples of {arguments.sleep_s} s, {num_hanging} of which hang until {arguments.timeout_s} s"
    results = {"header": header, "rows": rows}
    publish("Rewards", table(header, rows), f"{what}; {arguments.num_workers} workers", results, arguments.json)


if __name__ == "__main__":
    main()
