"""Dropout before adapters, by a mask that depends on what is dropped and not on where or when it is computed.

Whether an element of a layer's input is kept is a hash of the run's seed, the optimizer step, the place of the sequence
in the batch of that step, the position in the sequence, the weight and the column. So all layouts and packings draw one
mask, and a step that is recomputed or resumed draws it again, without any state of a generator. The backward pass draws
it anew instead of keeping it: dropout takes no memory between the passes.

Letters: T packed tokens of a micro-batch, N tokens of this rank, D columns of this rank, K rows of A.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mega_rl.microbatch import Microbatch

BITS = (1 << 32) - 1
CHUNK = 1 << 22  # elements of a mask that are hashed at once: 8 bytes each


def _mixed(numbers: Tensor) -> Tensor:
    """int64 below 2^32 -> the same, in place, every bit of the result depending on all bits of the number.

    The multipliers are below 2^31, so that no product leaves int64, whose overflow no backend promises anything of.
    """
    numbers ^= numbers >> 16
    numbers.mul_(0x7FEB352D).bitwise_and_(BITS)
    numbers ^= numbers >> 15
    numbers.mul_(0x31848BAB).bitwise_and_(BITS)
    numbers ^= numbers >> 17
    return numbers


def _number_of(*words: object) -> int:
    text = ":".join(map(str, words)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big")


def token_keys(microbatch: Microbatch, seed: int, step: int) -> Tensor:
    """The numbers [T] int64 that the packed tokens of a micro-batch on the host have in an optimizer step."""
    places = torch.zeros(microbatch.num_tokens, dtype=torch.int64)  # of the tail nothing is learnt
    borders = pairwise(microbatch.cu_seqlens.tolist())
    for place, (start, end) in zip(microbatch.sequence_indices, borders, strict=False):
        places[start:end] = place
    return _mixed(_mixed(places ^ _number_of(seed, step)) ^ microbatch.position_ids)


def column_keys(weight: str, columns: Iterable[int]) -> Tensor:
    """The numbers [D] int64 of these columns of a Hugging Face weight."""
    return _mixed(torch.tensor(list(columns), dtype=torch.int64) ^ _number_of(weight))


def dropped(x: Tensor, tokens_N: Tensor, columns_D: Tensor, rate: float) -> Tensor:
    """[N, D] with zeros at a share ``rate`` of its elements, and the others divided by what that leaves."""
    keep, least = 1.0 / (1.0 - rate), int(rate * (BITS + 1))
    result, rows = torch.empty_like(x), max(1, CHUNK // max(1, len(columns_D)))
    for start in range(0, len(x), rows):
        is_kept = _mixed(tokens_N[start : start + rows, None] ^ columns_D) >= least
        result[start : start + rows] = torch.where(is_kept, x[start : start + rows] * keep, 0.0)
    return result


class DroppedProduct(torch.autograd.Function):
    """x [..., D], A [K, D] -> [..., K]: of x with dropout; x itself and A are all that is kept for the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, tokens_N: Tensor, columns_D: Tensor, rate: float) -> Tensor:
        ctx.save_for_backward(x, a, tokens_N, columns_D)
        ctx.rate = rate
        kept = dropped(x.flatten(0, -2), tokens_N, columns_D, rate)
        return (kept @ a.t()).view(*x.shape[:-1], len(a))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, a, tokens_N, columns_D = ctx.saved_tensors
        gradient = gradients[0].flatten(0, -2)
        of_x = of_a = None
        if ctx.needs_input_grad[0]:
            of_x = dropped(gradient @ a, tokens_N, columns_D, ctx.rate).view_as(x)
        if ctx.needs_input_grad[1]:
            of_a = gradient.t() @ dropped(x.flatten(0, -2), tokens_N, columns_D, ctx.rate)
        return of_x, of_a, None, None, None
