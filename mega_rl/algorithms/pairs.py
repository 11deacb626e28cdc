"""A loss on pairs of answers, pair by pair, and how it is learnt where the two answers lie in different micro-batches.

Letters in names: B sequences of a micro-batch without the padding tail, P pairs of sequences: 2i is the chosen answer,
2i + 1 the rejected one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mega_rl.microbatch import Figures, Microbatch


@dataclass(frozen=True)
class PairShares:
    """What each pair adds to the loss of the global batch, and to the sums of the metrics."""

    losses_P: Tensor
    figures: Mapping[str, Tensor]  # [P] each, without gradient

    def summed(self) -> tuple[Tensor, Figures]:
        """Loss [] with gradient, and figures to be divided by the number of pairs."""
        return self.losses_P.sum(), Figures({name: values_P.sum() for name, values_P in self.figures.items()})


class AnswersApart:
    """The loss of a global batch of pairs whose answers lie in any micro-batch of any data-parallel rank.

    A pair's loss sees of each answer one number, its score, so the gradient of the loss is the sum over the answers of
    (slope of the loss in the score) x (gradient of the score). The slopes come from the scores of all answers under the
    present weights, which take a forward pass without gradient beforehand; with them every answer is learnt from by
    itself, and the sum over the micro-batches is the gradient of the pairs. The figures are those of that forward pass;
    a pair is counted where its chosen answer lies.

    Args:
        shares_of: the shares of all pairs from their scores [P, 2].
        scores_B: [answers of the batch that was packed] under the present weights.
        score_of: (what the model gives for a micro-batch, the micro-batch) -> scores [B] of its answers, with gradient.
    """

    def __init__(
        self,
        shares_of: Callable[[Tensor], PairShares],
        scores_B: Tensor,
        score_of: Callable[[Any, Microbatch], Tensor],
    ) -> None:
        with torch.enable_grad():
            scores_P2 = scores_B.detach().view(-1, 2).requires_grad_()
            shares = shares_of(scores_P2)
            (slopes_P2,) = torch.autograd.grad(shares.losses_P.sum(), scores_P2)
        self._slopes_B, self._score_of = slopes_P2.flatten(), score_of
        self._figures = {"loss": shares.losses_P.detach(), **shares.figures}

    def __call__(self, output: Any, microbatch: Microbatch) -> tuple[Tensor, Figures]:
        """A number [] with the gradient of the loss, and the figures, the loss itself among them."""
        places = list(microbatch.sequence_indices)
        scores_B = self._score_of(output, microbatch)
        pairs = [place // 2 for place in places if place % 2 == 0]
        figures = {name: values_P[pairs].sum() for name, values_P in self._figures.items()}
        return (self._slopes_B[places].to(scores_B) * scores_B).sum(), Figures(figures)
