"""Groups of responses over all rollout engines, scored while others are still sampled, some refused and replaced.

Every response is scored as soon as it has ended, beside all others: one that takes long holds up its own group only.

A *group* is the responses to one prompt; a *ticket* is the position of its prompt in the order in which a step draws
prompts. A step wants ``num_groups`` kept groups. It starts with the first ``num_initial`` tickets. An engine that drops
a group draws one more ticket if the groups kept and under way could otherwise not be enough. So the tickets drawn are
always the first ``max(num_initial, fewest tickets that hold num_groups kept groups)``, at most ``budget``: which engine
was faster, and how many engines there are, changes nothing.

A quota that stops is another matter: as soon as the engines together have ``num_groups`` groups, none of them samples
on, and which groups these are depends on how fast the engines were. Nothing is lost: a group that has not ended is
handed back as ``PartialRequests``, and a later step goes on with it under a ticket of its own. A dropped group draws
its replacement then too, which waits without a token, so the number of tickets follows from the groups that have
ended.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Literal, NamedTuple, TypeVar

import torch.distributed as dist

from mega_rl.observe.heartbeat import HEART
from mega_rl.parallel.collectives import broadcast_list, broadcast_object
from mega_rl.rollout.engine import Ended, Request, ResumingSampler, Sampler, whole
from mega_rl.types import Response, Score, Trajectory, TrajectorySummary

MAX_SCORING_WAIT_S = 5.0
STEPS_PER_LOOK = 8  # of an engine in which nothing ends, between two looks at what the others have
Told = TypeVar("Told")


@dataclass(frozen=True)
class FleetGroup:
    """All responses to one prompt, by sample number, and their scores; engines may have handed them to their owners."""

    trajectories: tuple[Response, ...]
    scores: tuple[Score, ...]

    @property
    def num_turns(self) -> tuple[int, ...]:
        """Of the model, in every sample."""
        return tuple(map(_num_turns, self.trajectories))


@dataclass(frozen=True)
class PromptGroup(FleetGroup):
    """One whose tokens are all here."""

    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True)
class GroupSummary:
    """The same as every rank knows it: without the tokens."""

    summaries: tuple[TrajectorySummary, ...]
    scores: tuple[Score, ...]

    @property
    def num_turns(self) -> tuple[int, ...]:
        """Of the model, in every sample."""
        return tuple(map(_num_turns, self.summaries))


def _num_turns(sample: Response | TrajectorySummary) -> int:
    return 1 if sample.episode is None else sample.episode.num_turns


@dataclass(frozen=True)
class Quota:
    """How many groups one step wants; tickets count from 0 in every step."""

    num_groups: int
    num_initial: int
    budget: int  # tickets that may be drawn at most
    is_kept: Callable[[PromptGroup | GroupSummary], bool]  # of a group that is scored
    # Sampling stops when num_groups groups have ended, or are scored and kept, or when an engine would end no more, as
    # one that has recorded responses; what has not ended waits.
    stops_at: Literal["never", "ended", "kept", "idle"] = "never"

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
    is_kept: bool
    replacement: int | None


@dataclass(frozen=True)
class PartialRequests:
    """A group that has been begun and has not ended, as a rank of its engine has it."""

    requests: tuple[Request, ...]  # of the responses that have not ended, with their tails; there is at least one
    ended: tuple[Ended, ...] = ()
    scores: Mapping[int, Future[Score]] = field(default_factory=dict)  # by sample number, of ``ended``; on the leader

    @property
    def prompt_index(self) -> int:
        return self.requests[0].prompt.index

    @property
    def num_tail_tokens(self) -> int:
        """Sampled ones of responses that have not ended."""
        return sum(request.tail.num_sampled for request in self.requests if request.tail is not None)


class Collected(NamedTuple):
    """What a step of one engine has come to, by tickets."""

    groups: dict[int, PromptGroup]  # all of whose responses have ended; on the leader only
    begun: dict[int, PartialRequests]  # the others


@dataclass(frozen=True)
class Round:
    """The collection of one step, as one rank of one engine takes part in it.

    The ranks of an engine make the same calls; its leader scores and decides, and tells the others. The engines share
    nothing but two numbers, of the groups that they dropped and of those that a quota that stops counts, so none of
    them waits for another.
    """

    step: int
    quota: Quota
    draw: Callable[[int], Sequence[Request]]  # ticket -> the requests of its group, for a prompt of its own
    score: Callable[[Trajectory], Future[Score]]  # starts the scoring of a trajectory; only the leader calls it
    store: dist.Store  # of all engines: holds the step's numbers of groups, ``dropped/STEP`` and ``there/STEP``
    is_leader: bool = True
    ranks: dist.ProcessGroup | None = None  # of this engine, if it has several
    begun: Mapping[int, PartialRequests] = field(
        default_factory=dict
    )  # ticket -> a group of earlier steps, on its engine

    def start(self, ticket: int) -> PartialRequests:
        """The group of a ticket."""
        return self.begun[ticket] if ticket in self.begun else PartialRequests(tuple(self.draw(ticket)))

    def is_enough(self, num_more: int) -> bool:
        """Whether all engines have as many groups as the step wants, so many more of this one included.

        Collective among the ranks of the engine.
        """
        found = self.is_leader and self.store.add(f"there/{self.step}", num_more) >= self.quota.num_groups
        return self.share(found)

    def replacement(self) -> int | None:
        """Count a group that was dropped just now; returns the ticket to draw instead of it, or None."""
        return self.quota.replacement(self.store.add(f"dropped/{self.step}", 1))

    def share(self, value: Told) -> Told:
        """The leader's value on every rank of the engine; collective among them."""
        return value if self.ranks is None else broadcast_object(value, self.ranks)

    def share_list(self, values: list[Told]) -> list[Told]:
        """The same of a list that is mostly empty, which then takes no object."""
        return values if self.ranks is None else broadcast_list(values, self.ranks)


@dataclass
class _UnderWay:
    """Groups between their ticket and their scores, on one rank."""

    sizes: dict[int, int] = field(default_factory=dict)  # ticket -> responses wanted
    tickets: dict[int, int] = field(default_factory=dict)  # prompt index -> ticket
    ended: dict[int, list[Ended]] = field(default_factory=dict)  # ticket -> ended so far

    def __bool__(self) -> bool:
        return bool(self.sizes)

    def add(self, ticket: int, group: PartialRequests) -> None:
        (index,) = {one.prompt.index for one in (*group.requests, *group.ended)}
        assert index not in self.tickets, f"prompt {index} is under way twice"
        self.tickets[index], self.ended[ticket] = ticket, list(group.ended)
        self.sizes[ticket] = len(group.requests) + len(group.ended)

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
        self.add(ticket, trajectory.sample_index, self._round.score(trajectory))

    def add(self, ticket: int, sample_index: int, score: Future[Score]) -> None:
        self._scores.setdefault(ticket, {})[sample_index] = score
        score.add_done_callback(lambda _: self._told.put(ticket))

    def of(self, ticket: int) -> dict[int, Future[Score]]:
        """The scores, by sample number, that have been asked for of a group that has not ended."""
        return self._scores.get(ticket, {})

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
            replacement = None if is_kept else self._round.replacement()
            decisions.append(Decision(ticket, group.scores, is_kept, replacement))
        return decisions


class _Collection:
    """One engine's part of a round, on one rank."""

    def __init__(self, engine: Sampler, of_step: Round) -> None:
        self._engine, self._round = engine, of_step
        self._under_way, self._groups = _UnderWay(), dict[int, PromptGroup]()
        self._scoring = _Scoring(of_step, self._under_way)
        self._num_unscored = 0  # groups of which all trajectories have ended
        self._num_there = 0  # groups that count for the quota, and were not yet told to the other engines
        self._num_steps = 0
        self._rest: dict[int, list[Request]] | None = None  # ticket -> what has not ended; None: sampling goes on

    def begin(self, ticket: int) -> None:
        group = self._round.start(ticket)
        self._under_way.add(ticket, group)
        for sample_index, score in group.scores.items():
            self._scoring.add(ticket, sample_index, score)
        if self._rest is None:
            self._engine.submit(group.requests)
        else:
            self._rest[ticket] += group.requests

    def run(self) -> Collected:
        while self._under_way and self._rest is None:
            ended = self._engine.step()
            self._num_steps += 1
            self._take(ended)
            decisions = self._decide(is_idle=self._engine.num_unfinished == 0)
            if self._is_over(has_news=bool(ended or decisions)) and self._under_way:
                self._stop()
        return Collected(self._groups, {} if self._rest is None else self._begun(self._rest))

    def _take(self, ended: Sequence[Ended]) -> None:
        for trajectory in whole(ended) if self._round.is_leader else ():
            self._scoring.start(trajectory)
        num_complete = self._under_way.add_ended(ended)
        self._num_unscored += num_complete
        if self._round.quota.stops_at == "ended":
            self._num_there += num_complete

    def _decide(self, is_idle: bool) -> list[Decision]:
        """Take up what was decided since the last call, and begin with replacements."""
        if not self._num_unscored:
            return []
        decisions = self._round.share_list(self._scoring.decide(wait_for_one=is_idle) if self._round.is_leader else [])
        for decision in decisions:
            self._num_unscored -= 1
            found = self._under_way.remove(decision.ticket)
            if self._round.is_leader:
                self._groups[decision.ticket] = PromptGroup(tuple(whole(found)), decision.scores)
            if self._round.quota.stops_at == "kept":
                self._num_there += decision.is_kept
            if decision.replacement is not None:
                self.begin(decision.replacement)
        return decisions

    def _is_over(self, has_news: bool) -> bool:
        if self._round.quota.stops_at == "never":
            return False
        if self._round.quota.stops_at == "idle":
            return not self._engine.num_unfinished and not self._num_unscored
        if not has_news and self._num_steps % STEPS_PER_LOOK:
            return False
        num_more, self._num_there = self._num_there, 0
        return self._round.is_enough(num_more)

    def _stop(self) -> None:
        """Sample no more, and wait for the scores of the groups that have ended."""
        assert isinstance(self._engine, ResumingSampler), "an engine whose responses cannot be stopped"
        ended, requests = self._engine.interrupt()
        self._rest = defaultdict(list)
        self._take(ended)
        for request in requests:
            self._rest[self._under_way.tickets[request.prompt.index]].append(request)
        while self._num_unscored:
            self._decide(is_idle=True)

    def _begun(self, rest: Mapping[int, Sequence[Request]]) -> dict[int, PartialRequests]:
        assert rest.keys() == self._under_way.sizes.keys(), "a group has neither ended nor anything left"
        ended = self._under_way.ended
        return {
            ticket: PartialRequests(tuple(rest[ticket]), tuple(ended[ticket]), self._scoring.of(ticket))
            for ticket in sorted(rest)
        }


def collect(engine: Sampler, of_step: Round, own: Sequence[int]) -> Collected:
    """Sample and score this engine's tickets, and those that it draws for dropped groups.

    Every rank of the engine calls it with the same arguments; dropped groups are in the result too. Only the leader
    keeps the groups that have ended: to the other ranks none is returned.

    Args:
        engine: a ``ResumingSampler`` if the quota stops.
        own: this engine's part of ``range(num_initial)`` of the quota.
    """
    collection = _Collection(engine, of_step)
    for ticket in own:
        collection.begin(ticket)
    return collection.run()
