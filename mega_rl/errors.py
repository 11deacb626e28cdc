"""The error that a user can fix, the end that a user asked for, and the end of a run that would not learn.

They stand alone so that no reader of a configuration has to import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MAX_SHOWN = 200  # characters of one value in a sentence
MAX_LISTED = 100  # problems in one error


class InputError(ValueError):
    """Something that a user can fix: one sentence that names the field or the file, and what to do."""


class GateFailure(RuntimeError):
    """A step shows that the run would not learn what it is meant to."""


class Stopped(Exception):
    """The run ends before its last step, because it was asked to; the checkpoint of the last finished one is there."""


def input_error(where: str, problems: Sequence[str]) -> InputError:
    """One sentence for one problem, else a numbered list; ``where`` names the file or the thing that is wrong."""
    assert problems
    if len(problems) == 1:
        return InputError(f"{where}: {problems[0]}")
    lines = [f"  {number}. {problem}" for number, problem in enumerate(problems[:MAX_LISTED], start=1)]
    if len(problems) > MAX_LISTED:
        lines.append(f"  and {len(problems) - MAX_LISTED} more")
    return InputError("\n".join([f"{where}: {len(problems)} problems", *lines]))


def shown(value: Any) -> str:
    """``repr`` of a value for a sentence, on one line; the middle of a long one is left out."""
    return shortened(repr(value))


def shortened(text: str) -> str:
    """A text for a sentence, on one line that can be printed; the middle of a long one is left out."""
    half = MAX_SHOWN // 2
    short = text if len(text) <= MAX_SHOWN else f"{text[:half]} ... {text[-half:]}"
    return short if short.isprintable() else short.encode("unicode_escape").decode()
