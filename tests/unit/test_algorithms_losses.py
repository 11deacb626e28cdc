"""Per-token terms: clipped loss, KL estimators and importance weights, against numbers worked out by hand or numpy."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_rl.algorithms.correction import truncated_importance_weights
from mega_rl.algorithms.kl import KL_ESTIMATORS, k3
from mega_rl.algorithms.policy_loss import ppo_clip_loss


def clip_loss(ratio: float, advantage: float, dual_clip: float | None = None) -> tuple[float, float, dict[str, float]]:
    """Loss, its gradient with respect to logp, and figures, of one token with bounds 0.8 and 1.28."""
    logprobs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    old, advantages = torch.zeros(1, dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    loss, figures = ppo_clip_loss(logprobs, old, advantages, 0.2, 0.28, dual_clip)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    return loss.item(), gradient.item(), {name: value.item() for name, value in figures.items()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, 0),
        (1.2, 2.0, -2.4, -2.4, 0),  # inside the wider upper bound
        (1.5, 2.0, -2.56, 0.0, 1),  # -1.28 * 2
        (0.5, 2.0, -1.0, -1.0, 0),  # too improbable and good: never clipped
        (0.5, -2.0, 1.6, 0.0, 1),  # 0.8 * 2
        (1.5, -2.0, 3.0, 3.0, 0),  # too probable and bad: never clipped
    ],
)
def test_clipped_loss_by_hand(ratio: float, advantage: float, loss: float, gradient: float, clipped: int) -> None:
    got_loss, got_gradient, figures = clip_loss(ratio, advantage)
    assert (got_loss, got_gradient) == pytest.approx((loss, gradient))
    assert figures == pytest.approx(
        {"ratio": ratio, "ppo_kl": -math.log(ratio), "clip_fraction": clipped, "dual_clip_fraction": 0}
    )


def test_dual_clip_bounds_only_bad_tokens() -> None:
    assert clip_loss(5.0, -2.0)[:2] == pytest.approx((10.0, 10.0))
    loss, gradient, figures = clip_loss(5.0, -2.0, dual_clip=3.0)
    assert (loss, gradient, figures["dual_clip_fraction"]) == pytest.approx((6.0, 0.0, 1.0))
    assert clip_loss(2.0, -2.0, dual_clip=3.0)[:2] == pytest.approx((4.0, 4.0))
    assert clip_loss(0.1, 2.0, dual_clip=3.0)[0] == pytest.approx(clip_loss(0.1, 2.0)[0])


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("log_ratio", [-1000.0, 1000.0])
def test_extreme_ratios_keep_loss_and_gradient_finite(advantage: float, log_ratio: float) -> None:
    logprobs = torch.tensor([log_ratio], requires_grad=True)
    loss, _ = ppo_clip_loss(logprobs, torch.zeros(1), torch.tensor([advantage]), 0.2, 0.2)
    loss.sum().backward()
    assert logprobs.grad is not None and loss.isfinite().all() and logprobs.grad.isfinite().all()


def test_kl_estimators_by_hand() -> None:
    logprobs, reference = torch.tensor([-1.0], dtype=torch.float64), torch.tensor([-1.5], dtype=torch.float64)
    got = {name: estimator(logprobs, reference).item() for name, estimator in KL_ESTIMATORS.items()}
    assert got == pytest.approx({"k1": 0.5, "k2": 0.125, "k3": math.exp(-0.5) + 0.5 - 1})


@given(st.floats(-1e4, 1e4, width=32), st.floats(-1e4, 1e4, width=32))
@settings(max_examples=200, deadline=None)
def test_k3_is_finite_and_never_negative(logprob: float, reference: float) -> None:
    logprobs = torch.tensor([logprob], requires_grad=True)
    value = k3(logprobs, torch.tensor([reference]))
    value.sum().backward()
    assert logprobs.grad is not None and value.item() >= 0 and value.isfinite().all() and logprobs.grad.isfinite().all()


@pytest.mark.parametrize("difference", [1e-3, -1e-3, 1e-2, 0.3])
def test_k3_keeps_its_digits_in_float32_where_the_policies_nearly_agree(difference: float) -> None:
    value = k3(torch.tensor([difference]), torch.zeros(1)).item()
    rounded = numpy.longdouble(numpy.float32(difference))
    exact = float(numpy.expm1(-rounded) + rounded)
    assert value == pytest.approx(exact, rel=2e-3 if abs(difference) < 1e-2 else 1e-4)


def test_k3_and_k1_are_unbiased_for_a_categorical_policy() -> None:
    policy, reference = torch.tensor([0.6, 0.3, 0.1]).double(), torch.tensor([0.2, 0.5, 0.3]).double()
    kl = (policy * (policy / reference).log()).sum().item()
    for name in ("k1", "k3"):
        assert (policy * KL_ESTIMATORS[name](policy.log(), reference.log())).sum().item() == pytest.approx(kl)


def test_importance_weights_are_truncated_above_only_and_detached() -> None:
    old = torch.log(torch.tensor([0.5, 0.3, 0.9])).requires_grad_()
    rollout = torch.log(torch.tensor([0.25, 0.6, 0.1]))
    weights = truncated_importance_weights(old, rollout, 2.0)
    assert not weights.requires_grad
    assert weights.tolist() == pytest.approx([2.0, 0.5, 2.0])
    assert truncated_importance_weights(torch.tensor([900.0]), torch.zeros(1), 2.0).tolist() == pytest.approx([2.0])
