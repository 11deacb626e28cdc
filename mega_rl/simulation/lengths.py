"""How long the responses of a simulated run are."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mega_rl.errors import InputError

IN_COMMON = 0.5  # the share of the variance of log-lengths that the responses to one prompt have in common


class Lengths(Protocol):
    """The tokens of all responses of a step, of shape (groups, responses of a group); the same for the same step."""

    def __call__(self, step: int, num_groups: int, group_size: int) -> npt.NDArray[np.int64]: ...


@dataclass(frozen=True)
class Constant:
    """All responses are equally long."""

    tokens: int

    def __call__(self, step: int, num_groups: int, group_size: int) -> npt.NDArray[np.int64]:
        return np.full((num_groups, group_size), self.tokens, np.int64)


@dataclass(frozen=True)
class LogNormal:
    """Log-normal lengths, cut at ``longest``; those of one prompt are alike (``IN_COMMON``)."""

    median: float
    sigma: float
    longest: int
    seed: int = 0

    def __call__(self, step: int, num_groups: int, group_size: int) -> npt.NDArray[np.int64]:
        random = np.random.default_rng((self.seed, step))
        of_group = math.sqrt(IN_COMMON) * random.standard_normal((num_groups, 1))
        of_sample = math.sqrt(1 - IN_COMMON) * random.standard_normal((num_groups, group_size))
        logs = math.log(self.median) + self.sigma * (of_group + of_sample)
        return np.clip(np.exp(np.minimum(logs, math.log(self.longest))).round(), 1, self.longest).astype(np.int64)


@dataclass(frozen=True)
class Recorded:
    """Groups are drawn from recorded ones, and from each the lengths of its responses, with replacement."""

    groups: tuple[tuple[int, ...], ...]
    longest: int
    seed: int = 0

    def __call__(self, step: int, num_groups: int, group_size: int) -> npt.NDArray[np.int64]:
        random = np.random.default_rng((self.seed, step))
        chosen = random.integers(len(self.groups), size=num_groups)
        drawn = np.stack([random.choice(np.asarray(self.groups[g], np.int64), group_size) for g in chosen])
        return np.minimum(drawn, self.longest)


def read(path: Path) -> list[list[int]]:
    """The lengths that a run's ``rollouts/`` directory has, by group, or those of a text file, each for itself.

    Args:
        path: a run's directory, its ``rollouts/``, one ``step_*.jsonl`` of it, or a file with one whole number a line.

    Raises:
        InputError: there are none.
    """
    if path.is_dir():
        directory = path / "rollouts" if (path / "rollouts").is_dir() else path
        files = sorted(directory.glob("step_*.jsonl"))
        if not files:
            raise InputError(
                f"{path} holds no rollouts/step_*.jsonl: name the directory of a run that has recorded its rollouts"
            )
        return [group for file in files for group in _recorded(file)]
    if not path.is_file():
        raise InputError(f"{path} does not exist: name a run's directory, or a file with one length a line")
    if path.suffix == ".jsonl":
        return _recorded(path)
    return [[_length(path, number, line)] for number, line in _lines(path)]


def _lines(path: Path) -> list[tuple[int, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read ({error}): name a text file with one length a line") from error
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise InputError(f"{path} is empty: name a file with one length a line, or recorded rollouts")
    return lines


def _length(path: Path, number: int, line: str) -> int:
    if not (line.strip().isdecimal() and 1 <= len(line.strip()) <= 9 and int(line) >= 1):
        raise InputError(f"{path}:{number} is {line[:80]!r}: write one whole number of at least 1 a line")
    return int(line)


def _recorded(path: Path) -> list[list[int]]:
    """Rows of one group follow each other."""
    groups: list[list[int]] = []
    last: Any = None
    for number, line in _lines(path):
        try:
            row = json.loads(line)
            index, tokens = row["prompt"]["index"], len(row["token_ids"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError(f"{path}:{number} is not a recorded rollout ({type(error).__name__}: {error})") from error
        if index != last or not groups:
            groups.append([])
        last = index
        groups[-1].append(max(1, tokens))
    return groups
