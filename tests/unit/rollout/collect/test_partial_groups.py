"""Steps that end before all responses have: nothing is lost and nothing doubled, whatever the engines do."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st
from torch.distributed import HashStore

from mega_rl.parallel.layout import EngineLayout
from mega_rl.parallel.schedule import split_even
from mega_rl.rollout.collect.collect import Collected, GroupSummary, PartialRequests, PromptGroup, Quota, Round, collect
from mega_rl.rollout.collect.partial_groups import PartialGroup, PartialGroups, begun_of_rows, rows_of
from mega_rl.rollout.engine import Request
from mega_rl.rollout.requests import joined, make_requests, resumed, text_of
from mega_rl.synthetic.arithmetic import bpe_tokenizer
from mega_rl.types import Prompt, Score, Span, Trajectory, TurnSpan
from tests.pretended.tailing_engine import TailingEngine, check_whole, decoded

SCORING = ThreadPoolExecutor(2)
NUM_SAMPLES, MAX_TOKENS = 3, 12
WANTED = 4


def question(index: int) -> Prompt:
    return Prompt(index, (1, 2 + index % 5), "", "", "test")


def asked(index: int, step: int = 0) -> list[Request]:
    return make_requests([question(index)], n=NUM_SAMPLES, step=step, seed=0, max_tokens=MAX_TOKENS, temperature=1.0)


def score(trajectory: Trajectory) -> Future[Score]:
    return SCORING.submit(Score, float(trajectory.token_ids.sum() % 2))


def differs(group: PromptGroup | GroupSummary) -> bool:
    return len({score.value for score in group.scores}) > 1


class Steps:
    """The steps of a run over several engines, each in a thread of its own."""

    def __init__(self, orders: list[int], stops_at: str, oversample: int) -> None:
        self.engines = [TailingEngine(order) for order in orders]
        layout = EngineLayout(len(orders), 1)
        self.tails = [PartialGroups(layout, rank) for rank in range(len(orders))]
        self.stops_at, self.oversample, self.store, self.num_drawn = stops_at, oversample, HashStore(), 0
        self.ended: list[PromptGroup] = []

    def quota(self, is_last: bool) -> Quota:
        waiting = len(self.tails[0])
        is_kept = differs if self.stops_at == "kept" else lambda group: True
        budget = max(waiting, WANTED * self.oversample * (2 if self.stops_at == "kept" else 1))
        initial = waiting if is_last else max(waiting, WANTED * self.oversample)
        if is_last:
            return Quota(initial, initial, initial, lambda group: True)
        return Quota(WANTED, initial, budget, is_kept, self.stops_at)  # type: ignore[arg-type]

    def step(self, number: int, is_last: bool = False) -> int:
        """One step; returns how many groups ended in it."""
        quota, waiting = self.quota(is_last), len(self.tails[0])

        def draw(ticket: int) -> list[Request]:
            return asked(self.num_drawn + ticket - waiting, number)

        shares = self.tails[0].shares(quota.num_initial - waiting, NUM_SAMPLES)
        assert sorted(ticket for share in shares for ticket in share) == list(range(quota.num_initial))
        assert shares == self.tails[-1].shares(quota.num_initial - waiting, NUM_SAMPLES)

        def one(rank: int) -> Collected:
            self.engines[rank].weight_version = number
            of_step = Round(number, quota, draw, score, self.store, begun=self.tails[rank].own())
            return collect(self.engines[rank], of_step, shares[rank])

        with ThreadPoolExecutor(len(self.engines)) as threads:
            found = list(threads.map(one, range(len(self.engines)), timeout=60))
        tickets = Counter(ticket for part in found for ticket in [*part.groups, *part.begun])
        assert sorted(tickets) == list(range(len(tickets))) and set(tickets.values()) == {1}
        self.num_drawn += len(tickets) - waiting
        assert all(engine.num_unfinished == 0 for engine in self.engines), "an engine that sleeps holds requests"
        places = {t: PartialGroup.of(rank, group) for rank, part in enumerate(found) for t, group in part.begun.items()}
        for tails, part in zip(self.tails, found, strict=True):
            tails.replace([places[ticket] for ticket in sorted(places)], part.begun.values())
        groups = [group for part in found for group in part.groups.values()]
        self.ended += groups
        num_kept = sum(map(quota.is_kept, groups))
        assert num_kept >= min(WANTED, quota.num_initial) or len(tickets) == quota.budget
        if self.stops_at == "kept" and not is_last:  # what a replay goes by
            drops = len(groups) - num_kept
            assert len(tickets) == max(quota.num_initial, min(quota.budget, WANTED + drops))
        return len(groups)


@settings(max_examples=40)
@given(
    orders=st.lists(st.integers(0, 99), min_size=1, max_size=3),
    stops_at=st.sampled_from(["ended", "kept"]),
    oversample=st.integers(1, 4),
    num_steps=st.integers(1, 5),
)
def test_every_group_ends_once_and_every_token_counts_once(
    orders: list[int], stops_at: str, oversample: int, num_steps: int
) -> None:
    steps = Steps(orders, stops_at, oversample)
    for number in range(num_steps):
        steps.step(number)
    while len(steps.tails[0]):
        steps.step(num_steps, is_last=True)
    assert sorted(group.trajectories[0].prompt.index for group in steps.ended) == list(range(steps.num_drawn))
    for group in steps.ended:
        assert [t.sample_index for t in group.trajectories] == list(range(NUM_SAMPLES))
        assert len({t.prompt.index for t in group.trajectories}) == 1
        for trajectory, found in zip(group.trajectories, group.scores, strict=True):
            check_whole(trajectory, MAX_TOKENS)
            assert found.value == float(trajectory.token_ids.sum() % 2)


def test_a_step_leaves_what_is_long_and_begins_with_it() -> None:
    steps = Steps([0], "ended", 3)
    num_first = steps.step(0)
    waiting = [place.prompt_index for place in steps.tails[0].places]
    assert WANTED <= num_first < 3 * WANTED and len(waiting) == 3 * WANTED - num_first
    assert waiting == sorted(waiting) and sum(place.num_tail_tokens for place in steps.tails[0].places) > 0
    num_before = len(steps.engines[0].submitted)
    steps.step(1)
    begun = list(dict.fromkeys(prompt for prompt, _ in steps.engines[0].submitted[num_before:]))
    assert begun[: len(waiting)] == waiting and min(begun[len(waiting) :]) > max(waiting)
    mixed = [t for group in steps.ended for t in group.trajectories if len(t.spans) > 1]
    assert mixed and all([span.version for span in t.spans] == [0, 1] for t in mixed)


def test_one_engine_repeats_itself() -> None:
    first, second = Steps([3], "ended", 2), Steps([3], "ended", 2)
    for number in range(4):
        first.step(number)
        second.step(number)
    assert first.ended == second.ended and first.tails[0].places == second.tails[0].places


def test_a_quota_that_never_stops_takes_nothing_out() -> None:
    engine = TailingEngine(5)
    quota = Quota(4, 4, 4, lambda group: True)
    found = collect(engine, Round(0, quota, asked, score, HashStore()), range(4))
    assert sorted(found.groups) == [0, 1, 2, 3] and not found.begun and engine.num_interrupts == 0


def test_fresh_groups_go_where_least_is_left() -> None:
    tails = PartialGroups(EngineLayout(3, 1), 0)
    assert tails.shares(7, 2) == [list(part) for part in split_even(7, 3)]
    group = PartialRequests(tuple(asked(5)))
    tails.replace([PartialGroup(1, 9, 4, 7), PartialGroup(0, 5, 3, 0), PartialGroup(1, 6, 2, 8)], [group])
    assert tails.shares(4, 3) == [[1, 4, 6], [0, 2], [3, 5]]
    assert tails.own() == {1: group}
    assert tails.figures() == {"groups_waiting": 3, "tails": 9, "tail_tokens": 15}


def test_rows_hold_all_that_goes_on() -> None:
    """What is continued from the rows is what is continued without them."""
    steps = Steps([1], "ended", 3)
    steps.step(0)
    groups = list(steps.tails[0].own().values())
    assert any(group.ended for group in groups) and any(request.tail for g in groups for request in g.requests)
    rows = json.loads(json.dumps([rows_of(group) for group in groups]))

    def request(prompt: Prompt, sample: int, seed: int, tail: Trajectory | None) -> Request:
        return Request(prompt, sample, seed, MAX_TOKENS, 1.0, tail=tail)

    again = [begun_of_rows(of_group, request) for of_group in rows]
    for old, new in zip(groups, again, strict=True):
        assert (new.requests, new.ended) == (old.requests, old.ended)
        assert {n: f.result() for n, f in new.scores.items()} == {n: f.result() for n, f in old.scores.items()}
    dealt = PartialGroups(EngineLayout(2, 1), 1)
    dealt.adopt(again)
    assert [place.replica for place in dealt.places] == [n % 2 for n in range(len(again))]
    assert list(dealt.own().values()) == again[1::2]


def test_a_rest_is_asked_for_with_a_seed_of_its_own() -> None:
    (request, other, _) = asked(3)
    tail = Trajectory.single_turn(request.prompt, 0, [7, 8], [-0.5, -0.25], "ab", "abort", 4)
    rest = resumed(replace(request, tail=tail))
    assert rest.prompt.token_ids == (*request.prompt.token_ids, 7, 8) and rest.max_tokens == MAX_TOKENS - 2
    longer = Trajectory.single_turn(request.prompt, 0, [7, 8, 9], [-0.5, -0.25, -1], "abc", "abort", 4)
    others = (replace(request, tail=longer), replace(other, tail=tail))
    seeds = {request.seed, rest.seed, *(resumed(one).seed for one in others)}
    assert len(seeds) == 4 and resumed(request) is request
    found = joined(tail, Trajectory.single_turn(rest.prompt, 0, [9], [-1.0], "c", "stop", 6), decoded)
    assert found.spans == (Span(2, 4), Span(4, 6)) and found.text == decoded([7, 8]) and found.finish_reason == "stop"
    assert found.logprobs.tolist() == [0, 0, -0.5, -0.25, -1.0] and found.prompt == request.prompt
    assert found.turns == (TurnSpan("prompt", 0, 2), TurnSpan("assistant", 2, 5))
    same = joined(tail, Trajectory.single_turn(rest.prompt, 0, [9], [-1.0], "c", "stop", 4), decoded)
    assert same == Trajectory.single_turn(request.prompt, 0, [7, 8, 9], [-0.5, -0.25, -1.0], decoded([7, 8]), "stop", 4)
    with pytest.raises(AssertionError, match="another response"):
        joined(longer, Trajectory.single_turn(rest.prompt, 0, [9], [-1.0], "c", "stop", 6), decoded)
    assert all(a.version < b.version for a, b in pairwise(found.spans))


def test_a_character_may_lie_in_a_tail_and_in_its_rest() -> None:
    text = "问题:好 \U0001f600? naïve — 三"
    tokenizer = bpe_tokenizer(["plain words only"], 300)
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    prompt, ids = tokenizer("user: 一")["input_ids"], tokenizer(text)["input_ids"]
    assert len(ids) > len(text), "every character is one token"
    whole = [*prompt, *ids, tokenizer.eos_token_id]
    assert text_of(whole, len(prompt), "stop", decode) == text
    for stop in range(len(ids) + 1):
        found = text_of([*prompt, *ids[:stop]], len(prompt), "length", decode)
        assert text.startswith(found) and len(text) - len(found) <= len(ids) - stop + 1
