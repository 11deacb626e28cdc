"""What changes the trainer's weights on their way to the engines, and nowhere else: transforms ``Read -> Read``.

A sync reads what it sends through a ``Read``. A transform wraps that reader in another one, so that the trainer's own
weights are never written to and nothing has to be undone. ``fold`` applies the transforms of a run in their order, each
to what the one before it gives. Validation samples with the trained weights, adapters merged, and without noise
or rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from mega_rl.bridge.reshard.execute import Read

Metrics = Callable[[], dict[str, float]]  # the figures of one sync over all ranks, on every rank; collective


@dataclass(frozen=True)
class Changed:
    """What one transform does in one sync."""

    read: Read
    sigma: float = 0.0  # standard deviation of the random noise that it adds; 0.0: none
    metrics: Metrics = dict  # asked for once, after the sync has read everything


class Transform(Protocol):
    """One kind of change, constructed once per run and the same on every rank."""

    def for_sync(self, read: Read, version: int) -> Changed:
        """``read`` with this change, for the weights as they are now; collective.

        Args:
            read: gives tensors of the engine's dtype. The reader that is returned does too, and holds no collective.
            version: of the weights that are sent; keys what is random.
        """


@dataclass(frozen=True)
class Outgoing:
    """What one sync sends: the trainer's reader with all changes in their order."""

    read: Read
    changes: tuple[Changed, ...]

    @property
    def sigma(self) -> float:
        """Standard deviation of the noise on what is sent; 0.0: none."""
        return max((change.sigma for change in self.changes), default=0.0)

    def metrics(self) -> dict[str, float]:
        """The figures of all transforms, as of ``Metrics``; once, after the sync has read everything."""
        return {name: value for change in self.changes for name, value in change.metrics().items()}


def fold(transforms: Iterable[Transform], read: Read, version: int) -> Outgoing:
    """``read`` through every transform, the first one innermost; collective if one of them is."""
    changes = []
    for transform in transforms:
        changes.append(transform.for_sync(read, version))
        read = changes[-1].read
    return Outgoing(read, tuple(changes))
