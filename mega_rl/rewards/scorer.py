"""From the ``rewards`` of a configuration to scores of trajectories."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol

from mega_rl.config.checks.environment import ENVIRONMENT, TURNS
from mega_rl.config.schema.sampling import RewardConfig, RewardWorkersConfig
from mega_rl.config.schema.sources import claims, repeated
from mega_rl.config.schema.stage import WORKERS_PER_RANK
from mega_rl.errors import InputError
from mega_rl.rewards.functions.images import Encoded, Lent
from mega_rl.rewards.functions.registry import BUILT_IN, part_name
from mega_rl.rewards.pool.dispatch import PoolError
from mega_rl.rewards.pool.pool import Answers, Pool, WorkerPool, pack
from mega_rl.rewards.pool.worker import MAX_VALUE, SCORE, Answer, Sample, WorkerSetup
from mega_rl.types import (
    HandedTrajectory,
    Outcome,
    Response,
    Score,
    TokenSource,
    Trajectory,
    TrajectorySummary,
    UnknownReward,
)

AskOwner = Callable[[int], "Future[Answers]"]  # what a rank's workers say of the trajectory of this number


@dataclass(frozen=True)
class WeightedReward:
    name: str  # of the part in a Score
    weight: float
    only: tuple[str, ...] = ()  # data sources whose rows it scores, see `claims`; (): every row


class CollectiveReward(Protocol):
    """Scores what workers cannot: many trajectories at once, on all ranks together, when sampling has ended."""

    def scores(self, source: str) -> bool:
        """Whether it scores the rows of a data source."""
        ...

    def complete(
        self, summaries: Sequence[TrajectorySummary], scores: Sequence[Score], source: TokenSource
    ) -> list[Score]:
        """The scores with its own part in them; one that has it already stays. Collective.

        Args:
            source: has the tokens of the summarized trajectories.
        """
        ...


class Scorer:
    """Scores trajectories by the weighted sum of rewards that run in worker processes.

    Args:
        pool: the workers; None: there are no such rewards, and every score is 0.
        collective: adds to the scores later; None: they are whole.
        pictures: by the keys that prompts have for them; None: the model sees none.
    """

    def __init__(
        self,
        rewards: list[WeightedReward],
        pool: Pool | None,
        collective: CollectiveReward | None = None,
        pictures: Mapping[str, Encoded] | None = None,
    ) -> None:
        self.rewards, self.pool, self.collective = rewards, pool, collective
        self._pictures = pictures if pictures is not None and pool is not None and pool.takes_images else {}
        self._lent = Lent()
        self._of_nodes: Pool | None = None
        self._of_source: dict[str, tuple[int, ...]] = {}  # data source -> places of the rewards that score its rows
        self._owners: Mapping[int, AskOwner] = {}
        self._closing: list[Callable[[], None]] = []

    def share(self, of_nodes: Pool, owners: Mapping[int, AskOwner]) -> None:
        """Have ``start`` use the workers of other nodes besides.

        Args:
            of_nodes: a pool of which this scorer's is one, for what this process has.
            owners: by rank, for what it owns.
        """
        self._of_nodes, self._owners = of_nodes, owners
        self.on_close(of_nodes.close)

    def on_close(self, function: Callable[[], None]) -> None:
        """Call it with ``close``."""
        self._closing.append(function)

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """One score per trajectory, in order; a trajectory of which any reward is unknown scores NaN.

        Raises:
            InputError: the workers can no longer load the rewards.
        """
        if self.pool is None:
            return [Score(0.0) for _ in trajectories]
        by_rewards: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, trajectory in enumerate(trajectories):
            by_rewards[self._rewards_of(trajectory.prompt.data_source)].append(number)
        found: dict[int, Score] = {}
        try:
            packed = [pack(self._sample(trajectory)) for trajectory in trajectories]
            submitted = [
                (places, numbers, self.pool.submit([packed[number] for number in numbers], places))
                for places, numbers in by_rewards.items()
            ]
            for places, numbers, answered in submitted:
                answers = _answers(answered)
                for position, number in enumerate(numbers):
                    found[number] = self._score(places, [of_reward[position] for of_reward in answers])
        finally:
            for trajectory in trajectories:
                self._lent.give_back(self._seen(trajectory))
        return [found[number] for number in range(len(trajectories))]

    def start(self, trajectory: Response) -> Future[Score]:
        """Start to score a trajectory; it waits for no other one that was started, but for a free worker.

        The future raises what `score` does.
        """
        result: Future[Score] = Future()
        of = trajectory.summary if isinstance(trajectory, HandedTrajectory) else trajectory.prompt
        source, places = of.data_source, self._rewards_of(of.data_source)
        known, has_rewards = None, bool(places) or (self.collective is not None and self.collective.scores(source))
        turn_rewards: tuple[float, ...] = ()
        if trajectory.episode is not None:
            known, turn_rewards = score_of(trajectory.episode, has_rewards), trajectory.episode.turn_rewards
        if known is not None or self.pool is None or not places:
            result.set_result(known or with_turns(Score(0.0), turn_rewards))
            return result

        def finish(answered: Future[Answers]) -> None:
            try:
                score = self._score(places, [of_reward[0] for of_reward in _answers(answered)])
                result.set_result(with_turns(score, turn_rewards))
            except InputError as error:
                result.set_exception(error)

        if isinstance(trajectory, HandedTrajectory):
            owner, number = trajectory.summary.key
            answered = self._owners[owner](number)
        else:
            # Temporary files of pictures are on this node.
            is_bound = any(isinstance(one.source, bytes) for one in self._seen(trajectory))
            answered = self.answers(trajectory, self.pool if self._of_nodes is None or is_bound else self._of_nodes)
        answered.add_done_callback(finish)
        return result

    def answers(self, trajectory: Trajectory, pool: Pool) -> Future[Answers]:
        """What workers say of a trajectory; called in any thread."""
        source = trajectory.prompt.data_source
        answered = pool.submit([pack(self._sample(trajectory))], self._rewards_of(source))
        answered.add_done_callback(lambda _: self._lent.give_back(self._seen(trajectory)))
        return answered

    def _rewards_of(self, source: str) -> tuple[int, ...]:
        """The places of the rewards that score the rows of a data source."""
        if source not in self._of_source:
            places = [place for place, reward in enumerate(self.rewards) if claims(reward.only, source)]
            self._of_source[source] = tuple(places)
        return self._of_source[source]

    def _sample(self, trajectory: Trajectory) -> Sample:
        prompt, episode = trajectory.prompt, trajectory.episode
        of_episode = {} if episode is None else {"episode": {"stop": episode.stop, **episode.metrics}}
        sample = (
            prompt.data_source,
            trajectory.text,
            prompt.ground_truth,
            {"prompt": prompt.text} | dict(prompt.extra_info) | of_episode,
            trajectory.num_sampled,
        )
        seen = self._seen(trajectory)
        return (*sample, self._lent.take(seen)) if seen else sample

    def _seen(self, trajectory: Trajectory) -> list[Encoded]:
        """The pictures that are sent with it."""
        return [self._pictures[image.key] for image in trajectory.prompt.images] if self._pictures else []

    def _score(self, places: Sequence[int], answers: list[Answer]) -> Score:
        """
        Args:
            places: of the rewards that score the trajectory.
            answers: theirs.
        """
        parts: dict[str, float] = {}
        unknown: dict[str, UnknownReward] = {}
        rewards = [self.rewards[place] for place in places]
        for reward, value in zip(rewards, answers, strict=True):
            if isinstance(value, float):
                parts[reward.name] = value
            elif isinstance(value, dict):
                parts[reward.name] = value[SCORE]
                parts |= {f"{reward.name}/{name}": figure for name, figure in value.items() if name != SCORE}
            else:
                unknown[reward.name] = UnknownReward(*value)
        total = sum((reward.weight * parts.get(reward.name, math.nan) for reward in rewards), 0.0)
        return Score(total, parts, unknown)

    def close(self) -> None:
        """End the workers, or this process's connection to them."""
        for function in self._closing:
            function()
        if self.pool is not None:
            self.pool.close()
        self._lent.close()


def score_of(episode: Outcome, has_rewards: bool) -> Score | None:
    """What the environment says; None: the run's rewards score the episode."""
    if episode.failure is not None:
        return Score(math.nan, {}, {ENVIRONMENT: episode.failure})
    if episode.reward is not None or (episode.turn_rewards and not has_rewards):
        total = (episode.reward or 0.0) + sum(episode.turn_rewards)
        return Score(total, {ENVIRONMENT: total}, turn_rewards=episode.turn_rewards)
    if not has_rewards:
        return Score(
            math.nan, {}, {ENVIRONMENT: UnknownReward("missing", "gave none, and no entry of rewards is for it")}
        )
    return None


def with_turns(score: Score, turn_rewards: tuple[float, ...]) -> Score:
    """A score of rewards, and on top of it what the environment gave for single turns."""
    if not turn_rewards:
        return score
    total = sum(turn_rewards)
    return replace(score, value=score.value + total, parts={**score.parts, TURNS: total}, turn_rewards=turn_rewards)


def build_scorer(rewards: Sequence[RewardConfig], workers: RewardWorkersConfig | None = None) -> Scorer:
    """Starts the workers, which find every reward and check its options: a wrong name shows before the first sample.

    Raises:
        InputError: no rewards, an unknown or unimportable one, a callable that does not take the arguments of the
            contract, unknown, missing or impossible options, a weight that is not finite, or the same name twice.
    """
    return Scorer(weighted(rewards), start_workers(rewards, workers or RewardWorkersConfig()))


def start_workers(rewards: Sequence[RewardConfig], workers: RewardWorkersConfig, num_ranks: int = 1) -> WorkerPool:
    """The workers of a node on which so many ranks score; raises InputError as `build_scorer` does."""
    setup = WorkerSetup(tuple((r.name, dict(r.options)) for r in rewards), workers.timeout_s, workers.memory_bytes)
    try:
        return WorkerPool(setup, workers.num_workers or WORKERS_PER_RANK * num_ranks)
    except PoolError as error:
        raise InputError(str(error)) from error


def weighted(rewards: Sequence[RewardConfig]) -> list[WeightedReward]:
    """Names, weights and sources; raises InputError for none, for impossible weights and for the same name twice."""
    if not rewards:
        raise InputError(f"rewards is empty: list at least one, such as {', '.join(BUILT_IN)}")
    for reward in rewards:
        if not abs(reward.weight) <= MAX_VALUE:
            raise InputError(
                f"rewards: the weight of {reward.name} is {reward.weight}; give a finite number, up to {MAX_VALUE:g}"
            )
    names = [part_name(reward.name) for reward in rewards]
    if (twice := repeated(names, rewards)) is not None:
        raise InputError(f"rewards lists {twice} twice: keep one, or give the functions different names")
    return [WeightedReward(name, r.weight, tuple(r.only)) for name, r in zip(names, rewards, strict=True)]


def _answers(answered: Future[Answers]) -> Answers:
    try:
        return answered.result()
    except PoolError as error:
        raise InputError(str(error)) from error
