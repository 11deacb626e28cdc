"""Advantages against hand calculations and an independent numpy reference."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from hypothesis import given, settings, strategies as st

from mega_rl.algorithms.advantage import (
    ADVANTAGES,
    dr_grpo_advantages,
    grpo_advantages,
    power_sums,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    rloo_advantages,
    turn_advantages,
    whiten,
    with_penalty_to_go,
)

GROUP = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")
NAN = float("nan")


def reference(name: str, rewards: list[float], groups: list[int]) -> numpy.ndarray:
    """Group by group over the known rewards; unknown ones give 0."""
    out = numpy.zeros(len(rewards))
    if name in ("reinforce_pp", "gae"):  # the reward itself
        return numpy.nan_to_num(numpy.array(rewards), nan=0.0)
    for group in set(groups):
        members = [i for i, g in enumerate(groups) if g == group and not math.isnan(rewards[i])]
        values = numpy.array([rewards[i] for i in members])
        if len(values) == 0 or (values == values[0]).all():
            continue
        for i, value in zip(members, values, strict=True):
            if name == "grpo":
                out[i] = (value - values.mean()) / (values.std(ddof=1) + 1e-6)
            elif name == "rloo":
                out[i] = value - (values.sum() - value) / (len(values) - 1)
            else:
                out[i] = value - values.mean()
    return out


def test_by_hand() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 5.0, 3.0], dtype=torch.float64)
    groups = torch.tensor([9, 9, 9, 2, 2])
    std = (1 / 3) ** 0.5  # of 1, 0, 0 with ddof 1: (4/9 + 1/9 + 1/9) / 2 = 1/3
    expected = [2 / 3 / (std + 1e-6), -1 / 3 / (std + 1e-6), -1 / 3 / (std + 1e-6)]
    torch.testing.assert_close(grpo_advantages(rewards, groups)[:3], torch.tensor(expected, dtype=torch.float64))
    assert dr_grpo_advantages(rewards, groups)[3:].tolist() == [1.0, -1.0]
    assert rloo_advantages(rewards, groups).tolist() == pytest.approx([1.0, -0.5, -0.5, 2.0, -2.0])
    assert reinforce_pp_advantages(rewards, groups).tolist() == rewards.tolist()
    assert reinforce_pp_baseline_advantages(rewards, groups).tolist()[3:] == [1.0, -1.0]


def test_turns_by_hand() -> None:
    """Returns with discount 1/2: (0.75, 1.5, 1), (1, 0), (0.5, 1, 2); their means by turn: 0.75, 5/6, 1.5."""
    rewards = [[0.0, 1.0, 1.0], [1.0, 0.0], [0.0, 0.0, 2.0]]
    found = turn_advantages(dr_grpo_advantages, rewards, [4, 4, 4], 0.5)
    assert found == [pytest.approx(of) for of in ([0.0, 2 / 3, -0.5], [0.25, -5 / 6], [-0.25, 1 / 6, 0.5])]
    divided = turn_advantages(grpo_advantages, rewards, [4, 4, 4], 0.5)
    assert divided[1] == pytest.approx([0.25 / (0.25 + 1e-6), -5 / 6 / ((7 / 12) ** 0.5 + 1e-6)])
    assert turn_advantages(reinforce_pp_advantages, rewards, [4, 4, 4], 1.0)[0] == [2.0, 2.0, 1.0]


def test_turns_are_compared_within_their_group_and_with_known_ones_only() -> None:
    rewards = [[1.0, 0.0], [0.0, 0.0], [NAN, NAN, NAN], [5.0, 1.0, 7.0], []]
    found = turn_advantages(dr_grpo_advantages, rewards, [0, 0, 0, 1, 1], 1.0)
    assert found == [[0.5, 0.0], [-0.5, 0.0], [0.0] * 3, [0.0] * 3, []], "alone there is nothing to compare with"
    assert turn_advantages(grpo_advantages, [], [], 1.0) == []


def test_one_turn_is_an_episode() -> None:
    rewards, groups = [0.3, 1.0, 0.1, 2.0, 0.5], [1, 1, 1, 2, 2]
    for name, advantage in ADVANTAGES.items():
        whole = advantage.function(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups)).tolist()
        found = turn_advantages(advantage.function, [[reward] for reward in rewards], groups, 0.9)
        assert [of for (of,) in found] == whole, name


def test_an_unknown_reward_has_no_part_in_its_group() -> None:
    rewards = torch.tensor([1.0, NAN, 0.0, NAN, 5.0], dtype=torch.float64)
    groups = torch.tensor([9, 9, 9, 2, 2])
    assert rloo_advantages(rewards, groups).tolist() == [1.0, 0.0, -1.0, 0.0, 0.0]
    assert dr_grpo_advantages(rewards, groups).tolist() == [0.5, 0.0, -0.5, 0.0, 0.0]
    assert reinforce_pp_advantages(rewards, groups).tolist() == [1.0, 0.0, 0.0, 0.0, 5.0]
    for advantage in ADVANTAGES.values():
        assert advantage.function(torch.full((3,), NAN), torch.tensor([1, 1, 2])).tolist() == [0.0, 0.0, 0.0]


@given(
    st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 0.1, 0.3, 1.0, NAN]), st.integers(0, 3)), min_size=1, max_size=20)
)
@settings(max_examples=60, deadline=None)
def test_equal_the_reference_in_any_order_of_the_batch(batch: list[tuple[float, int]]) -> None:
    rewards, groups = [r for r, _ in batch], [g for _, g in batch]
    for name, advantage in ADVANTAGES.items():
        got = advantage.function(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups)).numpy()
        numpy.testing.assert_allclose(got, reference(name, rewards, groups), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", GROUP)
@pytest.mark.parametrize("size", [1, 3, 5, 7])
@pytest.mark.parametrize("value", [0.1, 0.7, 1 / 3, 1e6 + 0.1])
def test_a_group_of_equal_rewards_gives_exactly_zero(name: str, size: int, value: float) -> None:
    advantages = ADVANTAGES[name].function(torch.full((size,), value), torch.zeros(size, dtype=torch.int64))
    assert advantages.tolist() == [0.0] * size


def test_the_penalty_to_go_by_hand() -> None:
    cu_seqlens = torch.tensor([0, 3, 5, 6], dtype=torch.int32)
    mask = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    advantages, penalties = mask * 2.0, torch.tensor([99.0, 1.0, 2.0, 4.0, -8.0, torch.inf])
    got = with_penalty_to_go(advantages, penalties, mask, cu_seqlens, 0.5)
    assert got.tolist() == [0.0, 2 - 1.5, 2 - 1.0, 2 + 2.0, 2 + 4.0, 0.0]


def test_whitening_by_hand() -> None:
    values, mask = torch.tensor([7.0, 1.0, 3.0, 5.0], dtype=torch.float64), torch.tensor([0.0, 1.0, 1.0, 1.0])
    assert power_sums(values, mask, 0.0).tolist() == [3.0, 9.0, 35.0]
    assert power_sums(values, mask, 3.0).tolist() == [3.0, 0.0, 8.0]
    assert whiten(values, mask, 3.0, 4.0).tolist() == pytest.approx([0.0, -1.0, 0.0, 1.0])
    assert whiten(values * 0 + 0.1, mask, 0.1, 0.0).tolist() == [0.0] * 4  # equal ones: nothing to learn, no NaN
