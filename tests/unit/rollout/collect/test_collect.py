"""Dynamic sampling: which groups a step comes to, whatever the engines' number and speed."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from hypothesis import given, strategies as st
from torch.distributed import HashStore

from mega_rl.parallel.schedule import split_even
from mega_rl.rollout.collect.collect import GroupSummary, PromptGroup, Quota, Round, collect
from mega_rl.rollout.engine import Request
from mega_rl.rollout.requests import make_requests
from mega_rl.types import Prompt, Score, Trajectory
from tests.pretended.samplers import Unordered

NUM_SAMPLES = 3


def has_signal(group: PromptGroup | GroupSummary) -> bool:
    return len({score.value for score in group.scores}) > 1


def draw(ticket: int) -> list[Request]:
    prompt = Prompt(100 + ticket, (1,), "", "", "test")
    return make_requests([prompt], n=NUM_SAMPLES, step=0, seed=0, max_tokens=4, temperature=1.0)


SCORING = ThreadPoolExecutor(2)


def beside(score: Callable[[Trajectory], Score]) -> Callable[[Trajectory], Future[Score]]:
    return lambda trajectory: SCORING.submit(score, trajectory)


def scoring(is_mixed: Callable[[int], bool]) -> Callable[[Trajectory], Future[Score]]:
    """One of the samples of a mixed group is better than the others."""
    return beside(lambda t: Score(float(is_mixed(t.prompt.index - 100) and t.sample_index == 0)))


def run(engines: list[Unordered], quota: Quota, is_mixed: Callable[[int], bool]) -> dict[int, PromptGroup]:
    """What all engines come to together, each in a thread of its own."""
    of_step = Round(0, quota, draw, scoring(is_mixed), HashStore())
    parts = split_even(quota.num_initial, len(engines))
    with ThreadPoolExecutor(len(engines)) as threads:
        jobs = [
            threads.submit(collect, engine, of_step, part)  # type: ignore[arg-type]
            for engine, part in zip(engines, parts, strict=True)
        ]
        found = [job.result(timeout=60).groups for job in jobs]
    assert sum(map(len, found)) == len({ticket for part in found for ticket in part}), "a ticket was drawn twice"
    return {ticket: group for part in found for ticket, group in part.items()}


def tickets_needed(quota: Quota, is_mixed: Callable[[int], bool]) -> int:
    """The definition: the fewest first tickets, at least the initial ones, that hold enough groups; or the budget."""
    drawn, kept = 0, 0
    while drawn < quota.budget and (drawn < quota.num_initial or kept < quota.num_groups):
        kept += is_mixed(drawn)
        drawn += 1
    return drawn


@given(
    mixed=st.lists(st.booleans(), min_size=60, max_size=60),
    wanted=st.integers(0, 6),
    more=st.integers(0, 4),
    budget=st.integers(10, 60),
    engines=st.lists(st.tuples(st.integers(0, 99), st.integers(1, 5)), min_size=1, max_size=3),
)
def test_the_tickets_drawn_do_not_depend_on_the_engines(
    mixed: list[bool], wanted: int, more: int, budget: int, engines: list[tuple[int, int]]
) -> None:
    quota = Quota(wanted, wanted + more if wanted else 0, budget, has_signal)
    found = run([Unordered(*settings) for settings in engines], quota, mixed.__getitem__)
    assert sorted(found) == list(range(tickets_needed(quota, mixed.__getitem__)))
    for ticket, group in found.items():
        assert [t.prompt.index for t in group.trajectories] == [100 + ticket] * NUM_SAMPLES
        assert [t.sample_index for t in group.trajectories] == list(range(NUM_SAMPLES))
        assert [score.value for score in group.scores] == [float(mixed[ticket]), 0.0, 0.0]
        assert has_signal(group) == mixed[ticket]


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_equal_rewards_end_with_the_budget(reward: float) -> None:
    quota = Quota(4, 4, 40, has_signal)
    engines = [Unordered(0, 2), Unordered(1, 2)]
    store = HashStore()
    of_step = Round(5, quota, draw, beside(lambda _: Score(reward)), store)
    with ThreadPoolExecutor(2) as threads:
        jobs = [
            threads.submit(collect, e, of_step, part)  # type: ignore[arg-type]
            for e, part in zip(engines, split_even(4, 2), strict=True)
        ]
        found = [ticket for job in jobs for ticket in job.result(timeout=60).groups]
    assert sorted(found) == list(range(40)) and store.add("dropped/5", 0) == 40


def test_one_mixed_group_in_fifty_is_found() -> None:
    quota = Quota(3, 3, 1000, has_signal)
    found = run([Unordered(3, 4)], quota, lambda ticket: ticket % 50 == 49)
    assert len(found) == 150 and sum(has_signal(group) for group in found.values()) == 3


def prompts(engine: Unordered) -> list[int]:
    """Of the groups that were submitted, in their order."""
    return [request.prompt.index for request in engine.requests[::NUM_SAMPLES]]


class HeldOpen(Unordered):
    """Ends the groups of the first two tickets, and the others only when two more have been submitted."""

    num_waits = 0

    def step(self) -> list[Trajectory]:
        first = [r for r in self._under_way if r.prompt.index < 102]
        if not first and len(prompts(self)) < 6:
            self.num_waits += 1
            assert self.num_waits < 60_000, "nothing was drawn while other groups were under way"
            time.sleep(0.001)
            return []
        ended = first or self._under_way
        self._under_way = [r for r in self._under_way if r not in ended]
        return self.generate(ended)


def test_a_replacement_starts_while_other_groups_are_under_way() -> None:
    engine = HeldOpen(0, 1)
    found = run([engine], Quota(4, 4, 40, has_signal), lambda ticket: ticket > 1)
    assert sorted(found) == [0, 1, 2, 3, 4, 5]
    assert prompts(engine) == [100, 101, 102, 103, 104, 105]


def test_what_scoring_raises_arrives() -> None:
    def score(trajectory: Trajectory) -> Score:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        collect(Unordered(0, 1), Round(0, Quota(2, 2, 2, has_signal), draw, beside(score), HashStore()), [0, 1])  # type: ignore[arg-type]


def test_a_quota_that_keeps_all_replaces_nothing_is_replaced() -> None:
    found = run([Unordered(0, 3), Unordered(1, 1)], Quota(5, 5, 5, lambda group: True), lambda ticket: False)
    assert sorted(found) == [0, 1, 2, 3, 4]


def test_a_score_that_takes_long_holds_up_its_own_group_only() -> None:
    slow: Future[Score] = Future()
    engine = Unordered(0, 60)

    def score(trajectory: Trajectory) -> Future[Score]:
        if trajectory.prompt.index == 100 and trajectory.sample_index == 1:
            return slow
        if trajectory.prompt.index == 103 and trajectory.sample_index == 2:  # of a replacement: drawn meanwhile
            slow.set_result(Score(1.0))
        known: Future[Score] = Future()
        known.set_result(Score(float(trajectory.sample_index) if trajectory.prompt.index != 101 else 0.0))
        return known

    quota = Quota(3, 3, 9, has_signal)
    found = collect(engine, Round(0, quota, draw, score, HashStore()), range(3)).groups  # type: ignore[arg-type]
    assert sorted(found) == [0, 1, 2, 3]
    assert [score.value for score in found[0].scores] == [0.0, 1.0, 2.0]
