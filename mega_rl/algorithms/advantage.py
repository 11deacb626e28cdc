"""Group-relative advantages of one rollout batch.

Letters in names: N completions of the batch, in any order; K distinct groups (prompts) among them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

STD_EPSILON = 1e-6


def grpo_advantages(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """``(R - mean) / (std + 1e-6)`` within each group, with the sample standard deviation (ddof 1).

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1. A group of equal rewards, one of a single completion
    included, gives exactly 0.

    Args:
        rewards_N: [N] floating, any unit.
        groups_N: [N] int64, equal where two completions answer the same prompt; need not be contiguous.

    Returns:
        [N] in the dtype of the rewards.
    """
    centred_N, index_N, count_K = _centre(rewards_N, groups_N)
    square_sum_K = torch.zeros_like(count_K).index_add(0, index_N, centred_N.square())
    std_K = (square_sum_K / (count_K - 1).clamp_min(1)).sqrt()
    return centred_N / (std_K[index_N] + STD_EPSILON)


def dr_grpo_advantages(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """``R - mean`` within each group (Dr.GRPO, arXiv 2503.20783); shapes as `grpo_advantages`."""
    return _centre(rewards_N, groups_N)[0]


def rloo_advantages(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """``R - mean of the other rewards of the group`` (RLOO, arXiv 2402.14740); shapes as `grpo_advantages`.

    Equal to ``(R - mean) * n / (n - 1)`` for a group of n; a group of one has no others and gives 0.
    """
    centred_N, index_N, count_K = _centre(rewards_N, groups_N)
    return centred_N * (count_K / (count_K - 1).clamp_min(1))[index_N]


ADVANTAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "grpo": grpo_advantages,
    "dr_grpo": dr_grpo_advantages,
    "rloo": rloo_advantages,
}


def _centre(rewards_N: Tensor, groups_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards less their group's mean [N], the group's position of each [N], and the groups' sizes [K]."""
    assert rewards_N.ndim == 1 and rewards_N.shape == groups_N.shape, (rewards_N.shape, groups_N.shape)
    group_ids_K, index_N = torch.unique(groups_N, return_inverse=True)
    zeros_K = rewards_N.new_zeros(group_ids_K.numel())
    count_K = zeros_K.index_add(0, index_N, torch.ones_like(rewards_N))
    mean_K = zeros_K.index_add(0, index_N, rewards_N) / count_K
    # The mean of equal numbers can differ from them in the last bit, which the division by std + 1e-6 would magnify.
    low_K = zeros_K.scatter_reduce(0, index_N, rewards_N, "amin", include_self=False)
    high_K = zeros_K.scatter_reduce(0, index_N, rewards_N, "amax", include_self=False)
    mean_K = torch.where(low_K == high_K, low_K, mean_K)
    return rewards_N - mean_K[index_N], index_N, count_K
