"""From the ``rewards`` of a configuration to scores of trajectories."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mega_rl.config.schema import RewardConfig, RewardWorkersConfig
from mega_rl.errors import InputError
from mega_rl.rewards.pool import PoolError, WorkerPool
from mega_rl.rewards.registry import BUILT_IN, part_name
from mega_rl.rewards.worker import MAX_VALUE, Answer, Sample, Setup
from mega_rl.types import Score, Trajectory, UnknownReward


@dataclass(frozen=True)
class WeightedReward:
    name: str  # of the part in a Score
    weight: float


class Scorer:
    """Scores trajectories by the weighted sum of rewards that run in worker processes of its own."""

    def __init__(self, rewards: list[WeightedReward], pool: WorkerPool) -> None:
        self.rewards = rewards
        self.pool = pool

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """One score per trajectory, in order; a trajectory of which any reward is unknown scores NaN.

        Raises:
            InputError: the workers can no longer load the rewards.
        """
        try:
            answers = self.pool.run([_sample(trajectory) for trajectory in trajectories])
        except PoolError as error:
            raise InputError(str(error)) from error
        return [self._score([of_reward[i] for of_reward in answers]) for i in range(len(trajectories))]

    def _score(self, answers: list[Answer]) -> Score:
        parts: dict[str, float] = {}
        unknown: dict[str, UnknownReward] = {}
        for reward, value in zip(self.rewards, answers, strict=True):
            if isinstance(value, float):
                parts[reward.name] = value
            else:
                unknown[reward.name] = UnknownReward(*value)
        total = sum(reward.weight * parts.get(reward.name, math.nan) for reward in self.rewards)
        return Score(total, parts, unknown)

    def close(self) -> None:
        """End the workers."""
        self.pool.close()


def build_scorer(rewards: Sequence[RewardConfig], workers: RewardWorkersConfig | None = None) -> Scorer:
    """Starts the workers, which find every reward and check its options: a wrong name shows before the first sample.

    Raises:
        InputError: no rewards, an unknown or unimportable one, a callable that does not take the arguments of the
            contract, unknown, missing or impossible options, a weight that is not finite, or the same name twice.
    """
    workers = workers or RewardWorkersConfig()
    if not rewards:
        raise InputError(f"rewards is empty: list at least one, such as {', '.join(BUILT_IN)}")
    for reward in rewards:
        if not abs(reward.weight) <= MAX_VALUE:
            raise InputError(
                f"rewards: the weight of {reward.name} is {reward.weight}; give a finite number, up to {MAX_VALUE:g}"
            )
    weighted = [WeightedReward(part_name(reward.name), reward.weight) for reward in rewards]
    names = [reward.name for reward in weighted]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"rewards lists {twice[0]} twice: keep one, or give the functions different names")
    setup = Setup(tuple((r.name, dict(r.options)) for r in rewards), workers.timeout_s, workers.memory_bytes)
    try:
        return Scorer(weighted, WorkerPool(setup, workers.num_workers))
    except PoolError as error:
        raise InputError(str(error)) from error


def _sample(trajectory: Trajectory) -> Sample:
    prompt = trajectory.prompt
    return (
        prompt.data_source,
        trajectory.text,
        prompt.ground_truth,
        dict(prompt.extra_info),
        trajectory.num_sampled,
    )
