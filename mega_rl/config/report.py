"""How a list of problems becomes the one error that a user reads."""

from __future__ import annotations

from collections.abc import Sequence

from mega_rl.errors import InputError


def input_error(where: str, problems: Sequence[str]) -> InputError:
    """One sentence for one problem, else a numbered list; ``where`` names the file or the thing that is wrong."""
    assert problems
    if len(problems) == 1:
        return InputError(f"{where}: {problems[0]}")
    lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, start=1))
    return InputError(f"{where}: {len(problems)} problems\n{lines}")
