"""Per-token terms: clipped loss, KL estimators and importance weights, against numbers worked out by hand or numpy."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from hypothesis import given, settings, strategies as st

from mega_rl.algorithms.correction import masked_weights, sequence_log_weights, token_log_weights, truncated_weights
from mega_rl.algorithms.kl import KL_ESTIMATORS, k3
from mega_rl.algorithms.policy_loss import cispo_loss, gspo_loss, ppo_clip_loss


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


def test_gspo_by_hand() -> None:
    """Two sequences of two learnt tokens: s = exp(0.0004) and exp(-0.0008), outside and inside of 3e-4 and 4e-4."""
    logprobs = torch.tensor([7.0, -0.9996, -0.9996, -1.0003, -1.0013], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([1.0, -1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    advantages = torch.tensor([9.0, 2.0, 2.0, 3.0, 3.0], dtype=torch.float64)
    mask = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    cu_seqlens = torch.tensor([0, 3, 5], dtype=torch.int32)
    loss, figures = gspo_loss(logprobs, old, advantages, mask, cu_seqlens, 3e-4, 4e-4)
    low = math.exp(-0.0008)  # below 1 - 3e-4, but with a good advantage nothing is clipped there
    assert loss[1:].tolist() == pytest.approx([-1.0004 * 2, -1.0004 * 2, -low * 3, -low * 3], rel=1e-12)
    assert figures["clip_fraction"][1:].tolist() == [1.0, 1.0, 0.0, 0.0]
    assert figures["ratio"][1:].tolist() == pytest.approx([math.exp(0.0004)] * 2 + [low] * 2, rel=1e-12)
    (gradient,) = torch.autograd.grad((loss * mask)[3:].mean(), logprobs)  # of one sequence's mean: s A / its length
    assert gradient.tolist() == pytest.approx([0.0, 0.0, 0.0, -low * 3 / 2, -low * 3 / 2], rel=1e-12)


def test_gspo_differs_from_a_ratio_per_token() -> None:
    """Ratios 2 and 1/2 cancel: s is 1, where PPO would clip both tokens' gains."""
    logprobs = torch.log(torch.tensor([1.0, 0.25], dtype=torch.float64))
    old, advantages = torch.log(torch.tensor([0.5, 0.5], dtype=torch.float64)), torch.ones(2, dtype=torch.float64)
    cu_seqlens = torch.tensor([0, 2], dtype=torch.int32)
    loss, figures = gspo_loss(logprobs, old, advantages, torch.ones(2).double(), cu_seqlens, 3e-4, 4e-4)
    assert loss.tolist() == pytest.approx([-1.0, -1.0]) and figures["clip_fraction"].sum() == 0
    assert ppo_clip_loss(logprobs, old, advantages, 3e-4, 4e-4)[0].tolist() == pytest.approx([-1.0004, -0.5])


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "clipped"),
    [(1.5, 2.0, 1.28, 1), (0.5, 2.0, 0.8, 1), (1.1, -2.0, 1.1, 0), (1.5, -2.0, 1.28, 1)],
)
def test_cispo_keeps_the_gradient_of_clipped_tokens(
    ratio: float, advantage: float, weight: float, clipped: int
) -> None:
    old = torch.tensor([-2.0], dtype=torch.float64)
    logprobs = (old + math.log(ratio)).requires_grad_()
    loss, figures = cispo_loss(logprobs, old, torch.tensor([advantage], dtype=torch.float64), 0.2, 0.28)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert loss.item() == pytest.approx(-weight * advantage * (-2.0 + math.log(ratio)))
    assert gradient.item() == pytest.approx(-weight * advantage)
    assert figures["clip_fraction"].item() == clipped and figures["ratio"].item() == pytest.approx(ratio)


def test_cispo_without_a_lower_bound_and_with_extreme_ratios() -> None:
    logprobs = torch.tensor([-1000.0, 0.0, -3.0], requires_grad=True)
    old = torch.tensor([0.0, -1000.0, -3.0])
    loss, figures = cispo_loss(logprobs, old, torch.ones(3), 1.0, 0.28)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert gradient.tolist() == pytest.approx([-math.exp(-20.0), -1.28, -1.0])
    assert figures["clip_fraction"].tolist() == [0.0, 1.0, 0.0]


CU_SEQLENS, MASK = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])
OLD = torch.log(torch.tensor([0.5, 0.3, 0.9, 0.4, 0.4]))
ROLLOUT = torch.log(torch.tensor([0.25, 0.6, 0.1, 0.2, 0.2]))


def test_log_weights_of_tokens_and_of_sequences() -> None:
    old = OLD.clone().requires_grad_()
    per_token = token_log_weights(old, ROLLOUT, MASK, CU_SEQLENS)
    assert not per_token.requires_grad
    assert per_token.exp().tolist() == pytest.approx([2.0, 0.5, 9.0, 2.0, 2.0])
    per_sequence = sequence_log_weights(old, ROLLOUT, MASK, CU_SEQLENS)
    assert not per_sequence.requires_grad
    assert per_sequence.exp().tolist() == pytest.approx([1.0, 1.0, 4.0, 4.0, 4.0])  # what is not learnt has no part


def test_weights_are_truncated_above_only() -> None:
    log_weights = torch.log(torch.tensor([2.5, 0.5, 9.0, 1e-3]))
    weights, bounded = truncated_weights(log_weights, 0.0, 2.0)
    assert weights.tolist() == pytest.approx([2.0, 0.5, 2.0, 1e-3])
    assert bounded.tolist() == [True, False, True, False]
    assert truncated_weights(torch.tensor([900.0]), 0.0, 2.0)[0].tolist() == pytest.approx([2.0])


def test_weights_outside_the_bounds_are_masked() -> None:
    log_weights = torch.log(torch.tensor([2.5, 0.5, 1.9, 0.4, 1e-3]))
    weights, outside = masked_weights(log_weights, 0.45, 2.0)
    assert weights.tolist() == pytest.approx([0.0, 0.5, 1.9, 0.0, 0.0])
    assert outside.tolist() == [True, False, False, True, True]
    assert masked_weights(log_weights, 0.0, 2.0)[0].tolist() == pytest.approx([0.0, 0.5, 1.9, 0.4, 1e-3])
    assert masked_weights(torch.tensor([900.0, -900.0]), 0.0, 2.0)[0].tolist() == [0.0, 0.0]


def test_the_mean_gradient_of_k1_is_nothing_and_that_of_k2_the_kls() -> None:
    logits = torch.tensor([0.3, -1.0, 0.7, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([1.0, 0.2, -0.5, 0.0], dtype=torch.float64), 0)
    logprobs = torch.log_softmax(logits, 0)
    probabilities = logprobs.exp()
    gradients = {}
    for name in ("k1", "k2"):
        mean = (probabilities.detach() * KL_ESTIMATORS[name](logprobs, reference)).sum()
        (gradients[name],) = torch.autograd.grad(mean, logits, retain_graph=True)
    (exact,) = torch.autograd.grad((probabilities * (logprobs - reference)).sum(), logits)
    assert gradients["k1"].abs().max() < 1e-15 and exact.abs().max() > 0.1
    torch.testing.assert_close(gradients["k2"], exact)
