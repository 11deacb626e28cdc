"""GAE against the recursion in float64, and the value loss against autograd on the formula."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from mega_rl.algorithms.pairs import AnswersApart
from mega_rl.algorithms.reduce import Denominators
from mega_rl.algorithms.value import (
    PairwiseObjective,
    ValueObjective,
    explained_variance,
    gae,
    rewards_at_ends,
    values_at_ends,
)
from mega_rl.microbatch import Microbatch


def loop(
    rewards: Tensor, values: Tensor, mask: Tensor, cu_seqlens: list[int], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """Equation 16 of arXiv 1506.02438, token by token from the end, over learnt tokens only."""
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for start, end in zip(cu_seqlens, cu_seqlens[1:], strict=False):
        next_value = carry = 0.0
        for t in reversed(range(start, end)):
            if mask[t]:
                carry = float(rewards[t]) + gamma * next_value - float(values[t]) + gamma * lam * carry
                next_value = float(values[t])
                advantages[t], returns[t] = carry, carry + next_value
    return advantages, returns


@st.composite
def packs(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    lengths = draw(st.lists(st.integers(1, 13), min_size=1, max_size=5))
    total = sum(lengths)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    mask = torch.tensor(draw(st.lists(st.booleans(), min_size=total, max_size=total))).float()
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    rewards, values = torch.randn(2, total, generator=generator, dtype=torch.float64)
    return rewards, values, mask, ends


@settings(max_examples=100, deadline=None)
@given(packs(), st.sampled_from([1.0, 0.99, 0.5]), st.sampled_from([1.0, 0.95, 0.0]))
def test_gae_is_the_recursion(pack: tuple[Tensor, Tensor, Tensor, list[int]], gamma: float, lam: float) -> None:
    rewards, values, mask, ends = pack
    advantages, returns = gae(rewards, values, mask, torch.tensor(ends, dtype=torch.int32), gamma, lam)
    expected = loop(rewards, values, mask, ends, gamma, lam)
    assert advantages.tolist() == pytest.approx(expected[0], abs=1e-5)
    assert returns.tolist() == pytest.approx(expected[1], abs=1e-5)
    assert not advantages[mask == 0].any() and not returns[mask == 0].any()


def test_without_a_critic_and_a_discount_the_advantage_is_the_return() -> None:
    rewards, mask = torch.tensor([0.0, 3.0, 3.0, 3.0, -2.0, -2.0]), torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    ends = torch.tensor([0, 4, 6], dtype=torch.int32)
    at_ends = rewards_at_ends(rewards, mask, ends)
    assert at_ends.tolist() == [0.0, 0.0, 0.0, 3.0, 0.0, -2.0]
    advantages, returns = gae(at_ends, torch.zeros(6), mask, ends, gamma=1.0, lam=1.0)
    assert advantages.tolist() == returns.tolist() == rewards.tolist()


def test_a_reward_stands_at_the_last_learnt_token_whatever_follows_it() -> None:
    mask, ends = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]), torch.tensor([0, 4, 6, 7], dtype=torch.int32)
    assert rewards_at_ends(mask * 2.0, mask, ends).tolist() == [0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 2.0]
    nothing = torch.zeros(7)
    assert (
        not rewards_at_ends(nothing, nothing, ends).any() and not gae(nothing, mask, nothing, ends, 1.0, 1.0)[0].any()
    )


def microbatch(values: Tensor, returns: Tensor, mask: Tensor) -> Microbatch:
    n = len(mask)
    ids = torch.zeros(n, dtype=torch.int64)
    ends = torch.tensor([0, n], dtype=torch.int32)
    return Microbatch(ids, ids, ids, mask, ends, n, (0,), values=values, returns=returns)


@pytest.mark.parametrize("clip", [0.2, None])
def test_the_loss_and_its_gradient(clip: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    old, returns = torch.randn(2, 9, generator=generator, dtype=torch.float64)
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    values = (old + 0.5 * torch.randn(9, generator=generator, dtype=torch.float64)).requires_grad_()
    loss, figures = ValueObjective(clip)(values, microbatch(old, returns, mask), Denominators(14, 1, 9))
    expected = torch.zeros((), dtype=torch.float64)
    num_clipped = 0
    for t in range(9):
        plain = (values[t] - returns[t]) ** 2
        bounded = plain if clip is None else (old[t] + (values[t] - old[t]).clamp(-clip, clip) - returns[t]) ** 2
        expected = expected + 0.5 * mask[t] * torch.maximum(plain, bounded) / 14
        num_clipped += int(bounded > plain) * int(mask[t])
    torch.testing.assert_close(loss, expected)
    (gradient,), (wanted,) = torch.autograd.grad(loss, values), torch.autograd.grad(expected, values)
    torch.testing.assert_close(gradient, wanted)
    assert int(figures.sums["clip_fraction"]) == num_clipped and (num_clipped > 0) == (clip is not None)
    learnt = mask != 0
    variance = 1 - (returns - old)[learnt].var(correction=0) / returns[learnt].var(correction=0)
    sums = {name: float(value) for name, value in figures.sums.items()}
    assert explained_variance(sums, 7) == pytest.approx(float(variance))


def test_scores_of_answers_that_lie_apart_are_learnt_from_as_those_of_pairs() -> None:
    lengths = [3, 2, 4, 1, 2, 5]
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(n, generator=generator, dtype=torch.float64) for n in lengths]
    margins = torch.tensor([0.0, 0.5, 1.0])

    def learnt(loss: Any, packing: list[list[int]]) -> tuple[Tensor, dict[str, float]]:
        own, sums = [v.clone().requires_grad_() for v in values], dict[str, float]()
        for indices in packing:
            values_T = torch.cat([*(own[i] for i in indices), torch.full((2,), 9.0)])
            ends = torch.tensor([0, *(lengths[i] for i in indices), 2]).cumsum(0).int()
            ids = torch.zeros(len(values_T), dtype=torch.int64)
            share, figures = loss(values_T, Microbatch(ids, ids, ids, ids.float(), ends, 5, tuple(indices)))
            (share + 0 * sum(v.sum() for v in own)).backward()
            for name, value in {"loss": share.detach(), **figures.sums}.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        return torch.cat([v.grad for v in own if v.grad is not None]), sums

    objective = PairwiseObjective(centre=0.1)
    settings = {"margins_P": margins, "num_pairs": 3}
    together, sums = learnt(partial(objective, **settings), [[2, 3], [0, 1, 4, 5]])
    scores_B = torch.stack([v[-1] for v in values])
    apart = AnswersApart(partial(objective.of_pairs, **settings), scores_B, values_at_ends)
    for packing in ([[0, 1, 2, 3, 4, 5]], [[5, 0], [3], [], [1, 4, 2]]):
        own, own_sums = learnt(apart, packing)
        assert float((own - together).abs().max()) <= 1e-12
        assert own_sums == pytest.approx(sums, abs=1e-12)


def test_returns_that_do_not_vary_explain_nothing() -> None:
    sums = {"return": 4.0, "return_square": 8.0, "error": 1.0, "error_square": 3.0}
    assert explained_variance(sums, 2) == 0.0
