"""Objectives on preferences: pairs of answers (DPO and its family), judged answers (KTO), scores (Bradley-Terry).

As all objectives they return shares that are divided by counts of the global batch (see `reduce`): they add up over
micro-batches and data-parallel ranks, whatever the split, as long as both answers of a pair lie in one micro-batch; for
answers that lie apart see ``pairs``.

Letters in names: T packed tokens of a micro-batch, B its sequences without the padding tail, P pairs of sequences:
2i is the chosen answer, 2i + 1 the rejected one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_rl.algorithms.pairs import PairShares
from mega_rl.algorithms.reduce import sequence_index
from mega_rl.microbatch import Figures, Microbatch, TokenStats


def answer_sums(values_T: Tensor, microbatch: Microbatch) -> Tensor:
    """[B] sums of the values over the learnt tokens of every sequence."""
    mask_T, cu_seqlens = microbatch.loss_mask, microbatch.cu_seqlens
    learnt_T = torch.where(mask_T != 0, values_T, 0.0) * mask_T
    index_T = sequence_index(cu_seqlens, values_T.numel())
    sums = learnt_T.new_zeros(cu_seqlens.numel() - 1).index_add(0, index_T, learnt_T)
    return sums[: len(microbatch.sequence_indices)]


@dataclass(frozen=True)
class Answers:
    """Both answers of the pairs, as a formula sees them; [P] each.

    Nats, summed over the tokens of the answer, or averaged for the formulas of ``AVERAGED``.
    """

    chosen: Tensor  # log-probabilities under the policy
    rejected: Tensor
    chosen_ratio: Tensor  # the same less those under the reference; without a reference the same
    rejected_ratio: Tensor

    @property
    def margin(self) -> Tensor:
        return self.chosen_ratio - self.rejected_ratio


@dataclass(frozen=True, kw_only=True)
class PreferenceObjective:
    """A loss on pairs, and ``sft_coefficient`` times the negative log-likelihood of the chosen answers per token."""

    loss: str = "sigmoid"  # a key of PAIR_LOSSES
    beta: float = 0.1  # how much the policy may leave the reference: the larger, the less
    label_smoothing: float = 0.0  # share of pairs whose verdict is taken to be wrong; sigmoid, robust and simpo
    simpo_gamma: float = 0.5  # target margin of simpo, in units of its reward
    sft_coefficient: float = 0.0

    def __post_init__(self) -> None:
        assert self.loss in PAIR_LOSSES and self.beta > 0, self

    @property
    def needs_reference(self) -> bool:
        return self.loss not in REFERENCE_FREE

    def pair_losses(self, answers: Answers) -> Tensor:
        """[P]."""
        return PAIR_LOSSES[self.loss](self, answers)

    def __call__(
        self,
        stats: TokenStats,
        microbatch: Microbatch,
        *,
        reference_B: Tensor | None,
        num_pairs: int,
        num_chosen_tokens: int,
    ) -> tuple[Tensor, Figures]:
        """Loss [] with gradient, and figures to be divided by the number of pairs.

        Args:
            reference_B: [sequences of the batch that was packed] log-probabilities of the answers under the reference,
                summed; None: the loss needs none.
            num_pairs: of the global batch.
            num_chosen_tokens: learnt tokens of its chosen answers.
        """
        num_tokens_B = answer_sums(torch.ones_like(microbatch.loss_mask), microbatch)
        sums_B = answer_sums(stats.logprobs, microbatch)
        chosen = list(microbatch.sequence_indices)
        return self.of_pairs(
            sums_B.view(-1, 2),
            num_tokens_P2=num_tokens_B.view(-1, 2),
            reference_P2=None if reference_B is None else reference_B[chosen].view(-1, 2),
            num_pairs=num_pairs,
            num_chosen_tokens=num_chosen_tokens,
        ).summed()

    def of_pairs(
        self,
        sums_P2: Tensor,
        *,
        num_tokens_P2: Tensor,
        reference_P2: Tensor | None,
        num_pairs: int,
        num_chosen_tokens: int,
    ) -> PairShares:
        """The same, pair by pair.

        Args:
            sums_P2: log-probabilities of both answers, summed over their tokens.
            num_tokens_P2: how many tokens these are.
            reference_P2: as ``reference_B`` above.
        """
        policy, reference, num_tokens = sums_P2, torch.zeros_like(sums_P2), num_tokens_P2.to(sums_P2)
        if self.needs_reference:
            assert reference_P2 is not None, f"{self.loss} compares with a reference"
            reference = reference_P2.to(sums_P2)
        ratios_P2 = policy - reference
        if self.loss in AVERAGED:
            policy, ratios_P2 = policy / num_tokens.clamp_min(1), ratios_P2 / num_tokens.clamp_min(1)
        answers = Answers(*policy.unbind(1), *ratios_P2.unbind(1))
        losses_P, chosen_P = self.pair_losses(answers), sums_P2[:, 0]
        shares_P = losses_P / num_pairs
        coefficient = 1.0 if self.loss == "orpo" else self.sft_coefficient  # ORPO is its own supervised part
        if coefficient:
            shares_P = shares_P - coefficient * chosen_P / num_chosen_tokens
        rewards_P2 = self.beta * ratios_P2.detach()
        figures = {
            "preference_loss": losses_P.detach(),
            "chosen_reward": rewards_P2[:, 0],
            "rejected_reward": rewards_P2[:, 1],
            "accuracy": (rewards_P2[:, 0] > rewards_P2[:, 1]).to(rewards_P2),
            "margin": rewards_P2[:, 0] - rewards_P2[:, 1],
            "chosen_logprob": sums_P2[:, 0].detach(),
            "rejected_logprob": sums_P2[:, 1].detach(),
        }
        return PairShares(shares_P, figures)


PairLoss = Callable[[PreferenceObjective, Answers], Tensor]


def _sigmoid(p: PreferenceObjective, a: Answers) -> Tensor:
    """DPO (arXiv 2305.18290, equation 7); with smoothing its conservative form (E. Mitchell, 2023)."""
    logits, eps = p.beta * a.margin, p.label_smoothing
    return -F.logsigmoid(logits) * (1 - eps) - F.logsigmoid(-logits) * eps


def _hinge(p: PreferenceObjective, a: Answers) -> Tensor:
    """SLiC-HF's (arXiv 2305.10425) hinge on DPO's margin, as in RSO (arXiv 2309.06657)."""
    return torch.relu(1 - p.beta * a.margin)


def _ipo(p: PreferenceObjective, a: Answers) -> Tensor:
    """IPO (arXiv 2310.12036, equation 17), on means per token."""
    return (a.margin - 1 / (2 * p.beta)) ** 2


def _robust(p: PreferenceObjective, a: Answers) -> Tensor:
    """Robust DPO (arXiv 2403.00409, equation 12): unbiased where ``label_smoothing`` of the verdicts are wrong."""
    logits, eps = p.beta * a.margin, p.label_smoothing
    return (-F.logsigmoid(logits) * (1 - eps) + F.logsigmoid(-logits) * eps) / (1 - 2 * eps)


def _apo_zero(p: PreferenceObjective, a: Answers) -> Tensor:
    """APO-zero (arXiv 2408.06266): the chosen answer up, the rejected one down."""
    return 1 - torch.sigmoid(p.beta * a.chosen_ratio) + torch.sigmoid(p.beta * a.rejected_ratio)


def _apo_down(p: PreferenceObjective, a: Answers) -> Tensor:
    """APO-down (arXiv 2408.06266): both down, the rejected one more; for a policy better than the chosen answers."""
    return torch.sigmoid(p.beta * a.chosen_ratio) + 1 - torch.sigmoid(p.beta * a.margin)


def _sppo(p: PreferenceObjective, a: Answers) -> Tensor:
    """SPPO with hard verdicts (arXiv 2405.00675, equation 4.7)."""
    return (a.chosen_ratio - 0.5 / p.beta) ** 2 + (a.rejected_ratio + 0.5 / p.beta) ** 2


def _simpo(p: PreferenceObjective, a: Answers) -> Tensor:
    """SimPO (arXiv 2405.14734, equation 6), on means per token, without a reference."""
    logits, eps = p.beta * a.margin - p.simpo_gamma, p.label_smoothing
    return -F.logsigmoid(logits) * (1 - eps) - F.logsigmoid(-logits) * eps


def _orpo(p: PreferenceObjective, a: Answers) -> Tensor:
    """The odds-ratio part of ORPO (arXiv 2403.07691, equation 7), on means per token, without a reference."""
    # log(1 - exp(x)) by expm1, which keeps its digits near 0
    chosen_odds, rejected_odds = (x - torch.log(-torch.expm1(x)) for x in (a.chosen, a.rejected))
    return -p.beta * F.logsigmoid(chosen_odds - rejected_odds)


# The values of preference.loss.
PAIR_LOSSES: dict[str, PairLoss] = {
    "sigmoid": _sigmoid,
    "hinge": _hinge,
    "ipo": _ipo,
    "robust": _robust,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "sppo": _sppo,
    "simpo": _simpo,
    "orpo": _orpo,
}
REFERENCE_FREE = ("simpo", "orpo")
AVERAGED = ("ipo", "simpo", "orpo")  # on means per token of the answer; the others on sums


@dataclass(frozen=True, kw_only=True)
class KtoObjective:
    """KTO (arXiv 2402.01306, equation 8): every answer by itself is worth more, or less, than the KL ``kl``."""

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __call__(
        self,
        stats: TokenStats,
        microbatch: Microbatch,
        *,
        reference_B: Tensor,
        is_good_B: Tensor,
        kl: float,
        num_answers: int,
    ) -> tuple[Tensor, Figures]:
        """Loss [] with gradient, and sums over the good and over the bad answers.

        Args:
            reference_B: [answers of the batch that was packed] log-probabilities under the reference, summed.
            is_good_B: [answers of the batch that was packed], bool.
            kl: from the reference, in nats, not negative, of the global batch; see ``kto_kl``.
            num_answers: of the global batch.
        """
        chosen = list(microbatch.sequence_indices)
        policy_B = answer_sums(stats.logprobs, microbatch)
        ratios_B = policy_B - reference_B[chosen].to(policy_B)
        is_good = is_good_B[chosen].to(policy_B.device)
        good = self.desirable_weight * (1 - torch.sigmoid(self.beta * (ratios_B - kl)))
        bad = self.undesirable_weight * (1 - torch.sigmoid(self.beta * (kl - ratios_B)))
        loss = torch.where(is_good, good, bad).sum() / num_answers
        rewards_B, logprobs_B, good_B = self.beta * ratios_B.detach(), policy_B.detach(), is_good.to(policy_B)
        figures = {
            "chosen_reward": rewards_B * good_B,
            "rejected_reward": rewards_B * (1 - good_B),
            "chosen_logprob": logprobs_B * good_B,
            "rejected_logprob": logprobs_B * (1 - good_B),
            "accuracy": ((ratios_B.detach() > kl) == is_good).to(policy_B),
        }
        return loss, Figures({name: values_B.sum() for name, values_B in figures.items()})


def kto_kl(policy_B: Tensor, reference_B: Tensor) -> float:
    """KTO's estimate of the KL from the reference, from answers to other prompts: their mean log-ratio, at least 0."""
    return max(0.0, float((policy_B - reference_B).mean()))


def bradley_terry_shares(
    chosen_P: Tensor, rejected_P: Tensor, margins_P: Tensor | None, centre: float, num_pairs: int
) -> Tensor:
    """[P] shares of the mean of ``-log sigmoid(chosen - rejected - margin) + centre * (chosen + rejected)^2``.

    Args:
        chosen_P: scores of a reward model.
        margins_P: by how much a chosen answer should score higher (Llama 2, arXiv 2307.09288, equation 2); None: 0.
        centre: keeps scores near 0 (arXiv 2312.09244); 0: off.
        num_pairs: of the global batch.
    """
    gap_P = chosen_P - rejected_P if margins_P is None else chosen_P - rejected_P - margins_P
    return (-F.logsigmoid(gap_P) + centre * (chosen_P + rejected_P) ** 2) / num_pairs
