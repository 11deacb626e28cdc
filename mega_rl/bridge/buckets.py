"""A plan cut into exchanges of bounded size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from mega_rl.bridge.plan import Move, Plan


@dataclass
class Bucket:
    """One exchange: what this rank sends and receives, in the order in which the pieces lie in the flat buffers."""

    sends: list[Move] = field(default_factory=list)  # by destination rank
    receives: list[Move] = field(default_factory=list)  # by source rank


def fill_buckets(plan: Plan, rank: int, capacity: int) -> list[Bucket]:
    """One rank's part of exchanges in which no rank sends and receives more than ``capacity`` elements together.

    Every exchange carries an equal part of what each pair of ranks has to say to each other, so that all ranks work in
    all of them. Their number follows from the plan alone, so nobody negotiates.

    Raises:
        ValueError: a capacity below one element for every pair of ranks that meet in one rank.
    """
    num_buckets = _count_buckets(plan.traffic, capacity)
    streams: dict[tuple[int, int], list[Move]] = defaultdict(list)
    for run in plan.runs_of(rank):
        if not run.is_local:
            streams[run.src_rank, run.dst_rank].extend(run.moves())
    buckets = [Bucket() for _ in range(num_buckets)]
    for pair in sorted(streams):
        stream = streams.pop(pair)
        for bucket, pieces in zip(buckets, _cut_evenly(stream, num_buckets), strict=True):
            (bucket.sends if pair[0] == rank else bucket.receives).extend(pieces)
    return buckets


def _count_buckets(traffic: np.ndarray, capacity: int) -> int:
    """The fewest exchanges with which every rank stays within the capacity."""
    remote = traffic - np.diag(traffic.diagonal())

    def fits(count: int) -> bool:
        each = -(-remote // count)
        return int((each.sum(0) + each.sum(1)).max()) <= capacity

    low, high = 0, max(1, int(remote.max()))  # too few (or none), enough
    if not remote.any():
        return 0
    if not fits(high):
        pairs = int(((remote > 0).sum(0) + (remote > 0).sum(1)).max())
        raise ValueError(
            f"bridge.bucket_bytes has room for {capacity} elements, but a rank exchanges weights with {pairs} others; "
            "make it larger"
        )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _cut_evenly(stream: Sequence[Move], num_parts: int) -> Iterator[list[Move]]:
    """The stream's elements in parts whose sizes differ by at most one."""
    sizes = [move.num_elements for move in stream]
    total, i, done = sum(sizes), 0, 0  # done: elements of stream[i] that earlier parts hold
    for part in range(num_parts):
        left = (part + 1) * total // num_parts - part * total // num_parts
        pieces: list[Move] = []
        while left:
            taken = min(left, sizes[i] - done)
            whole = taken == sizes[i]
            pieces += [stream[i]] if whole else stream[i].part(done, done + taken)
            left, done = left - taken, done + taken
            if done == sizes[i]:
                i, done = i + 1, 0
        yield pieces
