"""A few numbers over all ranks, in tensors of a fixed size: what every step asks of the world.

``gather_objects`` takes two exchanges of what it first has to measure, and hands every rank as many values as there are
ranks. What is here has no size to find out, and gives each rank one result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from mega_rl.observe.heartbeat import HEART

Reduction = Callable[[list[list[float]]], Sequence[float]]


def smallest(number: int, group: dist.ProcessGroup | None = None) -> int:
    """The smallest number of all ranks, on every rank. Collective."""
    if not dist.is_initialized():
        return number
    found = torch.tensor([number])
    with HEART.waiting("the other ranks"):
        dist.all_reduce(found, dist.ReduceOp.MIN, group=group)
    return int(found)


def is_any(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Whether the flag is set on at least one rank; the same on every rank. Collective."""
    return smallest(0 if flag else 1, group) == 0


def summed(numbers: Sequence[int]) -> list[int]:
    """The sums of whole numbers over all ranks, place by place, on every rank. Collective."""
    if not dist.is_initialized():
        return list(numbers)
    found = torch.tensor(numbers, dtype=torch.int64)
    with HEART.waiting("the other ranks"):
        dist.all_reduce(found)
    return [int(number) for number in found.tolist()]


def reduced(own: Sequence[float], reduction: Reduction, size: int) -> list[float]:
    """What ``reduction`` makes of the numbers of all ranks, on every rank. Collective.

    Rank 0 computes it, from the ranks in their order: so a sum of floats is the same at every run, which it would not
    be in the order of a tree.

    Args:
        own: equally many on every rank.
        reduction: called on rank 0 with one row per rank; must not raise, since the other ranks wait for it.
        size: how many numbers it returns.
    """
    if not dist.is_initialized():
        return list(reduction([list(own)]))
    row, found = torch.tensor(own, dtype=torch.float64), torch.empty(size, dtype=torch.float64)
    is_first = dist.get_rank() == 0
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())] if is_first else None
    with HEART.waiting("the other ranks"):
        dist.gather(row, rows)
        if rows is not None:
            found = torch.tensor(list(reduction(torch.stack(rows).tolist())), dtype=torch.float64)
            assert len(found) == size, "a reduction that returns another number of numbers than the ranks wait for"
        dist.broadcast(found, src=0)
    return [float(number) for number in found.tolist()]


def column_sums(rows: list[list[float]]) -> list[float]:
    """A ``Reduction``: sums in the order of the ranks."""
    return [sum(column) for column in zip(*rows, strict=True)]


def told(found: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    """Rank 0's ``found``, on every rank, in its order of ``names``, of which it may lack some. Collective.

    Args:
        found: on rank 0; that of others is not looked at.
        names: the same on every rank.
    """
    unknown = sorted(found.keys() - set(names))
    assert not unknown, f"{unknown} are not among the names that the other ranks wait for"

    def of_first(rows: list[list[float]]) -> list[float]:
        return [number for name in names for number in (float(name in found), found.get(name, 0.0))]

    row = reduced([], of_first, 2 * len(names))
    return {name: value for name, is_there, value in zip(names, row[::2], row[1::2], strict=True) if is_there}


def placed(own: Mapping[int, float], size: int) -> list[float]:
    """``size`` numbers of which each rank has some, by their places, and no two the same; on every rank. Collective."""
    found = torch.full((size,), -0.0, dtype=torch.float64)  # which added to any number leaves it as it is
    for place, number in own.items():
        found[place] = number
    if dist.is_initialized():
        with HEART.waiting("the other ranks"):
            dist.all_reduce(found)
    return [float(number) for number in found.tolist()]
