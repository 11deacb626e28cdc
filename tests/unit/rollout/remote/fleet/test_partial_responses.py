"""Responses of an engine that is gone, which others go on with; engines are processes with a pretended vLLM."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from mega_rl.fleet import events
from mega_rl.fleet.tickets import Key, Rules
from mega_rl.rollout.engine import Request
from mega_rl.rollout.partial import PartialResponse, ResponsePiece, piece_of
from mega_rl.rollout.remote.engine_process import EngineProcess, LoadResult
from mega_rl.rollout.remote.fleet import partial_responses, ray_executor
from mega_rl.rollout.remote.fleet.partial_responses import PartialResponses
from mega_rl.rollout.remote.weight_store import WantedVersion
from mega_rl.rollout.requests import joined, make_requests, resumed
from mega_rl.types import Prompt, Span, Trajectory
from tests.pretended.tailing_engine import decoded, logprob, next_token
from tests.unit.rollout.remote.fleet.test_ray_executor import Run, Worker

LENGTH, STRUCK_AT = 20, 15  # tokens of a response, and of one whose engine dies
PROMPT = Prompt(3, (5, 6, 7), "", "", "test")
IN_FLIGHT = Rules(num_groups=2, group_size=2, total_steps=3, eta=1, is_pinned=False)


@dataclass
class UnderWay:
    request: Request
    asked: Request  # what is left of it
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)


class PiecedEngine:
    """What ``EngineProcess`` drives: a token of every response in each step, as ``ReceivingEngine`` tells of it."""

    def __init__(self) -> None:
        self.version, self.num_sampled, self._number = 0, 0, 0
        self._under_way: dict[int, UnderWay] = {}

    @property
    def num_unfinished(self) -> int:
        return len(self._under_way)

    def enter(self, requests: Sequence[Request]) -> list[int]:
        first = self._number
        for request in requests:
            self._number += 1
            self._under_way[self._number] = UnderWay(request, resumed(request))
        return list(range(first + 1, self._number + 1))

    def numbered_step(self) -> list[tuple[int, Trajectory]]:
        ended = []
        for number, one in list(self._under_way.items()):
            before = [*one.asked.prompt.token_ids, *one.ids]
            if not one.spans or one.spans[-1].version != self.version:
                one.spans.append(Span(len(before), self.version))
            one.ids.append(next_token(before, one.asked.seed, self.version, 10**9))
            one.logprobs.append(logprob(before, self.version))
            self.num_sampled += 1
            if len(one.ids) == one.asked.max_tokens:
                text = decoded(one.ids)
                values = one.asked.prompt, one.asked.sample_index, one.ids, one.logprobs, text, "length", 0
                rest = dataclasses.replace(Trajectory.single_turn(*values), spans=tuple(one.spans))
                ended.append((number, joined(one.request.tail, rest, decoded)))
                del self._under_way[number]
        return ended

    def grown(self, told: Mapping[int, int], least: int) -> dict[int, ResponsePiece]:
        return {
            number: piece_of(told.get(number, 0), one.ids, one.logprobs, tuple(one.spans))
            for number, one in self._under_way.items()
            if len(one.ids) - told.get(number, 0) >= least
        }


def process(version: int = 0, rank: int = 0) -> tuple[EngineProcess, PiecedEngine]:
    made, engine = EngineProcess(), PiecedEngine()
    made._engine = made._sampler = engine  # type: ignore[assignment]
    made._tensor_rank, engine.version = rank, version
    return made, engine


def check(trajectory: Trajectory) -> None:
    """Every token has the log-probability of its own version behind all tokens before it, and none is missing."""
    ids, first = trajectory.token_ids.tolist(), len(trajectory.prompt.token_ids)
    assert trajectory.num_sampled == LENGTH == len(ids) - first and trajectory.finish_reason == "length"
    bounds = [*(span.start for span in trajectory.spans), len(ids)]
    for span, (start, stop) in zip(trajectory.spans, pairwise(bounds), strict=True):
        for place in range(start, stop):
            assert trajectory.logprobs[place] == np.float32(logprob(ids[:place], span.version)), (place, trajectory)
    assert trajectory.text == decoded(ids[first:])


def issued(decision: events.Issue, of: PartialResponses, to: EngineProcess, sample: int = 0) -> None:
    requests = make_requests([PROMPT], n=2, step=0, seed=1, max_tokens=LENGTH, temperature=1.0)
    asked = of.begin(decision, [requests[sample] for sample in decision.samples], 0.0)
    to.issue(decision.key.step, decision.attempt, decision.samples, asked)


def test_another_engine_goes_on_where_the_last_word_ended_and_again() -> None:
    """Over three engines and three versions, one of which changes amid the first engine's part."""
    (one, first), (two, second), (three, _) = process(0), process(1), process(2)
    of_one, of_two, of_three = PartialResponses(), PartialResponses(), PartialResponses()
    issued(events.Issue(0, 0, Key(0, 0), (0, 1), 7, (None, None)), of_one, one)
    one.proceed(5)
    of_one.grow(0, 0, one.grown(1))
    first.version = 1
    one.proceed(3)
    assert not one.grown(4), "too few to be told of"
    said = of_one.grow(0, 0, one.grown(1))
    one.proceed(4)  # nobody hears of these
    assert [(event.attempt, event.sample, event.prefix.num_sampled) for event in said] == [(7, 0, 8), (7, 1, 8)]
    prefix = said[1].prefix
    assert prefix.newest_version == 1 and prefix.trajectory().spans == (Span(3, 0), Span(8, 1))
    issued(events.Issue(1, 0, Key(0, 0), (1,), 9, (prefix,)), of_two, two)
    two.proceed(7)
    (event,) = of_two.grow(1, 0, two.grown(1))
    assert event.prefix.num_sampled == 15 and event.prefix.trajectory().spans == (Span(3, 0), Span(8, 1))
    assert second.num_sampled == 7, "none of the first engine's"
    issued(events.Issue(2, 0, Key(0, 0), (1,), 11, (event.prefix,)), of_three, three)
    ((attempt, sample, whole),) = three.proceed(100)
    assert (attempt, sample) == (11, 1) and whole.spans == (Span(3, 0), Span(8, 1), Span(18, 2))
    check(whole)
    assert whole.token_ids[: 3 + 15].tolist() == event.prefix.trajectory().token_ids.tolist()


def test_a_prefix_is_known_without_a_token_and_refuses_a_gap() -> None:
    nothing = PartialResponse(PROMPT, 0)
    assert nothing.trajectory() is None and (nothing.num_sampled, nothing.newest_version) == (0, -1)
    grown = nothing.grown(piece_of(0, [4, 5], [-1.0, -2.0], (Span(3, 6),)))
    assert PartialResponse.of(grown.trajectory()).trajectory() == grown.trajectory()  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="tokens from 3 on, where 2 are known"):
        grown.grown(piece_of(3, [4, 5, 6, 7], [-1.0] * 4, (Span(3, 6),)))


def test_only_the_first_worker_tells_and_only_of_what_is_under_way() -> None:
    other, _ = process(rank=1)
    issued(events.Issue(0, 0, Key(0, 0), (0,), 0, (None,)), PartialResponses(), other)
    other.proceed(4)
    assert other.grown(1) == []
    one, _ = process()
    known = PartialResponses()
    issued(events.Issue(0, 0, Key(0, 0), (0,), 0, (None,)), known, one)
    one.proceed(4)
    pieces = one.grown(1)
    known.end(0, 0)
    assert pieces and known.grow(0, 0, pieces) == [], "it has ended"


class PiecedWorker(Worker):
    """An engine that may die in the moment in which it has told of so many tokens of a response."""

    strikes = 0  # left

    def __init__(self, number: int, rank: int) -> None:
        super().__init__(number, rank)
        self.process_, self.engine = process(rank=rank)

    def do_load(self, location: Any, wanted: WantedVersion) -> LoadResult:
        result = super().do_load(location, wanted)
        self.engine.version = self.version
        return result

    def do_issue(
        self, step: int, attempt: int, samples: Sequence[int], requests: Sequence[Request], *pictures: Any
    ) -> None:
        self.process_.issue(step, attempt, samples, requests)

    def do_proceed(self, max_steps: int) -> list[tuple[int, int, Trajectory]]:
        self.num_steps += max_steps
        return self.process_.proceed(max_steps)

    def do_grown(self, least: int) -> list[tuple[int, int, ResponsePiece]]:
        found = self.process_.grown(least)
        if PiecedWorker.strikes and max(self.process_._told.values(), default=0) == STRUCK_AT:
            PiecedWorker.strikes -= 1
            self.state = "gone"  # for all later calls
        return found


def responses(key: Key, samples: Sequence[int]) -> list[Request]:
    prompt = dataclasses.replace(PROMPT, index=key.ticket)
    of_all = make_requests([prompt], n=2, step=key.step, seed=1, max_tokens=LENGTH, temperature=1.0)
    return [of_all[sample] for sample in samples]


def run(monkeypatch: pytest.MonkeyPatch, rules: Rules, strikes: int) -> tuple[Run, list[Trajectory]]:
    monkeypatch.setattr(partial_responses, "TELL_S", 0.0)
    monkeypatch.setattr(ray_executor, "LEAST_TOKENS", 1)
    monkeypatch.setattr(ray_executor, "MAX_STEPS", 5)
    monkeypatch.setattr(ray_executor, "NUM_AHEAD", 1)
    monkeypatch.setattr(PiecedWorker, "strikes", strikes)
    found: list[Trajectory] = []
    made = Run(monkeypatch, rules=rules, worker=PiecedWorker)
    made.executor._work = dataclasses.replace(made.executor._work, requests=responses)
    do = made.do

    def noted(decision: events.Decision, said: list[events.Event]) -> None:
        if isinstance(decision, events.Deliver):
            found.extend(trajectory for _, group in decision.groups for trajectory in group)
        do(decision, said)

    made.do = noted  # type: ignore[method-assign]
    assert not made.go().is_failure and PiecedWorker.strikes == 0
    return made, found


def sampled(run: Run) -> int:
    return sum(worker.engine.num_sampled for worker in run.ray.workers)  # type: ignore[attr-defined]


def test_a_fleet_in_flight_goes_on_with_what_a_dead_engine_had(monkeypatch: pytest.MonkeyPatch) -> None:
    struck, found = run(monkeypatch, IN_FLIGHT, strikes=2)
    for trajectory in found:
        check(trajectory)
    names = Counter((t.prompt.index, t.sample_index) for t in found)
    assert set(names.values()) == {IN_FLIGHT.total_steps} and len(names) == 4, "none is lost, none is doubled"
    issues = [d for d in struck.told if isinstance(d, events.Issue)]
    lengths = [prefix.num_sampled for d in issues for prefix in d.prefixes if prefix is not None]
    assert STRUCK_AT in lengths and len(struck.ray.workers) > 2
    needed = LENGTH * len(found)
    assert sampled(struck) == needed, "no token was sampled twice"


def test_engines_of_pinned_responses_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody may go on with what they would say."""
    asked: list[float] = []
    monkeypatch.setattr(PartialResponses, "ask", lambda self, now: asked.append(now))
    _, found = run(monkeypatch, dataclasses.replace(IN_FLIGHT, is_pinned=True), strikes=0)
    assert not asked and len(found) == 12


def test_a_scheduler_hands_no_prefix_of_a_pinned_ticket_on_and_none_of_a_dead_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for rules, kept in ((IN_FLIGHT, True), (dataclasses.replace(IN_FLIGHT, is_pinned=True), False)):
        scheduler = Run(monkeypatch, rules=rules).scheduler
        scheduler.begin(0.0)
        decided = scheduler.handle(events.Started(0, 0), 0.0) + scheduler.handle(events.Loaded(0, 0, 0), 0.0)
        issue = next(d for d in decided if isinstance(d, events.Issue))
        scheduler.handle(events.Advanced(0, 0, issue.attempt, 0, "of life 0"), 1.0)
        scheduler.handle(events.Died(0, 0, "it was killed"), 2.0)
        scheduler.handle(events.Advanced(0, 0, issue.attempt, 1, "too late"), 3.0)
        decided = [*scheduler.handle(events.Started(0, 1), 4.0), *scheduler.handle(events.Loaded(0, 1, 0), 4.0)]
        again = next(d for d in decided if isinstance(d, events.Issue) and d.key == issue.key)
        assert again.prefixes == (("of life 0" if kept else None), None)
