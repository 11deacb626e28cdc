"""A two-armed bandit sampled under noise: without correction the gradient is biased, with it it is the true one.

The policy is ``softmax(w * theta)`` with a clean w; it samples with ``w + Z`` (`draw`). Every expectation over arms is
exact: each arm is one token whose advantage is weighted with the probability that the noisy policy samples it.
"""

from __future__ import annotations

import numpy
import pytest
import torch

from mega_rl.algorithms.objective import PolicyObjective
from mega_rl.algorithms.reduce import Denominators
from mega_rl.bridge.outgoing.noise import draw
from mega_rl.microbatch import Microbatch, TokenStats

THETA = (1.5, -1.0)
REWARDS = (1.0, 0.0)
SIGMA = 1.0
NUM_VERSIONS = 500


def log_policy(theta: torch.Tensor, version: int | None = None) -> torch.Tensor:
    """Log-probabilities [2] of the arms, clean or with the noise of a weight version."""
    gain = torch.ones(2, dtype=torch.float64)
    if version is not None:
        noise = draw(1234, version, "model.layers.0.input_layernorm.weight", (2,)) * numpy.float32(SIGMA)
        gain = gain + torch.from_numpy(noise).double()
    return torch.log_softmax(gain * theta, 0)


def objective(importance_cap: float | None) -> PolicyObjective:
    return PolicyObjective(
        clip_low=0.99,  # no ratio here comes near the bounds: the correction alone is looked at
        clip_high=1e6,
        dual_clip=None,
        kl_coefficient=0.0,
        kl_estimator="k3",
        entropy_coefficient=0.0,
        importance_cap=importance_cap,
        reduction="token_mean",
    )


def expected_gradient(old_logprobs: str, version: int) -> torch.Tensor:
    """Of the reward, as ``aqn.old_logprobs`` estimates it from samples of one noisy version: [2]."""
    theta = torch.tensor(THETA, dtype=torch.float64, requires_grad=True)
    logprobs, behaviour = log_policy(theta), log_policy(theta.detach(), version)
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    advantages = (rewards - behaviour.exp() @ rewards) * behaviour.exp()  # the mean of a large group is the baseline
    empty = torch.zeros(2, dtype=torch.int64)
    microbatch = Microbatch(
        token_ids=empty,
        target_ids=empty,
        position_ids=empty,
        loss_mask=torch.ones(2, dtype=torch.float64),
        cu_seqlens=torch.tensor([0, 1, 2], dtype=torch.int32),
        max_seqlen=1,
        sequence_indices=(0, 1),
        advantages=advantages,
        rollout_logprobs=behaviour,
        old_logprobs=behaviour if old_logprobs in ("rollout", "recompute_noisy") else None,
    )
    cap = None if old_logprobs in ("rollout", "none") else 1e6
    denominators = Denominators(num_tokens=1, num_sequences=2, max_response_tokens=1)
    loss, _ = objective(cap)(TokenStats(logprobs, torch.zeros_like(logprobs)), microbatch, denominators)
    loss.backward()
    return -theta.grad


def finite_differences() -> torch.Tensor:
    """The true gradient of the clean policy's expected reward."""
    step, gradient = 1e-6, []
    for i in range(2):
        shift = torch.zeros(2, dtype=torch.float64)
        shift[i] = step
        up, down = (log_policy(torch.tensor(THETA, dtype=torch.float64) + s * shift).exp() for s in (1, -1))
        gradient.append(((up - down) @ torch.tensor(REWARDS, dtype=torch.float64)) / (2 * step))
    return torch.stack(gradient)


@pytest.mark.parametrize("old_logprobs", ["decoupled", "rollout", "recompute_noisy"])
def test_corrected_gradients_are_the_true_one(old_logprobs: str) -> None:
    for version in range(20):
        assert torch.allclose(expected_gradient(old_logprobs, version), finite_differences(), rtol=0, atol=1e-9)


def test_the_uncorrected_gradient_is_biased() -> None:
    """Not only for one draw, which could cancel: the mean over draws is off by many standard errors."""
    truth = finite_differences()
    errors = torch.stack([expected_gradient("none", version) - truth for version in range(NUM_VERSIONS)])
    assert errors.abs().amax(1).median() > 0.3 * truth.abs().max()
    mean, standard_error = errors.mean(0), errors.std(0) / NUM_VERSIONS**0.5
    assert (mean.abs() > 4 * standard_error).all() and (mean.abs() > 0.2 * truth.abs()).all(), (mean, standard_error)
