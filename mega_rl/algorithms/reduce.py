"""From per-token losses to one scalar: the only file that decides the scale of a loss.

Every function returns a share of a sum that is divided by a denominator of the GLOBAL batch, so that shares add up: the
sum over micro-batches and data-parallel ranks is the loss of the batch, whatever the split. A sequence is never cut.

Letters in names: T packed tokens of a micro-batch, B its sequences (a padding tail counts as one, with a zero mask).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Denominators:
    """Counts over the global batch of one optimizer step: all micro-batches of all data-parallel ranks."""

    num_tokens: int  # tokens with mask 1
    num_sequences: int  # without padding tails
    max_response_tokens: int  # the configured longest response, not the longest one seen

    def __post_init__(self) -> None:
        assert self.num_tokens > 0 and self.num_sequences > 0 and self.max_response_tokens > 0, self


Reduction = Callable[[Tensor, Tensor, Tensor, Denominators], Tensor]


def masked_sum(values_T: Tensor, mask_T: Tensor) -> Tensor:
    """Sum [] of the values where the mask is not 0; what stands elsewhere, infinities included, does not matter."""
    return (torch.where(mask_T != 0, values_T, 0.0) * mask_T).sum()


def sequence_index(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """[T] int64, the sequence that each of the ``num_tokens`` packed tokens belongs to."""
    positions_T = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.bucketize(positions_T, cu_seqlens[1:], right=True)


def sequence_sum(values_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """At every token [T] the sum of its sequence's values where the mask is not 0.

    Exact under context parallelism too: every rank is given the tokens of the whole pack (see `megatron.context`).
    """
    index_T = sequence_index(cu_seqlens, values_T.numel())
    learnt_T = torch.where(mask_T != 0, values_T, 0.0) * mask_T
    return learnt_T.new_zeros(cu_seqlens.numel() - 1).index_add(0, index_T, learnt_T)[index_T]


def token_mean(losses_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, denominators: Denominators) -> Tensor:
    """Share [] of the mean over all learnt tokens of the global batch (DAPO, arXiv 2503.14476)."""
    return masked_sum(losses_T, mask_T) / denominators.num_tokens


def sequence_mean(losses_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, denominators: Denominators) -> Tensor:
    """Share [] of the mean over sequences of each sequence's token mean (GRPO, arXiv 2402.03300, equation 3).

    A sequence without a learnt token adds 0 and still counts in ``num_sequences``.
    """
    num_tokens_T = sequence_sum(torch.ones_like(mask_T), mask_T, cu_seqlens)
    return masked_sum(losses_T / num_tokens_T.clamp_min(1.0), mask_T) / denominators.num_sequences


def sequence_mean_token_sum_norm(
    losses_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, denominators: Denominators
) -> Tensor:
    """Share [] of ``sum of token losses / (sequences * longest response)`` (Dr.GRPO, arXiv 2503.20783)."""
    return masked_sum(losses_T, mask_T) / (denominators.num_sequences * denominators.max_response_tokens)


REDUCTIONS: dict[str, Reduction] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "sequence_mean_token_sum_norm": sequence_mean_token_sum_norm,
}
