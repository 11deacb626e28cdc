"""The error that a user can fix; it stands alone so that no reader of a configuration has to import torch."""

from __future__ import annotations

from collections.abc import Sequence


class InputError(ValueError):
    """Something that a user can fix: one sentence that names the field or the file, and what to do."""


def input_error(where: str, problems: Sequence[str]) -> InputError:
    """One sentence for one problem, else a numbered list; ``where`` names the file or the thing that is wrong."""
    assert problems
    if len(problems) == 1:
        return InputError(f"{where}: {problems[0]}")
    lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, start=1))
    return InputError(f"{where}: {len(problems)} problems\n{lines}")
