"""Token log-probabilities, entropy and hits from hidden states, over a vocabulary split between tensor-parallel ranks.

The vocabulary is never gathered, and the float32 logits of a whole batch never exist at once: they are computed tile by
tile, some tokens by some vocabulary rows. The first tiles' are kept for the backward pass, as many as the bound on
memory has room for; those of the others are computed again. A tile on a CPU is small enough for the cache, so that the
passes over it cost little beside the matrix products; the ranks communicate once per batch, not once per tile.

Letters: T tokens, D hidden width, V this rank's vocabulary rows, C tokens and R vocabulary rows of one tile, N tiles
along the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mega_rl.platform.operators import products

CPU_TILE_TOKENS = 512
CPU_TILE_LOGITS = 512 * 1024  # 2 MiB of float32, and as much again for their exponentials
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class VocabularyShard:
    """What this rank holds of the vocabulary."""

    group: dist.ProcessGroup | None  # tensor-parallel group; None: not split
    start: int  # first vocabulary row of this rank
    num_valid: int  # rows of this rank that are no padding
    temperature: float  # of sampling; logits are divided by it
    chunk_tokens: int  # bounds memory: the float32 logits of so many tokens over this rank's rows
    entropy_has_gradient: bool = True  # False: the entropy is a figure only, and a gradient with respect to it is lost

    def reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        if self.group is not None and dist.get_world_size(self.group) > 1:
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor


class _Tiles:
    """The logits of a batch, one tile at a time, and two buffers of a tile's size to work in."""

    def __init__(self, hidden_TD: Tensor, weight_VD: Tensor, target_ids_T: Tensor, shard: VocabularyShard) -> None:
        self.hidden_TD, self.weight_VD, self.shard = hidden_TD, weight_VD, shard
        self.local_ids_T = target_ids_T - shard.start
        num_tokens, num_rows = hidden_TD.shape[0], max(1, shard.num_valid)
        limit = max(1, shard.chunk_tokens * num_rows // 2)  # two buffers
        if hidden_TD.device.type == "cpu":
            limit = min(limit, CPU_TILE_LOGITS)
            self.num_tokens = max(1, min(num_tokens, CPU_TILE_TOKENS, limit))
        else:
            self.num_tokens = max(1, min(num_tokens, limit))
        self.num_rows = max(1, min(num_rows, limit // self.num_tokens))
        self.buffers = [
            torch.empty(self.num_tokens * self.num_rows, dtype=torch.float32, device=hidden_TD.device) for _ in range(2)
        ]
        self.spare_logits = shard.chunk_tokens * num_rows - 2 * self.buffers[0].numel()  # what the bound leaves

    def vocabulary(self) -> list[slice]:
        """The vocabulary rows of the tiles; padding rows are in none."""
        valid = self.shard.num_valid
        return [slice(start, min(start + self.num_rows, valid)) for start in range(0, valid, self.num_rows)]

    def tokens(self) -> Iterator[slice]:
        total = self.hidden_TD.shape[0]
        return (slice(start, min(start + self.num_tokens, total)) for start in range(0, total, self.num_tokens))

    def working(self, tokens: slice, rows: slice) -> tuple[Tensor, Tensor]:
        """Two float32 tensors [C, R] of a tile's shape, not filled; the next tile has them in the same memory."""
        shape = (tokens.stop - tokens.start, rows.stop - rows.start)
        first_CR, second_CR = (buffer[: shape[0] * shape[1]].view(shape) for buffer in self.buffers)
        return first_CR, second_CR

    def logits(self, tokens: slice, rows: slice, kept: list[Tensor] | None = None) -> Tensor:
        """float32 [C, R] logits after the temperature, in the first working tensor.

        Args:
            kept: takes them up, in memory of their own, while the bound has room; None: not wanted.
        """
        logits_CR, spare_CR = self.working(tokens, rows)
        self.spare_logits -= logits_CR.numel()
        is_kept = kept is not None and self.spare_logits >= 0
        if is_kept:
            logits_CR = torch.empty_like(logits_CR)
        hidden_CD, weight_RD = self.hidden_TD[tokens], self.weight_VD[rows]
        if self.hidden_TD.dtype == torch.float32:
            logits_CR = products.outputs(hidden_CD, weight_RD, out_TF=logits_CR)
        else:
            logits_CR.copy_(torch.mm(hidden_CD, weight_RD.t(), out=self.as_dtype(spare_CR)))
        if self.shard.temperature != 1.0:
            logits_CR /= self.shard.temperature
        if kept is not None and is_kept:
            kept.append(logits_CR)
        return logits_CR

    def as_dtype(self, buffer_CR: Tensor) -> Tensor:
        """The memory of a buffer as a (half as large) tensor of the parameters' type."""
        return buffer_CR.view(-1).view(self.hidden_TD.dtype)[: buffer_CR.numel()].view(buffer_CR.shape)

    def factor(self, gradient_CR: Tensor, spare_CR: Tensor) -> Tensor:
        """The gradient of a tile in the parameters' type, without new memory."""
        if self.hidden_TD.dtype == torch.float32:
            return gradient_CR
        return self.as_dtype(spare_CR).copy_(gradient_CR)

    def targets(self, tokens: slice, rows: slice) -> tuple[Tensor, Tensor]:
        """[C, 1] column of each token's target, and [C] whether it is one of this tile's."""
        column_C = self.local_ids_T[tokens] - rows.start
        size = rows.stop - rows.start
        return column_C.clamp(0, size - 1)[:, None], (column_C >= 0) & (column_C < size)


def _exponential(x_CR: Tensor, out_CR: Tensor) -> Tensor:
    if x_CR.device.type != "cpu":
        return torch.exp(x_CR, out=out_CR)
    # torch's exp on a CPU is the vendor library's most exact one; 2^x takes a third of its time, to 1e-7 * |x|.
    return torch.mul(x_CR, LOG2_E, out=out_CR).exp2_()


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        target_ids_T: Tensor,
        shard: VocabularyShard,
        has_backward: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        tiles = _Tiles(hidden_TD, weight_VD, target_ids_T, shard)
        vocabulary = tiles.vocabulary()
        # Each tile's maximum and sums: the sums are relative to the tile's own maximum until the last tile is known.
        maximum_NT, total_NT, expected_NT = torch.zeros(
            3, max(1, len(vocabulary)), hidden_TD.shape[0], dtype=torch.float32, device=hidden_TD.device
        )
        target_T = torch.zeros_like(maximum_NT[0])
        if not vocabulary:  # nothing but padding on this rank; -inf would turn into NaN
            maximum_NT.fill_(torch.finfo(torch.float32).min)
        kept: list[Tensor] = []  # logits of the first tiles
        for n, rows in enumerate(vocabulary):
            for tokens in tiles.tokens():
                logits_CR = tiles.logits(tokens, rows, kept if has_backward else None)
                shifted_CR, weights_CR = tiles.working(tokens, rows)
                column_C1, is_here_C = tiles.targets(tokens, rows)
                target_T[tokens] += torch.where(is_here_C, logits_CR.gather(1, column_C1)[:, 0], 0.0)
                torch.amax(logits_CR, -1, out=maximum_NT[n, tokens])
                torch.sub(logits_CR, maximum_NT[n, tokens, None], out=shifted_CR)
                _exponential(shifted_CR, weights_CR)
                torch.sum(weights_CR, -1, out=total_NT[n, tokens])
                torch.linalg.vecdot(weights_CR, shifted_CR, out=expected_NT[n, tokens])
        maximum_T = shard.reduce(maximum_NT.amax(0), dist.ReduceOp.MAX)
        maximum_NT -= maximum_T
        scale_NT = maximum_NT.exp()
        expected_NT += total_NT * maximum_NT
        sums_3T = torch.stack([(scale_NT * total_NT).sum(0), (scale_NT * expected_NT).sum(0), target_T])
        total_T, expected_T, target_T = shard.reduce(sums_3T)
        log_total_T = total_T.log()
        entropy_T = log_total_T - expected_T / total_T
        ctx.save_for_backward(hidden_TD, weight_VD, target_ids_T, maximum_T + log_total_T, entropy_T, *kept)
        ctx.shard = shard
        # Maximum and target are the same float32 numbers on their way through the collectives: nothing is rounded.
        is_top_T = (target_T == maximum_T).float()
        ctx.mark_non_differentiable(is_top_T, *(() if shard.entropy_has_gradient else (entropy_T,)))
        return (target_T - maximum_T) - log_total_T, entropy_T, is_top_T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        grad_logprobs_T, grad_entropy_T, _ = gradients
        hidden_TD, weight_VD, target_ids_T, log_z_T, entropy_T, *kept = ctx.saved_tensors
        tiles = _Tiles(hidden_TD, weight_VD, target_ids_T, ctx.shard)
        # d logp / d logits = onehot - p;  d entropy / d logits = -p (log p + entropy)
        # If entropy has no gradient, a token's factor is applied to its row of the results instead of to every tile.
        # That is known beforehand: to ask the tensor whether it is zero would make the host wait for the device.
        has_entropy_gradient = ctx.shard.entropy_has_gradient
        outer_T = -torch.ones_like(log_z_T) if has_entropy_gradient else -grad_logprobs_T
        inner_T = -grad_logprobs_T if has_entropy_gradient else -torch.ones_like(log_z_T)
        constant_T = grad_logprobs_T + grad_entropy_T * entropy_T
        scaled_TD = (hidden_TD * outer_T[:, None] / ctx.shard.temperature).to(hidden_TD.dtype)
        grad_hidden_TD = torch.zeros(hidden_TD.shape, dtype=torch.float32, device=hidden_TD.device)
        has_weight_gradient = ctx.needs_input_grad[1]  # a frozen head's would cost as much as the rest
        grad_weight_VD = torch.zeros_like(weight_VD) if has_weight_gradient else None
        known = iter(kept)
        for rows in tiles.vocabulary():
            grad_weight_DR = None
            if has_weight_gradient:
                grad_weight_DR = torch.zeros_like(weight_VD[rows].t(), dtype=torch.float32).contiguous()
            for tokens in tiles.tokens():
                logits_CR = next(known, None)
                if logits_CR is None:
                    logits_CR = tiles.logits(tokens, rows)
                logprobs_CR, grad_CR = tiles.working(tokens, rows)
                torch.sub(logits_CR, log_z_T[tokens, None], out=logprobs_CR)
                _exponential(logprobs_CR, grad_CR)
                if has_entropy_gradient:
                    slope_C1 = grad_entropy_T[tokens, None]
                    grad_CR *= torch.addcmul(constant_T[tokens, None], logprobs_CR, slope_C1, out=logprobs_CR)
                column_C1, is_here_C = tiles.targets(tokens, rows)
                grad_CR.scatter_add_(1, column_C1, (inner_T[tokens] * is_here_C)[:, None])
                factor_CR = tiles.factor(grad_CR, logprobs_CR)
                products.input_gradient(factor_CR, weight_VD[rows], grad_hidden_TD[tokens])
                if grad_weight_DR is not None:
                    products.weight_gradient(scaled_TD[tokens], factor_CR, grad_weight_DR)
            if grad_weight_VD is not None and grad_weight_DR is not None:
                grad_weight_VD[rows] = grad_weight_DR.t()
        grad_hidden_TD *= outer_T[:, None] / ctx.shard.temperature
        return grad_hidden_TD.to(hidden_TD.dtype), grad_weight_VD, None, None, None


def token_logprobs(
    hidden_TD: Tensor, weight_VD: Tensor, target_ids_T: Tensor, shard: VocabularyShard
) -> tuple[Tensor, Tensor, Tensor]:
    """What is said of every position: float32 [T] each, the same on all ranks.

    Log-probabilities of the targets and entropy, in nats; and 1 where no token is more probable than the target, else
    0, which has no gradient.

    The gradient with respect to ``hidden_TD`` is this rank's part: the caller's collective must sum it over the group.
    """
    has_backward = torch.is_grad_enabled() and (hidden_TD.requires_grad or weight_VD.requires_grad)
    return _TokenLogprobs.apply(hidden_TD, weight_VD, target_ids_T, shard, has_backward)
