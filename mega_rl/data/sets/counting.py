"""Records out of rows: duplicates and contradictions are found, and whatever is left out is counted with an example."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from mega_rl.data.rows.columns import REFUSED, TOOLS
from mega_rl.data.rows.rows import Row

NOTHING: tuple[Any, ...] = (None, [], {}, "")  # of a column or key that other rows use
# What no set takes, and why.
LEFT_OUT = REFUSED | {name: "training reads such rows as they are, without this tool" for name in TOOLS}
DUPLICATE = "duplicate"
CONTRADICTED = "the same as another row, but for the answer"


class Dropped(Exception):
    """This row becomes no record; the message is the reason, the same words for every such row."""


@dataclass(frozen=True)
class Record:
    """What a row becomes."""

    fields: dict[str, Any]  # as it is written
    problem: str  # the same text for the same problem: no such one may be in training and validation
    content: str = ""  # with the problem, what two rows must have in common to be the same
    truth: str = ""  # two rows that are the same otherwise contradict each other if this differs


Make = Callable[[Row], Record]  # raises Dropped, or InputError where the file holds another kind of rows


@dataclass
class RowCounts:
    """What became of the rows of one split: those that were read are those kept and those dropped."""

    num_read: int = 0
    dropped: dict[str, tuple[int, str]] = field(default_factory=dict)  # reason -> how many, where the first one stands
    unused: set[str] = field(default_factory=set)  # columns that hold something and are not read

    @property
    def num_dropped(self) -> int:
        return sum(number for number, _ in self.dropped.values())

    def drop(self, reason: str, where: str) -> None:
        number, first = self.dropped.get(reason, (0, where))
        self.dropped[reason] = (number + 1, first)

    def lines(self) -> list[str]:
        """One line for each reason."""
        return [
            f"{number:,} dropped: {reason}; the first is {where}" for reason, (number, where) in self.dropped.items()
        ]


@dataclass(frozen=True)
class KeptRows:
    record: Record
    where: str


def fold(text: str) -> str:
    """The text by which two problems count as the same: letters in lower case, white space as single spaces."""
    return " ".join(text.split()).casefold()


def digest(*texts: str) -> bytes:
    """16 bytes instead of texts that may be long."""
    return hashlib.blake2b("\0".join(texts).encode(errors="surrogatepass"), digest_size=16).digest()


def collect(rows: Iterable[Row], make: Make, columns: frozenset[str]) -> tuple[list[KeptRows], RowCounts]:
    """The records of a split in the order of their rows, each only once.

    Of rows that are equal but for the answer none is kept: at least one of them is wrong.

    Args:
        columns: those that ``make`` reads; others that hold something are named in the counts.
    """
    counts = RowCounts()
    kept: dict[bytes, KeptRows] = {}
    contradicted: set[bytes] = set()
    for row in rows:
        counts.num_read += 1
        counts.unused.update(name for name, value in row.fields.items() if name not in columns and value not in NOTHING)
        try:
            for name, why in LEFT_OUT.items():
                if name not in columns and row.get(name) not in NOTHING:
                    raise Dropped(f"with {name}, but {why}")
            record = make(row)
        except Dropped as reason:
            counts.drop(str(reason), row.where)
            continue
        key = digest(record.problem, record.content)
        first = kept.get(key)
        if first is None:
            kept[key] = KeptRows(record, row.where)
        elif first.record.truth == record.truth:
            counts.drop(DUPLICATE, row.where)
        else:
            counts.drop(CONTRADICTED, row.where)
            contradicted.add(key)
    for key in contradicted:
        counts.drop(CONTRADICTED, kept.pop(key).where)
    return list(kept.values()), counts
