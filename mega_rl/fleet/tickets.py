"""Tickets: the groups that every step draws, and the weights that each of them is sampled with.

A *ticket* is one prompt's group of responses in one step. *Version* v of the weights is what v trained steps left, so
step k trains weights of version k. The *staleness* of a token is the step that it is trained in minus the version of
the weights that sampled it; ``eta`` is the largest that is allowed.

With ``is_pinned`` every ticket of step k is sampled wholly with version max(0, k - eta). Then what a step learns from
does not depend on the number, the speed or the death of engines. Otherwise engines take new weights while requests run;
a step is begun when version k - eta is there, so no token is ever older. eta = 0 is synchronous training, either way.

The *validation* of a version is a step of its own with the number ``held_out(version)``, which is negative. Its weights
have the same number: those of the version as they are, where training may sample from changed ones. It is pinned to
them in every mode, and nothing is trained on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


def held_out(version: int) -> int:
    """The number of a version's validation, and of its weights; the function is its own inverse."""
    return -2 - version  # -1 is no version


def shown(version: int) -> int | str | None:
    """The number of weights for people: "validation of K" for those of a validation, None for none."""
    return version if version >= 0 else None if version == -1 else f"validation of {held_out(version)}"


def named(version: int) -> str:
    """Some weights in a sentence."""
    if version < -1:
        return f"the weights for the validation after step {held_out(version)}"
    return f"version {version}" if version >= 0 else "no weights"


class Key(NamedTuple):
    """One ticket. Tickets count from 0 in every step; from ``Rules.num_groups`` on they replace dropped ones."""

    step: int
    ticket: int


@dataclass(frozen=True)
class Rules:
    """What a run samples."""

    num_groups: int  # kept groups that a step wants
    group_size: int  # responses of a group
    total_steps: int
    eta: int = 0
    is_pinned: bool = True
    budget: int | None = None  # tickets that a step may draw at most; None: none is replaced
    num_parts: int = 1  # a group is dealt in so many parts: more than one only where engines outnumber groups

    def __post_init__(self) -> None:
        assert self.num_groups >= 1 and self.group_size >= 1 and self.total_steps >= 0 and self.eta >= 0, self
        assert self.budget is None or self.budget >= self.num_groups, self
        assert 1 <= self.num_parts <= self.group_size, self

    def oldest_version(self, step: int) -> int:
        """The oldest weights that may sample for a step; of pinned tickets the only ones."""
        return step if step < 0 else max(0, step - self.eta)

    def is_pinned_step(self, number: int) -> bool:
        """Whether one version samples all of a step; also by the number of the version, of a validation the same."""
        return self.is_pinned or number < 0

    def num_steps(self, version: int) -> int:
        """How many steps may be begun when this version is the newest: those below the returned number."""
        return min(self.total_steps, version + self.eta + 1)

    def replacement(self, num_dropped: int) -> int | None:
        """The ticket to draw after the ``num_dropped``-th drop (1, 2, ...) of a step, or None.

        The tickets of a step are therefore the fewest that hold ``num_groups`` kept groups, or the budget, whatever the
        order in which they end.
        """
        ticket = self.num_groups + num_dropped - 1
        return ticket if self.budget is not None and ticket < self.budget else None

    def parts(self) -> list[tuple[int, ...]]:
        """The sample numbers of each part of a group."""
        size = -(-self.group_size // self.num_parts)
        return [tuple(range(low, min(low + size, self.group_size))) for low in range(0, self.group_size, size)]

    def place(self, key: Key) -> tuple[str, int, int]:
        """Which prompt a ticket draws: ``("main", 0, position in the order of the run)``, or
        ``("spare", step, position in an order of that step alone)`` for one that replaces a dropped ticket.

        So no step waits for the drops of the steps before it to know where it begins.
        """
        if key.ticket < self.num_groups:
            return "main", 0, key.step * self.num_groups + key.ticket
        return "spare", key.step, key.ticket - self.num_groups
