"""Answers compared as mathematics, by the math-verify library (which loads sympy: a module of its own)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import math_verify as library

from mega_rl.rewards.functions.math import last_boxed

for name in ("math_verify.parser", "math_verify.grader"):  # both warn, at every call, of what is chosen on purpose here
    logging.getLogger(name).setLevel(logging.ERROR)


def math_verify(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any],
    correct: float = 1.0,
    format_score: float = 0.0,
) -> float:
    r"""Grades the last mathematical expression of a response: equal in value or form to the ground truth or not.

    That is the content of the last ``\boxed{}``; without one, what the library finds behind "final answer is" or
    "answer", else the last expression. Expressions that are joined by "and", "or" or a comma are one set.

    The library's own time limits use SIGALRM, which code in C can hold up: they are off, and the deadline of the reward
    worker holds instead.

    Args:
        ground_truth: LaTeX with or without ``$`` or ``\boxed{}``, or a plain number.
        format_score: the reward of an expression that is not the right one; none found gives 0.

    Raises:
        ValueError: a ground truth in which there is no expression.
    """
    truth = _parsed(ground_truth) if _is_marked(ground_truth) else _parsed(f"${ground_truth}$")
    if not truth:
        raise ValueError(f"the ground truth {ground_truth!r:.60} is no mathematical expression")
    found = _parsed(solution_str)
    if not found:
        return 0.0
    return correct if library.verify(truth, found, timeout_seconds=None) else format_score


def _is_marked(text: str) -> bool:
    return any(mark in text for mark in ("$", r"\boxed", r"\(", r"\["))


def _parsed(text: str) -> list[Any]:
    box = last_boxed(text)  # the library takes all boxes of a text, as a set
    expressions: list[Any] = library.parse(text if box is None else rf"\boxed{{{box}}}", parsing_timeout=None)
    return expressions
