"""Ranks that engines hand responses to, all of them in this process."""

from __future__ import annotations

from functools import partial

from mega_rl.rollout.collect.handed_trajectories import HandedTrajectories, OwnerAddress
from mega_rl.types import Response, Trajectory


class Owners:
    """As a context, for as long as it lasts."""

    def __init__(self, number: int) -> None:
        self.taken = [dict[int, Trajectory]() for _ in range(number)]  # by rank and number
        self.handed = [HandedTrajectories(partial(self._own, rank), is_here=True) for rank in range(number)]
        self.addresses = tuple(
            OwnerAddress(rank, "127.0.0.1", one.port, one.key) for rank, one in enumerate(self.handed)
        )

    def whole(self, told: Response) -> Trajectory:
        if isinstance(told, Trajectory):
            return told
        owner, number = told.summary.key
        return self.taken[owner][number]

    def __enter__(self) -> Owners:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.handed:
            one.close()

    def _own(self, rank: int, trajectory: Trajectory) -> int:
        number = len(self.taken[rank])
        while self.taken[rank].setdefault(number, trajectory) is not trajectory:  # another thread has it
            number += 1
        return number


def not_handed(trajectory: Response) -> Trajectory:
    """For a run without such ranks."""
    assert isinstance(trajectory, Trajectory)
    return trajectory
