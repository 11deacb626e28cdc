"""Which owner sends what, so that the senders have equally much to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mega_rl.bridge.reshard.alike import Holder
from mega_rl.bridge.series import Number
from mega_rl.bridge.slices import Box, num_elements


class Need(NamedTuple):
    """A piece of like tensors that some ranks must be sent, with all who could send it."""

    numbers: tuple[Number, ...]
    hf_box: Box
    owners: tuple[Holder, ...]
    destinations: tuple[Holder, ...]

    @property
    def num_rows(self) -> int:
        """Rows that one destination needs, over all tensors."""
        return len(self.numbers) * (self.hf_box[0][1] - self.hf_box[0][0])

    @property
    def row_elements(self) -> int:
        return num_elements(self.hf_box[1:])


NUM_ROUNDS = 3
# [num_shares, 4] int64: places of an owner and a destination in their lists, first and last row, end exclusive.
Shares = np.ndarray


def assign(needs: Sequence[Need], num_ranks: int) -> list[Shares]:
    """For every need, the rows that each owner sends to each destination.

    Needs with the fewest owners come first and of those the ones with the widest rows, for rows are never cut here;
    each raises its least loaded owners to one level, as water fills a vessel. One such pass is not optimal if the
    owners of two needs overlap only partly, as those of experts and of attention do. So ``NUM_ROUNDS`` passes are made,
    and each takes back what the one before it assigned.
    """
    row_elements = [need.row_elements for need in needs]
    ranks = [[rank for rank, _ in need.owners] for need in needs]
    rows = [[0] * len(need.owners) for need in needs]
    load = [0] * num_ranks
    order = sorted(range(len(needs)), key=lambda i: (len(ranks[i]), -row_elements[i]))  # stable
    for _ in range(NUM_ROUNDS):
        for i in order:
            if len(ranks[i]) == 1 and rows[i][0]:
                continue
            row, num_rows = row_elements[i], len(needs[i].destinations) * needs[i].num_rows
            for rank, num in zip(ranks[i], rows[i], strict=True):
                load[rank] -= num * row
            rows[i] = _level([load[rank] for rank in ranks[i]], num_rows, row)
            for rank, num in zip(ranks[i], rows[i], strict=True):
                load[rank] += num * row
    return [_hand_out(one, len(need.destinations), need.num_rows) for one, need in zip(rows, needs, strict=True)]


def _level(loads: list[int], num_rows: int, row: int) -> list[int]:
    """How many of the rows, of ``row`` elements each, raise the loads to one level."""
    total, work = 0, num_rows * row
    ascending = sorted(loads)
    for count, load in enumerate(ascending, 1):
        total += load
        if count == len(ascending) or (ascending[count] * count - total) >= work:
            break
    level = (work + total) // count
    rows = [max(0, level - load) // row for load in loads]
    rest = num_rows - sum(rows)  # below one row per owner
    for i in sorted(range(len(loads)), key=lambda i: loads[i] + rows[i] * row)[:rest]:
        rows[i] += 1
    return rows


def _hand_out(rows: list[int], num_destinations: int, rows_each: int) -> Shares:
    """Owner by owner the next rows of the destinations, so that a destination has few owners to hear from."""
    ends = np.cumsum(rows)
    cuts = np.union1d(ends, np.arange(num_destinations + 1) * rows_each)
    cuts = cuts[: np.searchsorted(cuts, ends[-1]) + 1]
    starts = cuts[:-1]
    destination = starts // rows_each
    owner = np.searchsorted(ends, starts, side="right")
    return np.stack([owner, destination, starts - destination * rows_each, cuts[1:] - destination * rows_each], axis=1)
