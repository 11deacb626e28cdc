"""The micro-batches of a critic whose layout is another than the policy's, and what goes between the two.

Letters: T packed tokens of a micro-batch, L tokens of a sequence, n numbers of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mega_rl.data.packing import pack, unpack
from mega_rl.microbatch import Microbatch, Sequence as TrainingSequence
from mega_rl.parallel.collectives import gather_objects
from mega_rl.parallel.rows import move
from mega_rl.stages.run.batch_share import BatchShare


class CriticPart:
    """The sequences of one minibatch at both layouts.

    Args:
        share: the critic's.
        microbatches: of the policy on this rank.
    """

    def __init__(self, share: BatchShare, microbatches: Sequence[Microbatch]) -> None:
        self._rank, self._theirs = share.rank, list(microbatches)
        own = {i: n for m in microbatches for i, n in zip(m.sequence_indices, m.lengths, strict=True)}
        of_ranks = gather_objects(own)
        self._lengths = {index: length for held in of_ranks for index, length in held.items()}
        plan = share.plan([self._lengths[index] for index in range(len(self._lengths))])
        self._of_policy = [list(held) for held in of_ranks]
        self._of_critic = [
            [index for part in plan[share.layout.coordinates(rank).data] for index in part]
            for rank in range(share.layout.world_size)
        ]
        tokens = self._moved(
            [torch.stack([m.token_ids, m.target_ids, m.loss_mask.long()]) for m in microbatches], 3, torch.int64
        )
        sequences = {
            index: TrainingSequence(torch.cat([rows[0], rows[1, -1:]]), rows[2].float())
            for index, rows in tokens.items()
        }
        self.microbatches = [
            pack(sequences, indices, share.pad_multiple, share.pad_token_id) for indices in plan[share.data_rank]
        ]

    def to_policy(self, values: Sequence[Tensor]) -> list[Tensor]:
        """[T] of every micro-batch of the critic -> of those of the policy. Collective."""
        rows = {
            index: row[None]
            for m, values_T in zip(self.microbatches, values, strict=True)
            for index, row in zip(m.sequence_indices, unpack(values_T, m), strict=True)
        }
        shapes = {index: (1, length) for index, length in self._lengths.items()}
        found = move(rows, self._of_critic, self._of_policy, shapes, torch.float32, self._rank)
        return [_packed(found, m, 1)[0] for m in self._theirs]

    def to_learn(self, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """The critic's micro-batches with the values and returns that the policy's now have. Collective."""
        rows = []
        for m in microbatches:
            assert m.values is not None and m.returns is not None
            rows.append(torch.stack([m.values, m.returns]))
        found = self._moved(rows, 2, torch.float32)
        both = [_packed(found, m, 2) for m in self.microbatches]
        return [m.replace(values=rows[0], returns=rows[1]) for m, rows in zip(self.microbatches, both, strict=True)]

    def _moved(self, rows_nT: Sequence[Tensor], num_rows: int, dtype: torch.dtype) -> dict[int, Tensor]:
        """[n, T] of every micro-batch of the policy -> [n, L] of the sequences that the critic has here."""
        rows = {
            index: row.t()
            for m, numbers in zip(self._theirs, rows_nT, strict=True)
            for index, row in zip(m.sequence_indices, unpack(numbers.t(), m), strict=True)
        }
        shapes = {index: (num_rows, length) for index, length in self._lengths.items()}
        return move(rows, self._of_policy, self._of_critic, shapes, dtype, self._rank)


def _packed(rows: dict[int, Tensor], m: Microbatch, num_rows: int) -> Tensor:
    """[n, L] of sequences -> [n, T], zeros in the tail."""
    chosen = [rows[index] for index in m.sequence_indices]
    tail = m.num_tokens - sum(row.shape[1] for row in chosen)
    return torch.cat([*chosen, torch.zeros(num_rows, tail)], dim=1)


class OwnLayout:
    """Parts by minibatch of one step."""

    def __init__(self, share: BatchShare) -> None:
        self.share = share
        self._parts: list[CriticPart] = []

    def values(
        self, packed: Sequence[list[Microbatch]], values_of: Callable[[list[Microbatch]], list[Tensor]]
    ) -> list[list[Tensor]]:
        """Values [T] of the policy's micro-batches of every minibatch. Collective."""
        self._parts = [CriticPart(self.share, microbatches) for microbatches in packed]
        return [part.to_policy(values_of(part.microbatches)) for part in self._parts]

    def to_learn(self, minibatches: Sequence[Sequence[Microbatch]]) -> list[list[Microbatch]]:
        """The critic's micro-batches of the minibatches that ``values`` was given last. Collective."""
        parts, self._parts = self._parts, []
        return [part.to_learn(own) for part, own in zip(parts, minibatches, strict=True)]
