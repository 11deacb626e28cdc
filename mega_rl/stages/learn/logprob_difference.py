"""Where two log-probabilities of a step's tokens differ most, and by how much in all; over all ranks too.

Letters: T packed tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mega_rl.microbatch import Microbatch
from mega_rl.parallel.collectives import reduced


@dataclass(frozen=True)
class LogprobDifference:
    """Where two log-probabilities of one micro-batch differ most, and by how much in all."""

    largest: float  # nats; infinity if one of the two is not a number
    total: float  # nats, sum over the learnt tokens
    num_tokens: int  # learnt ones
    sequence: int  # index into the list that was packed
    position: int  # index among the learnt tokens of that sequence
    token: int  # its id
    values: tuple[float, float]


def difference(
    first_T: Tensor, second_T: Tensor, microbatch: Microbatch, counted_T: Tensor | None = None
) -> LogprobDifference | None:
    """The difference of two log-probabilities [T] over the learnt tokens; None without learnt tokens.

    Args:
        counted_T: the tokens that count, bool; None: all.
    """
    learnt_T = (microbatch.loss_mask != 0).cpu()
    bounds = microbatch.cu_seqlens.tolist()
    if counted_T is not None:
        learnt_T &= counted_T
    if not learnt_T.any():
        return None
    first_T, second_T = first_T.detach().cpu().double(), second_T.detach().cpu().double()
    gap_T = torch.where(learnt_T, (first_T - second_T).abs(), 0.0).nan_to_num(nan=torch.inf)
    place = int(gap_T.argmax())
    place = place if learnt_T[place] else int(learnt_T.nonzero()[0])
    starts = bounds[:-1]
    row = max(i for i, start in enumerate(starts) if start <= place)
    return LogprobDifference(
        largest=float(gap_T[place]),
        total=float(gap_T.sum()),
        num_tokens=int(learnt_T.sum()),
        sequence=microbatch.sequence_indices[row],
        position=int(learnt_T[starts[row] : place].sum()),
        token=int(microbatch.target_ids[place]),
        values=(float(first_T[place]), float(second_T[place])),
    )


def merged(differences: Iterable[LogprobDifference | None]) -> LogprobDifference | None:
    """Several micro-batches as one: the largest difference of all, and the sums."""
    found = [part for part in differences if part is not None]
    if not found:
        return None
    worst = max(found, key=lambda part: part.largest)
    total, num_tokens = sum(part.total for part in found), sum(part.num_tokens for part in found)
    return replace(worst, total=total, num_tokens=num_tokens)


_NUM_FIELDS = 9  # numbers of a difference on its way to other ranks


def over_ranks(own: Mapping[str, LogprobDifference | None]) -> dict[str, LogprobDifference | None]:
    """``merged`` of every rank's difference, by the names that all ranks have. Collective."""

    def worst(rows: list[list[float]]) -> list[float]:
        columns = zip(*map(_differences, rows), strict=True)
        return [number for column in columns for number in _to_numbers(merged(column))]

    numbers = [number for found in own.values() for number in _to_numbers(found)]
    return dict(zip(own, _differences(reduced(numbers, worst, len(numbers))), strict=True))


def _to_numbers(found: LogprobDifference | None) -> list[float]:
    if found is None:
        return [0.0] * _NUM_FIELDS
    place = found.sequence, found.position, found.token
    return [1.0, found.largest, found.total, found.num_tokens, *place, *found.values]


def _differences(row: Sequence[float]) -> list[LogprobDifference | None]:
    parts = [row[i : i + _NUM_FIELDS] for i in range(0, len(row), _NUM_FIELDS)]
    return [
        LogprobDifference(largest, total, int(num_tokens), int(sequence), int(position), int(token), (first, second))
        if is_there
        else None
        for is_there, largest, total, num_tokens, sequence, position, token, first, second in parts
    ]
