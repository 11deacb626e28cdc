"""What an observer writes to: the base of all sinks, and the one that keeps every metric in a file of JSON lines."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mega_rl.errors import InputError


@dataclass(frozen=True)
class ShownSample:
    """What a dashboard shows of one answer."""

    prompt: str
    response: str
    expected: str
    score: float
    num_tokens: int  # of the response
    finish_reason: str
    pictures: Callable[[], tuple[bytes, ...]] = tuple  # makes those of the prompt small, JPEG: not every sink shows any


SAMPLE_COLUMNS = ("prompt", "response", "expected", "score", "tokens", "ended by")


def cells(sample: ShownSample) -> tuple[str, str, str, str, str, str]:
    """A row of a table with ``SAMPLE_COLUMNS``."""
    score, length = f"{sample.score:g}", str(sample.num_tokens)
    return sample.prompt, sample.response, sample.expected, score, length, sample.finish_reason


class Sink:
    """Everything that an observer writes to; a sink overrides what it has a place for, and leaves out the rest."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a step, which ends it."""

    def text(self, step: int, tag: str, text: str) -> None:
        """A longer text, shown as it is."""

    def samples(self, step: int, tag: str, samples: Sequence[ShownSample]) -> None:
        """A few answers, as a table."""

    def distribution(self, step: int, name: str, values: Sequence[float]) -> None:
        """All values of a step, finite ones, as a histogram; ``name`` is a metric with reduction DISTRIBUTION."""

    def message(self, message: str) -> None:
        """A line to the reader of the console."""

    def close(self) -> None:
        """Nothing is written after it."""


class JsonlSink(Sink):
    """One JSON object per logged step: ``{"step": 3, "metrics": {...}, "nonfinite": ["actor/kl"]}``.

    JSON has no NaN: such values are null, and ``nonfinite`` names them (the key is absent if there are none).
    A line is in the file once its ``log`` returned, so that a killed process loses no step.
    """

    def __init__(self, path: Path, first_step: int) -> None:
        """Keeps the rows of an earlier run before ``first_step``, and appends to them.

        Raises:
            InputError: the earlier file is damaged elsewhere than in its last line.
        """
        self.last_step: int | None = None  # of the rows that were kept
        if path.exists():
            rows = [row for row in read_jsonl(path) if row["step"] < first_step]
            replace_file(path, "".join(_line(row) for row in rows))
            self.last_step = max((row["step"] for row in rows), default=None)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        nonfinite = [name for name, value in metrics.items() if not math.isfinite(value)]
        row: dict[str, Any] = {"step": step, "metrics": {n: None if n in nonfinite else v for n, v in metrics.items()}}
        if nonfinite:
            row["nonfinite"] = nonfinite
        self._file.write(_line(row))

    def close(self) -> None:
        self._file.close()


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a ``JsonlSink``; a last line that a killed process tore is left out.

    Raises:
        InputError: another line is damaged.
    """
    rows, damaged = read_rows(path)
    if damaged:
        raise InputError(f"{path} is damaged at line {damaged[0]}: move the file away, or remove that line")
    return rows


def read_rows(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The good rows of a ``JsonlSink``, and the numbers of the damaged lines, a torn last one not counted."""
    lines = path.read_bytes().split(b"\n")
    rows, damaged = [], []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last line break is empty or torn
        try:
            row = json.loads(line)
            good = isinstance(row, dict) and isinstance(row.get("step"), int) and isinstance(row.get("metrics"), dict)
        except (ValueError, RecursionError):
            good = False
        if good:
            rows.append(row)
        else:
            damaged.append(number)
    return rows, damaged


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def replace_file(path: Path, text: str) -> None:
    """The path holds the old or the whole new text, whenever the process is killed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
