"""Nothing is lost and nothing counts twice in a whole fleet whose engines die."""

from __future__ import annotations

import pytest

from mega_rl.fleet.tickets import Rules
from mega_rl.rollout.remote.fleet.ray_executor import MANY_WORKERS, MAX_STEPS, NUM_AHEAD
from tests.pretended.remote.large_fleet import EXPERTS, STEP_S, run_fleet

SHAPE = 64  # bytes by which what is told of a response may be longer that has experts


def test_tokens_and_experts_go_past_rank_0_where_the_trainer_has_several_nodes() -> None:
    """What rank 0 is told does not grow with the experts; whatever nobody heard of is forgotten with its step."""
    rules = Rules(20, 16, 2, eta=1, budget=40)
    one, four = (run_fleet(64, rules, 12, 0.5, nodes, with_routing=True) for nodes in (1, 4))
    dense = run_fleet(64, rules, 12, 0.5, num_nodes=4)
    for found in (one, four, dense):
        assert found.num_responses == 640 and found.num_deaths == 12
        assert (found.num_lost, found.num_doubled, found.num_wrong) == (0, 0, 0)
    assert four.num_bytes - dense.num_bytes < SHAPE * four.num_handed, "bytes to rank 0"
    assert one.num_bytes > 640 * EXPERTS.nbytes > 5 * four.num_bytes
    assert one.num_handed == 0 and four.num_handed == four.num_forgotten >= 640


@pytest.mark.parametrize(
    ("num_engines", "num_groups", "num_steps", "num_deaths"),
    [(64, 20, 2, 12), pytest.param(1024, 640, 1, 100, marks=pytest.mark.slow)],
)
def test_every_response_is_learned_from_once_though_engines_die(
    num_engines: int, num_groups: int, num_steps: int, num_deaths: int
) -> None:
    rules = Rules(num_groups, 16, num_steps, eta=1, budget=2 * num_groups)
    found = run_fleet(num_engines, rules, num_deaths, death_each_s=0.5)
    assert found.num_deaths == num_deaths and found.num_responses == 16 * num_groups * num_steps
    assert (found.num_lost, found.num_doubled, found.num_wrong) == (0, 0, 0)
    of_waiting = found.time_s * min(num_engines, MANY_WORKERS) / (MAX_STEPS * STEP_S)  # calls that end by themselves
    of_work = NUM_AHEAD * 2 * found.num_responses + 10 * (num_engines + num_deaths)  # dropped groups included
    assert found.num_calls < of_waiting + of_work, "calls of workers"
