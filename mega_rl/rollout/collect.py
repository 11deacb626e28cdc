"""Groups of responses over all rollout engines, scored while others are still sampled, some refused and replaced.

A *group* is the responses to one prompt, a *ticket* the place of its prompt in the order in which a step draws them.
A step wants ``num_groups`` kept ones. It starts with the first ``num_initial`` tickets; the engine that drops a group
draws one more where what is kept and under way could otherwise not be enough. So the tickets drawn are always the first
``max(num_initial, fewest tickets that hold num_groups kept ones)``, at most ``budget``: which engine was faster, and
how many there are, changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Protocol

from mega_rl.rollout.engine import Request, Sampler
from mega_rl.types import Completion, Score

Draw = Callable[[int], Sequence[Request]]  # ticket -> the requests of its group, for one prompt that no other has
ScoreGroup = Callable[[list[Completion]], Future[list[Score]]]  # starts the scoring of a group


@dataclass(frozen=True)
class Group:
    """All responses to one prompt, by sample number, and their scores."""

    completions: tuple[Completion, ...]
    scores: tuple[Score, ...]


@dataclass(frozen=True)
class Rule:
    """What one step wants; tickets count from 0 in every step."""

    num_groups: int
    num_initial: int
    budget: int  # tickets that may be drawn at most
    is_kept: Callable[[Group], bool]

    def __post_init__(self) -> None:
        assert 0 <= self.num_initial <= self.budget and self.num_groups >= 0, self

    def replacement(self, num_dropped: int) -> int | None:
        """The ticket that the ``num_dropped``-th dropped group (1, 2, ...) of the step makes necessary, if any."""
        ticket = self.num_groups + num_dropped - 1
        return ticket if self.num_initial <= ticket < self.budget else None


class Counter(Protocol):
    """A number that all engines count on."""

    def next(self) -> int:
        """1 for the first caller of all, 2 for the second, and so on."""


class Team(Protocol):
    """The ranks of one engine: they make the same calls, and the leader tells the others what only it knows."""

    @property
    def is_leader(self) -> bool: ...

    def share(self, value: list[Decision]) -> list[Decision]:
        """The leader's value on every rank of the engine; collective among them."""


@dataclass(frozen=True)
class Decision:
    """What the leader decided of a group: scores, and the ticket to draw instead of it."""

    ticket: int
    scores: tuple[Score, ...]
    replacement: int | None


@dataclass
class _UnderWay:
    """Groups between their ticket and their scores, on one rank."""

    sizes: dict[int, int] = field(default_factory=dict)  # ticket -> responses wanted
    tickets: dict[int, int] = field(default_factory=dict)  # prompt index -> ticket
    responses: dict[int, list[Completion]] = field(default_factory=dict)  # ticket -> ended so far

    def __bool__(self) -> bool:
        return bool(self.sizes)

    def add(self, ticket: int, requests: Sequence[Request]) -> None:
        (index,) = {request.prompt.index for request in requests}
        assert index not in self.tickets, f"prompt {index} is under way twice"
        self.tickets[index], self.sizes[ticket], self.responses[ticket] = ticket, len(requests), []

    def complete(self, ended: Sequence[Completion]) -> Iterator[int]:
        """Takes ended responses in; yields the tickets of the groups that they complete."""
        for completion in ended:
            ticket = self.tickets[completion.prompt.index]
            self.responses[ticket].append(completion)
            if len(self.responses[ticket]) == self.sizes[ticket]:
                self.responses[ticket].sort(key=lambda c: c.sample_index)
                yield ticket

    def remove(self, ticket: int) -> list[Completion]:
        completions = self.responses.pop(ticket)
        del self.sizes[ticket], self.tickets[completions[0].prompt.index]
        return completions


class _Scoring:
    """Groups that are scored beside the sampling, on the leader."""

    def __init__(self, score: ScoreGroup, rule: Rule, dropped: Counter) -> None:
        self._score, self._rule, self._dropped = score, rule, dropped
        self._futures: dict[int, Future[list[Score]]] = {}  # in the order of submission
        self._completions: dict[int, tuple[Completion, ...]] = {}

    def submit(self, ticket: int, completions: list[Completion]) -> None:
        self._completions[ticket] = tuple(completions)
        self._futures[ticket] = self._score(completions)

    def decide(self, wait_for_one: bool) -> list[Decision]:
        """What can be said of the groups scored since the last call.

        Raises: what scoring raised.
        """
        if wait_for_one:
            wait([next(iter(self._futures.values()))])
        decisions = []
        for ticket in [t for t, future in self._futures.items() if future.done()]:
            scores = tuple(self._futures.pop(ticket).result())
            kept = self._rule.is_kept(Group(self._completions.pop(ticket), scores))
            replacement = None if kept else self._rule.replacement(self._dropped.next())
            decisions.append(Decision(ticket, scores, replacement))
        return decisions


def collect(
    engine: Sampler, draw: Draw, own: Sequence[int], rule: Rule, score: ScoreGroup, dropped: Counter, team: Team
) -> dict[int, Group]:
    """Sample and score this engine's tickets and those that it draws instead of dropped groups: ticket -> group.

    Every rank of the engine calls it with the same arguments; dropped groups are in the result too.

    Args:
        own: this engine's part of ``range(rule.num_initial)``.
        dropped: counts the dropped groups of the step over all engines.
    """
    under_way, groups = _UnderWay(), {}

    def start(ticket: int) -> None:
        requests = draw(ticket)
        under_way.add(ticket, requests)
        engine.submit(requests)

    for ticket in own:
        start(ticket)
    scoring = _Scoring(score, rule, dropped)
    num_unscored = 0
    while under_way:
        for ticket in under_way.complete(engine.step()):
            num_unscored += 1
            if team.is_leader:
                scoring.submit(ticket, under_way.responses[ticket])
        if not num_unscored:
            continue
        is_idle = engine.num_unfinished == 0
        for decision in team.share(scoring.decide(wait_for_one=is_idle) if team.is_leader else []):
            num_unscored -= 1
            groups[decision.ticket] = Group(tuple(under_way.remove(decision.ticket)), decision.scores)
            if decision.replacement is not None:
                start(decision.replacement)
    return groups
