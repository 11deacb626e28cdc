"""Process groups of a layout beside the policy's own.

Megatron-core knows the groups of one layout per process: they are global variables of ``parallel_state``, and so much
of it reads them there (schedules, mappings, sharded states) that no argument would reach every place. So whatever a
model with another layout does has to run while the variables are those of that layout.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core import parallel_state

from mega_rl.megatron.policy import initialize_groups
from mega_rl.parallel.layout import ParallelLayout


class Groups:
    """Megatron's process groups of one more layout of the same ranks. All ranks make it together.

    Args:
        layout: of all ranks.
        seed, collective_timeout_s: as ``initialize_groups``, which has run for the policy's layout.
    """

    def __init__(self, layout: ParallelLayout, seed: int, collective_timeout_s: float) -> None:
        names = [name for name in vars(parallel_state) if re.fullmatch("_[A-Z][A-Z_]*", name)]
        self._state: dict[str, Any] = {name: {} if isinstance(_get(name), dict) else None for name in names}
        with self.current():
            initialize_groups(layout, seed, collective_timeout_s)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Inside, Megatron has the groups of this layout."""
        others = self._swap(self._state)
        try:
            yield
        finally:
            self._state = self._swap(others)

    def _swap(self, state: dict[str, Any]) -> dict[str, Any]:
        before = {name: _get(name) for name in state}
        for name, value in state.items():
            setattr(parallel_state, name, value)
        return before


def _get(name: str) -> Any:
    return getattr(parallel_state, name)
