"""The transfers of a run: everything once, then only what can have changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from mega_rl.bridge.reshard.execute import Transfer
from mega_rl.bridge.series import Series, having


class Transfers:
    """One transfer for the first sync and one for all later ones, in the same order on both sides.

    Args:
        wanted: what every destination holds, [rank] -> its series.
        changing: the tensors that can differ from one sync to the next; None: all.
        plan: makes this rank's part of a transfer for such a ``wanted``.
    """

    def __init__(
        self,
        wanted: Sequence[Sequence[Series]],
        changing: Collection[str] | None,
        plan: Callable[[Sequence[Sequence[Series]]], Transfer],
    ) -> None:
        self._now = plan(wanted)
        self._later = self._now if changing is None else plan([having(series, changing) for series in wanted])

    def next(self) -> Transfer:
        """The transfer of the sync that begins."""
        now, self._now = self._now, self._later
        return now
