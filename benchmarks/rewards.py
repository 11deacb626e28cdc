"""Grading speed: responses per second of the built-in rewards in the worker pool, as a run scores them.

The synthetic responses are 300 words that end in a number behind ``####``, in a box, and on an ``Answer:`` line. With
``--data`` (a .jsonl of GSM8K: question, answer) the answers of that file are graded too. Starting the workers is
measured apart: it happens once per run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from pathlib import Path
from typing import Any

from report import publish, table

from mega_rl.config.schema import RewardConfig, RewardWorkersConfig
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
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
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


if __name__ == "__main__":
    main()
