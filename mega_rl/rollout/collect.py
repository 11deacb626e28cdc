"""Groups of responses over all rollout engines, scored while others are still sampled, some refused and replaced.

Every response is scored as soon as it has ended, beside all others: one that takes long holds up its own group only.

A *group* is the responses to one prompt; a *ticket* is the position of its prompt in the order in which a step draws
prompts. A step wants ``num_groups`` kept groups. It starts with the first ``num_initial`` tickets. An engine that drops
a group draws one more ticket if the groups kept and under way could otherwise not be enough. So the tickets drawn are
always the first ``max(num_initial, fewest tickets that hold num_groups kept groups)``, at most ``budget``: which engine
was faster, and how many engines there are, changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import torch.distributed as dist

from mega_rl.observe.heartbeat import HEART
from mega_rl.parallel.collectives import broadcast_object
from mega_rl.rollout.engine import Ended, Request, Sampler, whole
from mega_rl.types import Outline, Score, Trajectory

MAX_SCORING_WAIT_S = 5.0


@dataclass(frozen=True)
class PromptGroup:
    """All trajectories of one prompt, by sample number, and their scores."""

    trajectories: tuple[Trajectory, ...]
    scores: tuple[Score, ...]

    @property
    def num_turns(self) -> tuple[int, ...]:
        """Of the model, in every sample."""
        return tuple(map(_num_turns, self.trajectories))


@dataclass(frozen=True)
class OutlinedGroup:
    """The same as every rank knows it: without the tokens."""

    outlines: tuple[Outline, ...]
    scores: tuple[Score, ...]

    @property
    def num_turns(self) -> tuple[int, ...]:
        """Of the model, in every sample."""
        return tuple(map(_num_turns, self.outlines))


def _num_turns(sample: Trajectory | Outline) -> int:
    return 1 if sample.episode is None else sample.episode.num_turns


@dataclass(frozen=True)
class Quota:
    """How many groups one step wants; tickets count from 0 in every step."""

    num_groups: int
    num_initial: int
    budget: int  # tickets that may be drawn at most
    is_kept: Callable[[PromptGroup | OutlinedGroup], bool]  # of a group that is scored

    def __post_init__(self) -> None:
        assert 0 <= self.num_initial <= self.budget and self.num_groups >= 0, self

    def replacement(self, num_dropped: int) -> int | None:
        """The replacement ticket to draw after the ``num_dropped``-th drop (1, 2, ...) of the step, or None."""
        ticket = self.num_groups + num_dropped - 1
        return ticket if self.num_initial <= ticket < self.budget else None


@dataclass(frozen=True)
class Decision:
    """What an engine's leader decided about a group: its scores, and the ticket to draw instead of it, if any."""

    ticket: int
    scores: tuple[Score, ...]
    replacement: int | None


@dataclass(frozen=True)
class Round:
    """The collection of one step, as one rank of one engine takes part in it.

    The ranks of an engine make the same calls; its leader scores and decides, and tells the others. The engines share
    nothing but the number of groups that they dropped, so none of them waits for another.
    """

    step: int
    quota: Quota
    draw: Callable[[int], Sequence[Request]]  # ticket -> the requests of its group, for a prompt of its own
    score: Callable[[Trajectory], Future[Score]]  # starts the scoring of a trajectory; only the leader calls it
    store: dist.Store  # of all engines: holds the step's number of dropped groups
    is_leader: bool = True
    ranks: dist.ProcessGroup | None = None  # of this engine, if it has several

    def replacement(self) -> int | None:
        """Count a group that was dropped just now; returns the ticket to draw instead of it, or None."""
        return self.quota.replacement(self.store.add(f"dropped/{self.step}", 1))

    def share(self, decisions: list[Decision]) -> list[Decision]:
        """The leader's decisions on every rank of the engine; collective among them."""
        return decisions if self.ranks is None else broadcast_object(decisions, self.ranks)


@dataclass
class _UnderWay:
    """Groups between their ticket and their scores, on one rank."""

    sizes: dict[int, int] = field(default_factory=dict)  # ticket -> responses wanted
    tickets: dict[int, int] = field(default_factory=dict)  # prompt index -> ticket
    ended: dict[int, list[Ended]] = field(default_factory=dict)  # ticket -> ended so far

    def __bool__(self) -> bool:
        return bool(self.sizes)

    def add(self, ticket: int, requests: Sequence[Request]) -> None:
        (index,) = {request.prompt.index for request in requests}
        assert index not in self.tickets, f"prompt {index} is under way twice"
        self.tickets[index], self.sizes[ticket], self.ended[ticket] = ticket, len(requests), []

    def add_ended(self, ended: Sequence[Ended]) -> int:
        """Takes ended responses in; returns how many groups they complete."""
        num_complete = 0
        for one in ended:
            ticket = self.tickets[one.prompt.index]
            self.ended[ticket].append(one)
            if len(self.ended[ticket]) == self.sizes[ticket]:
                self.ended[ticket].sort(key=lambda t: t.sample_index)
                num_complete += 1
        return num_complete

    def remove(self, ticket: int) -> list[Ended]:
        ended = self.ended.pop(ticket)
        del self.sizes[ticket], self.tickets[ended[0].prompt.index]
        return ended


class _Scoring:
    """Trajectories that are scored while sampling goes on, on the leader."""

    def __init__(self, of_step: Round, under_way: _UnderWay) -> None:
        self._round, self._under_way = of_step, under_way
        self._scores: dict[int, dict[int, Future[Score]]] = {}  # ticket -> sample number -> score
        self._num_known: dict[int, int] = {}  # ticket -> scores, known or failed
        self._told: SimpleQueue[int] = SimpleQueue()  # the ticket of each score, as it comes to be known

    def start(self, trajectory: Trajectory) -> None:
        ticket = self._under_way.tickets[trajectory.prompt.index]
        score = self._round.score(trajectory)
        self._scores.setdefault(ticket, {})[trajectory.sample_index] = score
        score.add_done_callback(lambda _: self._told.put(ticket))

    def decide(self, wait_for_one: bool) -> list[Decision]:
        """The decisions about the groups scored since the last call, in the order in which they were.

        Args:
            wait_for_one: there is a group all of whose trajectories have ended: wait until one of these is scored, but
                not long: the engine's other ranks wait for the decisions in a collective, which has a time limit.

        Raises: what scoring raised.
        """
        decisions: list[Decision] = []
        until = time.monotonic() + MAX_SCORING_WAIT_S
        while not self._told.empty() or (wait_for_one and not decisions):
            try:
                with HEART.waiting("the rewards", is_for_ranks=False):
                    ticket = self._told.get(timeout=max(0.0, until - time.monotonic()))
            except Empty:
                break
            self._num_known[ticket] = self._num_known.get(ticket, 0) + 1
            if self._num_known[ticket] < self._under_way.sizes[ticket]:
                continue
            found = self._scores.pop(ticket)
            ended = self._under_way.ended[ticket]
            group = PromptGroup(tuple(whole(ended)), tuple(found[one.sample_index].result() for one in ended))
            is_kept = self._round.quota.is_kept(group)
            decisions.append(Decision(ticket, group.scores, None if is_kept else self._round.replacement()))
        return decisions


def collect(engine: Sampler, of_step: Round, own: Sequence[int]) -> dict[int, PromptGroup]:
    """Sample and score this engine's tickets, and those that it draws for dropped groups; returns ticket -> group.

    Every rank of the engine calls it with the same arguments; dropped groups are in the result too. Only the leader
    keeps the groups: to the other ranks nothing is returned.

    Args:
        own: this engine's part of ``range(num_initial)`` of the quota.
    """
    under_way, groups = _UnderWay(), {}

    def start(ticket: int) -> None:
        requests = of_step.draw(ticket)
        under_way.add(ticket, requests)
        engine.submit(requests)

    for ticket in own:
        start(ticket)
    scoring = _Scoring(of_step, under_way)
    num_unscored = 0  # groups of which all trajectories have ended
    while under_way:
        ended = engine.step()
        for trajectory in whole(ended) if of_step.is_leader else ():
            scoring.start(trajectory)
        num_unscored += under_way.add_ended(ended)
        if not num_unscored:
            continue
        is_idle = engine.num_unfinished == 0
        for decision in of_step.share(scoring.decide(wait_for_one=is_idle) if of_step.is_leader else []):
            num_unscored -= 1
            found = under_way.remove(decision.ticket)
            if of_step.is_leader:
                groups[decision.ticket] = PromptGroup(tuple(whole(found)), decision.scores)
            if decision.replacement is not None:
                start(decision.replacement)
    return groups
