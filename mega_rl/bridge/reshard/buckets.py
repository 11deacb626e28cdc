"""A plan cut into exchanges of bounded size, which are expanded into moves one at a time."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mega_rl.bridge.reshard.plan import ReshardPlan
from mega_rl.bridge.reshard.runs import Move, PieceRun

SLACK_PART = 16  # one part in so many of a bucket is left free, for cuts that move to where a row or a tensor begins


class SendStream:
    """All that one rank sends to another, in order, with the places where it is cut."""

    def __init__(self, runs: Sequence[PieceRun], num_parts: int, slack: int) -> None:
        """Parts are of equal size but for ``slack`` elements: a cut moves back so far to the start of a tensor or row.

        Cuts follow from nothing but the runs, so that both ranks have the same.
        """
        self._runs = runs
        ends = np.cumsum([run.num_elements for run in runs])
        starts = np.concatenate([[0], ends[:-1]])
        cuts = np.arange(1, num_parts) * ends[-1] // num_parts
        which = np.searchsorted(ends, cuts, side="right")
        inside = cuts - starts[which]
        first = np.array([run.start * run.row_elements for run in runs])[which]
        back = np.zeros_like(cuts)
        for unit in ([run.row_elements for run in runs], [run.piece_elements for run in runs]):
            beyond = np.minimum((first + inside) % np.array(unit)[which], inside)
            back = np.where(beyond <= slack, beyond, back)
        self._cuts = [0, *(cuts - back).tolist(), int(ends[-1])]
        self._edges = [0, *ends.tolist()]  # run i has the elements from edge i to the next

    def moves(self, part: int) -> Iterator[Move]:
        start, end = self._cuts[part : part + 2]
        i = bisect_right(self._edges, start) - 1
        while start < end:
            limit = min(end, self._edges[i + 1])
            yield from self._runs[i].moves(start - self._edges[i], limit - self._edges[i])
            start, i = limit, i + 1

    def size(self, part: int) -> int:
        """Elements of one part."""
        return self._cuts[part + 1] - self._cuts[part]


@dataclass(frozen=True)
class Schedule:
    """One rank's part in a plan: its own copies, and exchanges in which it has a part of each of its streams."""

    copies: tuple[PieceRun, ...]
    sends: dict[int, SendStream]  # by destination rank, ascending
    receives: dict[int, SendStream]  # by source rank, ascending
    num_buckets: int

    def buckets(self) -> list[Bucket]:
        return [Bucket(self, i) for i in range(self.num_buckets)]


class Bucket(NamedTuple):
    """One exchange; pieces lie in the flat buffers in the order in which they are given here."""

    schedule: Schedule
    part: int

    def sends(self) -> Iterator[Move]:
        """Expanded anew at every call: by destination rank."""
        return (move for stream in self.schedule.sends.values() for move in stream.moves(self.part))

    def receives(self) -> Iterator[Move]:
        """The received pieces, as in ``sends``, by source rank."""
        return (move for stream in self.schedule.receives.values() for move in stream.moves(self.part))

    def send_sizes(self) -> dict[int, int]:
        """Elements by destination rank."""
        return {rank: stream.size(self.part) for rank, stream in self.schedule.sends.items()}

    def receive_sizes(self) -> dict[int, int]:
        """Elements by source rank."""
        return {rank: stream.size(self.part) for rank, stream in self.schedule.receives.items()}


def schedule(plan: ReshardPlan, rank: int, capacity: int) -> Schedule:
    """One rank's part of exchanges in which no rank sends and receives more than ``capacity`` elements together.

    Every exchange carries an equal part of what each pair of ranks has to say to each other, so that all ranks work in
    all of them. Their number follows from nothing but the plan, so nobody negotiates.

    Raises:
        ValueError: a capacity below one element for every pair of ranks that meet in one rank.
    """
    num_buckets, slack = _count_buckets(plan.traffic, capacity)
    copies: list[PieceRun] = []
    runs: dict[tuple[int, int], list[PieceRun]] = defaultdict(list)
    for run in plan.runs_of(rank):
        (copies if run.is_local else runs[run.src_rank, run.dst_rank]).append(run)
    streams = {pair: SendStream(runs[pair], num_buckets, slack) for pair in sorted(runs)}
    return Schedule(
        copies=tuple(copies),
        sends={dst: stream for (src, dst), stream in streams.items() if src == rank},
        receives={src: stream for (src, dst), stream in streams.items() if dst == rank},
        num_buckets=num_buckets,
    )


def _count_buckets(traffic: np.ndarray, capacity: int) -> tuple[int, int]:
    """The fewest exchanges with which every rank stays within the capacity, and how far a cut may move."""
    remote = traffic - np.diag(traffic.diagonal())
    if not remote.any():
        return 0, 0
    pairs = int(((remote > 0).sum(0) + (remote > 0).sum(1)).max())
    slack = capacity // (SLACK_PART * pairs)

    def fits(count: int) -> bool:
        each = np.minimum(remote, -(-remote // count) + slack)
        return int((each.sum(0) + each.sum(1)).max()) <= capacity

    low, high = 0, int(remote.max())  # too few, enough
    if not fits(high):
        raise ValueError(
            f"bridge.bucket_bytes has room for {capacity} elements, but a rank exchanges weights with {pairs} others; "
            "make it larger"
        )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high, slack
