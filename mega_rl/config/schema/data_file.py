"""One entry of ``data.train_files`` or ``data.val_files``: ``FILE``, or ``FILE[:N]`` for the first N of its rows."""

from __future__ import annotations

import re
from dataclasses import dataclass

_BOUNDED = re.compile(r"(.+)\[:([1-9][0-9]{0,9})\]", re.DOTALL)


@dataclass(frozen=True)
class DataFile:
    path: str
    max_rows: int | None = None  # from its start, before anything is left out; None: all

    @classmethod
    def of(cls, entry: str) -> DataFile:
        found = _BOUNDED.fullmatch(entry)
        return cls(entry) if found is None else cls(found[1], int(found[2]))


def bounded(path: str, max_rows: int | None) -> str:
    """The entry for the first rows of a file; None: for all."""
    return path if max_rows is None else f"{path}[:{max_rows}]"
