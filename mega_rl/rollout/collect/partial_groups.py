"""Groups that a step has begun and not ended: which engine has them, and how a checkpoint holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from mega_rl.observe.heartbeat import HEART
from mega_rl.parallel.layout import EngineLayout
from mega_rl.parallel.schedule import split_even
from mega_rl.parallel.sending import collect_to_first
from mega_rl.rollout.collect.collect import PartialRequests
from mega_rl.rollout.collect.records import (
    prompt_of_row,
    row_of_prompt,
    row_of_score,
    row_of_trajectory,
    score_of_row,
    trajectory_of_row,
)
from mega_rl.rollout.engine import Request
from mega_rl.types import Prompt, Score, Trajectory


@dataclass(frozen=True)
class PartialGroup:
    """A begun group as every rank knows it."""

    replica: int  # the engine that goes on with it
    prompt_index: int
    num_requests: int  # responses that have not ended
    num_tail_tokens: int  # that these have so far

    @classmethod
    def of(cls, replica: int, group: PartialRequests) -> PartialGroup:
        return cls(replica, group.prompt_index, len(group.requests), group.num_tail_tokens)


class PartialGroups:
    """The groups that wait for the next step, in the order in which they were begun. A group stays with its engine.

    Args:
        layout: of the engines.
        rank: this one.
    """

    def __init__(self, layout: EngineLayout, rank: int) -> None:
        self._layout, self._rank = layout, rank
        self._replica = layout.replica(rank)
        self.places: list[PartialGroup] = []
        self._own: dict[int, PartialRequests] = {}  # of this rank's engine, by the index of the prompt

    def __len__(self) -> int:
        return len(self.places)

    def shares(self, num_fresh: int, group_size: int) -> list[list[int]]:
        """The tickets of every engine: of its own groups, which come first, and of so many fresh ones.

        A fresh one goes to the engine that has the fewest responses to sample.
        """
        if not self.places:
            return [list(part) for part in split_even(num_fresh, self._layout.num_replicas)]
        tickets: list[list[int]] = [[] for _ in range(self._layout.num_replicas)]
        loads = [0] * len(tickets)
        for ticket, place in enumerate(self.places):
            tickets[place.replica].append(ticket)
            loads[place.replica] += place.num_requests
        for ticket in range(len(self), len(self) + num_fresh):
            least = min(range(len(loads)), key=loads.__getitem__)
            tickets[least].append(ticket)
            loads[least] += group_size
        return tickets

    def own(self) -> dict[int, PartialRequests]:
        """Ticket -> group, of this rank's engine."""
        mine = (pair for pair in enumerate(self.places) if pair[1].replica == self._replica)
        return {ticket: self._own[place.prompt_index] for ticket, place in mine}

    def replace(self, places: Iterable[PartialGroup], own: Iterable[PartialRequests]) -> None:
        """Wait with other groups from now on."""
        self.places, self._own = list(places), {group.prompt_index: group for group in own}
        expected = sum(place.replica == self._replica for place in self.places)
        assert len(self._own) == expected, "a group is not with its engine"

    def figures(self) -> dict[str, float]:
        """What waits."""
        return {
            "groups_waiting": float(len(self)),
            "tails": float(sum(place.num_requests for place in self.places)),
            "tail_tokens": float(sum(place.num_tail_tokens for place in self.places)),
        }

    def to_first(self) -> list[list[dict[str, Any]]]:
        """``rows_of`` all groups, on rank 0; nothing on the others. Collective."""
        leaders = self._layout.leaders()
        rows = {index: rows_of(group) for index, group in self._own.items()} if self._rank in leaders else {}
        found: dict[int, list[dict[str, Any]]] = {}
        for part in collect_to_first(rows, leaders):
            found |= part
        return [found[place.prompt_index] for place in self.places] if self._rank == 0 else []

    def adopt(self, groups: Sequence[PartialRequests]) -> None:
        """Take in groups that all ranks were given; they are dealt out to the engines in turn."""
        owners = [number % self._layout.num_replicas for number in range(len(groups))]
        pairs = list(zip(owners, groups, strict=True))
        own = [group for owner, group in pairs if owner == self._replica]
        self.replace((PartialGroup.of(owner, group) for owner, group in pairs), own)


def rows_of(group: PartialRequests) -> list[dict[str, Any]]:
    """One row per response of a begun group: as in records if it has ended, else its seed and what it has so far.

    Waits for the scores of those that have ended.
    """
    ended = [one for one in group.ended if isinstance(one, Trajectory)]
    assert len(ended) == len(group.ended), "the responses are with another rank of the engine"
    with HEART.waiting("the rewards", is_for_ranks=False):
        scores = [group.scores[one.sample_index].result() for one in ended]
    pairs = zip(ended, scores, strict=True)
    rows = [row_of_trajectory(one) | {"score": row_of_score(score)} for one, score in pairs]
    for request in group.requests:
        bare = {"prompt": row_of_prompt(request.prompt), "sample_index": request.sample_index}
        row = bare if request.tail is None else row_of_trajectory(request.tail)
        rows.append(row | {"seed": request.seed})
    return rows


def begun_of_rows(
    rows: Sequence[Mapping[str, Any]], request: Callable[[Prompt, int, int, Trajectory | None], Request]
) -> PartialRequests:
    """The inverse of ``rows_of``.

    Args:
        request: makes one out of a prompt, the number of the sample, its seed and its tail.
    """
    ended, scores, requests = [], dict[int, Future[Score]](), []
    for row in rows:
        if "seed" not in row:
            ended.append(trajectory_of_row(row))
            scores[row["sample_index"]] = _known(score_of_row(row["score"]))
            continue
        tail = trajectory_of_row(row) if "token_ids" in row else None
        requests.append(request(prompt_of_row(row["prompt"]), row["sample_index"], row["seed"], tail))
    return PartialRequests(tuple(requests), tuple(ended), scores)


def _known(score: Score) -> Future[Score]:
    known: Future[Score] = Future()
    known.set_result(score)
    return known
