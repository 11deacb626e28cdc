"""Which answers are right, and for what each votes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mega_rl import types
from mega_rl.config.checks.environment import ENVIRONMENT
from mega_rl.config.schema.sampling import RewardConfig
from mega_rl.config.schema.sources import rewards_of
from mega_rl.errors import InputError
from mega_rl.evaluation.records import GREEDY
from mega_rl.rewards.functions.extraction import Extractor, extractor
from mega_rl.rewards.functions.registry import needs_truth, part_name
from mega_rl.rollout.collect.records import outcome_of_row


@dataclass(frozen=True)
class Grading:
    """A response is right if one of its rewards has at least a certain value.

    What an environment gave takes the place of that reward, where it gave one.
    """

    reward: str  # name of the part of a score
    right_at: float
    extract: Extractor | None  # None: responses have no answers that could be counted
    rewards: tuple[RewardConfig, ...] = ()  # all, where some are for certain data sources only, see `of_source`

    @classmethod
    def of(
        cls,
        rewards: Sequence[RewardConfig],
        name: str | None = None,
        right_at: float = 1.0,
        has_environment: bool = False,
    ) -> Grading:
        """By the reward of that name; without one by the first reward that compares with the truth, else the first.

        Without rewards by what the environment gives; then no answer is read out of a response.

        Raises:
            InputError: no reward has that name.
        """
        parts = {part_name(reward.name): reward for reward in rewards}
        if has_environment and name in (None, ENVIRONMENT) and (name == ENVIRONMENT or not parts):
            return cls(ENVIRONMENT, right_at, None)
        if name is not None and name not in parts:
            known = [*parts, ENVIRONMENT] if has_environment else [*parts]
            raise InputError(f"--right-by is {name!r}: choose one of the rewards, {', '.join(known)}")
        chosen = parts[name] if name is not None else _first(rewards)
        by_source = tuple(rewards) if any(reward.only for reward in rewards) else ()
        return cls(part_name(chosen.name), right_at, extractor(chosen.name, chosen.options), by_source)

    def of_source(self, source: str) -> Grading:
        """The same for the rows of a data source: by the first of its rewards where ``reward`` does not score them."""
        own = rewards_of(self.rewards, source)
        if not own or self.reward == ENVIRONMENT:
            return self
        chosen = next((reward for reward in own if part_name(reward.name) == self.reward), None) or _first(own)
        extract = extractor(chosen.name, chosen.options)
        return replace(self, reward=part_name(chosen.name), extract=extract, rewards=())


def _first(rewards: Sequence[RewardConfig]) -> RewardConfig:
    """The first that compares with the truth, else the first."""
    return next((reward for reward in rewards if needs_truth([reward])), rewards[0])


@dataclass(frozen=True)
class ProblemOutcome:
    """What one problem came to. A response whose reward is unknown is in none of the lists."""

    data_source: str
    problem: int
    ground_truth: str
    greedy: bool | None  # whether the greedy answer is right; None: there is none, or it is not known
    sampled: tuple[bool, ...]  # whether each sampled answer is right
    votes: tuple[str | None, ...]  # what each sampled answer says; None: no answer was found in it
    lengths: tuple[int, ...]  # tokens of every sampled response, known or not; without any, of the greedy one
    num_cut: int  # responses, greedy ones too, that the limit of length ended
    num_responses: int
    num_unknown: int
    # How every sampled response went on (without any, the greedy one) if it was an episode, and its tokens of replies.
    episodes: tuple[tuple[types.Outcome, int], ...] = ()

    @property
    def share_right(self) -> float | None:
        """Of the sampled answers; None without any."""
        return sum(self.sampled) / len(self.sampled) if self.sampled else None


def outcomes(records: Iterable[Mapping[str, Any]], grading: Grading) -> list[ProblemOutcome]:
    return [_outcome(record, grading) for record in records]


def _outcome(record: Mapping[str, Any], grading: Grading) -> ProblemOutcome:
    responses, grading = record["responses"], grading.of_source(record["data_source"])
    values = {id(response): _value(response["parts"], grading.reward) for response in responses}
    known = [response for response in responses if values[id(response)] is not None]
    right = {key: value >= grading.right_at for key, value in values.items() if value is not None}
    greedy = [response for response in responses if response["kind"] == GREEDY]
    sampled = [response for response in known if response["kind"] != GREEDY]
    return ProblemOutcome(
        record["data_source"],
        record["problem"],
        record["ground_truth"],
        right.get(id(greedy[0])) if greedy else None,
        tuple(right[id(response)] for response in sampled),
        tuple(grading.extract(response["text"]) if grading.extract else None for response in sampled),
        tuple(response["num_tokens"] for response in responses if response["kind"] != GREEDY or len(responses) == 1),
        sum(response["finish_reason"] == "length" for response in responses),
        len(responses),
        len(responses) - len(known),
        tuple(
            (outcome_of_row(response["episode"]), response["num_reply_tokens"])
            for response in responses
            if "episode" in response and (response["kind"] != GREEDY or len(responses) == 1)
        ),
    )


def _value(parts: Mapping[str, float], reward: str) -> float | None:
    return parts.get(reward, parts.get(ENVIRONMENT))
