"""What a critic says of the tokens, and what it learns from: advantages, returns and the loss of its values.

Position t of a pack predicts token t + 1, so its value is that of the state before this token is sampled.
Letters in names: T packed tokens of a micro-batch, N learnt tokens among them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.algorithms.pairs import PairShares
from mega_rl.algorithms.preference import bradley_terry_shares
from mega_rl.algorithms.reduce import Denominators, masked_sum, sequence_index, token_mean
from mega_rl.microbatch import Figures, Microbatch


def rewards_at_ends(rewards_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The reward of each sequence [T] at its last learnt token, 0 elsewhere.

    Args:
        rewards_T: [T], the same number at every learnt token of a sequence.
    """
    learnt_N = mask_T.nonzero()[:, 0]
    sequences_N = sequence_index(cu_seqlens, mask_T.numel())[learnt_N]
    is_last_N = torch.ones_like(sequences_N, dtype=torch.bool)
    is_last_N[:-1] = sequences_N[1:] != sequences_N[:-1]
    ends = learnt_N[is_last_N]
    return torch.zeros_like(rewards_T).index_copy(0, ends, rewards_T[ends])


def gae(
    rewards_T: Tensor, values_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [T], float32; 0 where the mask is 0.

    ``delta_t = r_t + gamma * V_{t+1} - V_t``, ``A_t = delta_t + gamma * lam * A_{t+1}``, return ``A_t + V_t``.

    Source: GAE, arXiv 1506.02438, equation 16. t + 1 is the next learnt token of the sequence, whatever stands between
    (the answer of a tool, say); behind the last one value and advantage are 0.

    Computed in float64, in as many additions as the length of the longest sequence has binary digits: the sum over a
    window of 2w tokens is that over w, and that over the next w.

    Args:
        rewards_T: [T], of the tokens that the positions predict.
        mask_T: [T], 1 on learnt tokens.
        cu_seqlens: [B+1] cumulative lengths with the leading 0.
    """
    learnt_N = mask_T.nonzero()[:, 0]
    sequences_N = sequence_index(cu_seqlens, mask_T.numel())[learnt_N]
    values_N = values_T[learnt_N].double()

    def ahead(x_N: Tensor, steps: int) -> Tensor:
        """What stands so many learnt tokens later in the same sequence, or 0."""
        found_N = torch.zeros_like(x_N)
        is_same_N = sequences_N[steps:] == sequences_N[:-steps]
        found_N[:-steps] = torch.where(is_same_N, x_N[steps:], 0.0)
        return found_N

    sums_N, factor, width = rewards_T[learnt_N].double() - values_N, gamma * lam, 1
    if learnt_N.numel():
        sums_N = sums_N + gamma * ahead(values_N, 1)
    longest = int(torch.bincount(sequences_N).max()) if learnt_N.numel() else 0
    while width < longest:
        sums_N = sums_N + factor**width * ahead(sums_N, width)
        width *= 2
    zeros_T = torch.zeros_like(values_T, dtype=torch.float32)
    advantages_T = zeros_T.index_copy(0, learnt_N, sums_N.float())
    return advantages_T, zeros_T.index_copy(0, learnt_N, (sums_N + values_N).float())


@dataclass(frozen=True)
class ValueObjective:
    """``0.5 * max((V - R)^2, (clip(V) - R)^2)``, averaged over the learnt tokens of the global batch (as verl has it).

    ``clip(V)`` keeps V within ``clip`` of what it was before the update (PPO's code, arXiv 2005.12729, section 3).
    """

    clip: float | None  # in units of the reward; None: off

    def __call__(self, values_T: Tensor, microbatch: Microbatch, denominators: Denominators) -> tuple[Tensor, Figures]:
        """Loss [] with gradient, and sums over the learnt tokens.

        The micro-batch must carry ``values`` and ``returns``. Sums: ``clip_fraction``, and of the values before the
        update ``value``, ``return``, ``return_square``, ``error`` (return - value) and ``error_square``.
        """
        old_T, returns_T, mask_T = microbatch.values, microbatch.returns, microbatch.loss_mask
        assert old_T is not None and returns_T is not None, "a critic learns from values and returns"
        losses_T = (values_T - returns_T).square()
        is_clipped_T = torch.zeros_like(losses_T)
        if self.clip is not None:
            clipped_T = (old_T + (values_T - old_T).clamp(-self.clip, self.clip) - returns_T).square()
            is_clipped_T = (clipped_T > losses_T).to(losses_T)
            losses_T = torch.maximum(losses_T, clipped_T)
        loss = 0.5 * token_mean(losses_T, mask_T, microbatch.cu_seqlens, denominators)
        error_T = returns_T - old_T
        figures = {
            "clip_fraction": is_clipped_T,
            "value": old_T,
            "return": returns_T,
            "return_square": returns_T.double().square(),
            "error": error_T,
            "error_square": error_T.double().square(),
        }
        return loss, Figures({name: masked_sum(x_T.detach(), mask_T) for name, x_T in figures.items()})


def values_at_ends(values_T: Tensor, microbatch: Microbatch) -> Tensor:
    """[B] the value of the last position of every sequence, without that of the padding tail."""
    return values_T[microbatch.cu_seqlens[1 : len(microbatch.sequence_indices) + 1].long() - 1]


@dataclass(frozen=True)
class PairwiseObjective:
    """Bradley-Terry on the scores of two answers; a score is the value of a sequence's last token."""

    centre: float  # weight of what keeps scores near 0; 0: off

    def __call__(
        self, values_T: Tensor, microbatch: Microbatch, *, margins_P: Tensor, num_pairs: int
    ) -> tuple[Tensor, Figures]:
        """Loss [] with gradient, and figures to be divided by the number of pairs.

        Args:
            microbatch: of pairs, the chosen answer first.
            margins_P: [pairs of the batch that was packed] by how much the chosen answer should score higher.
            num_pairs: of the global batch.
        """
        margins = margins_P[[index // 2 for index in microbatch.sequence_indices[::2]]]
        scores_P2 = values_at_ends(values_T, microbatch).view(-1, 2)
        return self.of_pairs(scores_P2, margins_P=margins, num_pairs=num_pairs).summed()

    def of_pairs(self, scores_P2: Tensor, *, margins_P: Tensor, num_pairs: int) -> PairShares:
        """The same, pair by pair, of the scores of both answers."""
        chosen, rejected = scores_P2.unbind(1)
        losses_P = bradley_terry_shares(chosen, rejected, margins_P.to(chosen), self.centre, num_pairs)
        figures = {
            "accuracy": (chosen > rejected).to(chosen),
            "margin": chosen - rejected,
            "chosen_score": chosen,
            "rejected_score": rejected,
        }
        return PairShares(losses_P, {name: x.detach() for name, x in figures.items()})


def explained_variance(sums: dict[str, float], num_tokens: int) -> float:
    """``1 - Var(return - value) / Var(return)`` from the sums of ``ValueObjective``; 0 if the returns do not vary."""
    variance = sums["return_square"] / num_tokens - (sums["return"] / num_tokens) ** 2
    of_error = sums["error_square"] / num_tokens - (sums["error"] / num_tokens) ** 2
    return 1.0 - of_error / variance if variance > 1e-12 else 0.0
