"""Advantages of one rollout batch: first one number per sample, then what differs from token to token.

A reward that is not known is NaN: its sample gets 0 and has no part in any mean, deviation or baseline.

Letters in names: N completions of the batch, in any order; K distinct groups (prompts) among them; T packed tokens of a
micro-batch; B its sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import torch
from torch import Tensor

from mega_rl.algorithms.own import OwnAdvantage
from mega_rl.own_code import is_own

STD_EPSILON = 1e-6
WHITEN_EPSILON = 1e-8  # under the square root, so that a batch of equal advantages gives 0 and not NaN


def grpo_advantages(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """``(R - mean) / (std + 1e-6)`` within each group, with the sample standard deviation (ddof 1).

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1. A group of equal rewards, one of a single completion
    included, gives exactly 0.

    Args:
        rewards_N: [N] floating, any unit; NaN if unknown.
        groups_N: [N] int64, equal if two completions answer the same prompt; need not be contiguous.

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


def reinforce_pp_advantages(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """``R``, to be whitened over the tokens of the batch (REINFORCE++, arXiv 2501.03262); shapes as `grpo_advantages`.

    There is no baseline but the batch's mean, which `whiten` takes off. With a critic its values come in between
    (`value.gae`).
    """
    assert rewards_N.ndim == 1 and rewards_N.shape == groups_N.shape, (rewards_N.shape, groups_N.shape)
    return torch.where(rewards_N.isnan(), 0.0, rewards_N)


def reinforce_pp_baseline_advantages(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """``R - mean`` within each group, to be whitened over the batch (REINFORCE++-baseline, arXiv 2501.03262)."""
    return _centre(rewards_N, groups_N)[0]


@dataclass(frozen=True)
class Advantage:
    """One value of ``algorithm.advantage``; its function keeps the contract in `own`."""

    function: Callable[[Tensor, Tensor], Tensor]  # rewards [N], groups [N] -> [N]
    is_group_baseline: bool  # compares the samples of one prompt, so that there must be at least two
    is_whitened: bool  # `whiten` comes after it


ADVANTAGES = {
    "gae": Advantage(reinforce_pp_advantages, is_group_baseline=False, is_whitened=True),
    "grpo": Advantage(grpo_advantages, is_group_baseline=True, is_whitened=False),
    "dr_grpo": Advantage(dr_grpo_advantages, is_group_baseline=True, is_whitened=False),
    "rloo": Advantage(rloo_advantages, is_group_baseline=True, is_whitened=False),
    "reinforce_pp": Advantage(reinforce_pp_advantages, is_group_baseline=False, is_whitened=True),
    "reinforce_pp_baseline": Advantage(reinforce_pp_baseline_advantages, is_group_baseline=True, is_whitened=True),
}


def advantage_of(name: str) -> Advantage:
    """What stands behind a value of ``algorithm.advantage``; InputError: a user's own is not there.

    A user's own is taken as it is: it whitens by itself, and says what a group of one learns.
    """
    if is_own(name):
        return Advantage(OwnAdvantage(name), is_group_baseline=False, is_whitened=False)
    return ADVANTAGES[name]


def turn_advantages(
    function: Callable[[Tensor, Tensor], Tensor],
    rewards: Sequence[Sequence[float]],
    groups: Sequence[int],
    discount: float,
) -> list[list[float]]:
    """Advantages of the turns of episodes: returns from a turn on, compared with those of the same turn of the group.

    With rewards ``r_i1 .. r_iK`` of the turns of episode i, the last of which has what the end was rewarded with,

        ``G_ik = sum over j >= k of discount^(j - k) r_ij``,   ``A_ik = function({G_1k, ..., G_nk})_i``

    over those episodes of the group that have a turn k: with `grpo_advantages`, ``(G_ik - mean_k) / (std_k + 1e-6)``.

    Sources: discounted returns of turns as advantages are those of GTPO (arXiv 2511.14846), comparing turn k with turn
    k those of MT-GRPO (arXiv 2505.11821), which normalises rewards of turns and of the end apart and adds them, for
    episodes of equally many turns. Why the same turn: the other samples' returns from turn k on do not depend on what
    was sampled in this turn, so that their mean is a baseline without bias, and with discount 1 returns get smaller
    from turn to turn, so that over all turns early ones would seem good and late ones bad. A turn that a single episode
    of the group has come to is compared with none, and gets 0 if the function compares.

    Args:
        function: of an `Advantage`.
        rewards: of the turns of every episode, any number of each; NaN in all turns of one whose reward is unknown.
        groups: of every episode, equal if two answer the same prompt.
        discount: per turn, in (0, 1].

    Returns:
        As the rewards.
    """
    returns = [returns_to_go(of_episode, discount) for of_episode in rewards]
    keys: dict[tuple[int, int], int] = {}
    places = [
        keys.setdefault((group, turn), len(keys))
        for group, of_episode in zip(groups, rewards, strict=True)
        for turn in range(len(of_episode))
    ]
    flat = torch.tensor([value for of_episode in returns for value in of_episode], dtype=torch.float64)
    found = iter(function(flat, torch.tensor(places)).tolist() if places else [])
    return [list(islice(found, len(of_episode))) for of_episode in rewards]


def returns_to_go(rewards: Sequence[float], discount: float) -> list[float]:
    """``sum over j >= k of discount^(j - k) r_j`` for every k."""
    backwards = accumulate(reversed(rewards), lambda after, reward: reward + discount * after)
    return list(backwards)[::-1]


def with_penalty_to_go(
    advantages_T: Tensor, penalties_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, coefficient: float
) -> Tensor:
    """``A_t - coefficient * sum over i >= t of penalty_i`` within each sequence [T]: a KL as part of the reward.

    Source: REINFORCE++, arXiv 2501.03262, section 3, with discount 1. No baseline is taken off the penalty.

    Args:
        advantages_T: [T].
        penalties_T: [T] nats, an estimate of KL(pi_old || reference) per token; no gradient goes through it.
        mask_T: [T], 1 on learnt tokens; other tokens cost nothing, and get 0.
        cu_seqlens: [B+1] cumulative lengths with the leading 0.
    """
    costs_T = torch.where(mask_T != 0, penalties_T.detach(), 0.0)
    per_sequence = costs_T.split(cu_seqlens.diff().tolist())
    to_go_T = torch.cat([costs.flip(0).cumsum(0).flip(0) for costs in per_sequence])
    return torch.where(mask_T != 0, advantages_T - coefficient * to_go_T, 0.0)


def whiten(advantages_T: Tensor, mask_T: Tensor, mean: float, variance: float) -> Tensor:
    """``(A - mean) / sqrt(variance + 1e-8)`` on learnt tokens [T], 0 elsewhere (REINFORCE++, arXiv 2501.03262).

    Args:
        mean, variance: of the advantages over the learnt tokens of the GLOBAL batch (see `power_sums`).
    """
    return torch.where(mask_T != 0, (advantages_T - mean) / (variance + WHITEN_EPSILON) ** 0.5, 0.0)


def power_sums(advantages_T: Tensor, mask_T: Tensor, centre: float) -> Tensor:
    """``[count, sum of (A - centre), sum of (A - centre)^2]`` of learnt tokens, float64 [3], which add up."""
    learnt = (advantages_T[mask_T != 0]).double() - centre
    return torch.stack([learnt.new_tensor(float(learnt.numel())), learnt.sum(), learnt.square().sum()])


def _centre(rewards_N: Tensor, groups_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards less their group's mean [N], the group's position of each [N], and how many are known per group [K]."""
    assert rewards_N.ndim == 1 and rewards_N.shape == groups_N.shape, (rewards_N.shape, groups_N.shape)
    group_ids_K, index_N = torch.unique(groups_N, return_inverse=True)
    is_known_N = ~rewards_N.isnan()
    zeros_K = rewards_N.new_zeros(group_ids_K.numel())
    count_K = zeros_K.index_add(0, index_N, is_known_N.to(rewards_N.dtype))
    mean_K = zeros_K.index_add(0, index_N, torch.where(is_known_N, rewards_N, 0.0)) / count_K.clamp_min(1)
    # The mean of equal numbers can differ from them in the last bit, which the division by std + 1e-6 would magnify.
    known, known_index = rewards_N[is_known_N], index_N[is_known_N]
    low_K = zeros_K.scatter_reduce(0, known_index, known, "amin", include_self=False)
    high_K = zeros_K.scatter_reduce(0, known_index, known, "amax", include_self=False)
    mean_K = torch.where(low_K == high_K, low_K, mean_K)
    return torch.where(is_known_N, rewards_N - mean_K[index_N], 0.0), index_N, count_K
