"""Rewards for answers that a rule can check. Each takes (data_source, solution_str, ground_truth, extra_info)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from mega_rl.rewards.functions.forms import is_equal, parse_number

# A minus is a sign only if it does not stand between two numbers; commas belong to a number only between thousands.
NUMBER = r"(?:(?<![0-9)])-)?\$?(?:(?<=\$)-)?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
ANY_NUMBER = re.compile(NUMBER)
# Behind the marker, the whole number or nothing: "#### 1,2" is not an answer of 1.
MARKED_NUMBER = re.compile(r"####[ \t]*(" + NUMBER + r"(?:/[0-9]+)?)(?![.,/]?[0-9])")
ANSWER_LINE = re.compile(r"answer[ \t]*:[ \t]*([^\n]+)", re.IGNORECASE)
MAX_ANSWER_DISTANCE = 300  # characters: DAPO reads no more than the end of a response


def exact_match(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any],
    case_sensitive: bool = True,
) -> float:
    """1 if the whole response, stripped of surrounding whitespace, is the ground truth, else 0."""
    response, truth = solution_str.strip(), ground_truth.strip()
    if not case_sensitive:
        response, truth = response.casefold(), truth.casefold()
    return float(response == truth)


def gsm8k(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any],
    method: Literal["strict", "flexible"] = "strict",
    correct: float = 1.0,
    format_score: float = 0.0,
) -> float:
    """Grades the final number of a GSM8K solution.

    Args:
        ground_truth: a number, or a whole solution that ends with ``#### <number>``.
        method: strict takes the last number behind ``####``; flexible the last number anywhere.
        correct: the reward of the right number; values are compared, so that "72", "$72.00" and "72." are equal.
        format_score: the reward of a number that is found but wrong; none found gives 0.

    Raises:
        ValueError: a ground truth that is no number, or another method.
    """
    truth = parse_number(ground_truth.rpartition("####")[2])
    if truth is None:
        raise ValueError(f"the ground truth {ground_truth!r:.60} is not a number")
    if method not in ("strict", "flexible"):
        raise ValueError(f"method is {method!r}; choose strict or flexible")
    found = (MARKED_NUMBER if method == "strict" else ANY_NUMBER).findall(solution_str)
    if not found:
        return 0.0
    return correct if parse_number(found[-1]) == truth else format_score


def boxed(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any],
    correct: float = 1.0,
    format_score: float = 0.0,
) -> float:
    r"""Grades what the last ``\boxed{...}`` says: numbers (fractions too) by value, other text without markup.

    A unit or ``x =`` that only one of answer and truth has is left out, see `forms.is_equal`.

    Args:
        ground_truth: the answer, inside or outside of a ``\boxed{}``.
        format_score: the reward of a box with a wrong answer; no box, or an empty one, gives 0.
    """
    content = last_boxed(solution_str)
    if content is None or not content.strip():
        return 0.0
    return correct if _is_right(content, ground_truth) else format_score


def dapo_math(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any],
    correct: float = 1.0,
    incorrect: float = -1.0,
) -> float:
    r"""DAPO's rule: the last ``Answer: ...`` line must hold the ground truth; +1 or -1 (arXiv 2503.14476, section 2.4).

    Only the last 300 characters are read. The answer may stand in ``$...$`` or ``\boxed{...}``; it is compared as
    in `boxed`.
    """
    lines = ANSWER_LINE.findall(solution_str[-MAX_ANSWER_DISTANCE:])
    if not lines:
        return incorrect
    content = last_boxed(lines[-1])
    return correct if _is_right(lines[-1] if content is None else content, ground_truth) else incorrect


def _is_right(answer: str, ground_truth: str) -> bool:
    """Whether the answer says what the truth does, which may stand in a box."""
    truth = last_boxed(ground_truth)
    return is_equal(answer, ground_truth if truth is None else truth)


def last_boxed(text: str) -> str | None:
    r"""What the last closed ``\boxed{...}`` holds, inner braces balanced; None without one."""
    open_starts: list[int | None] = []  # of every open brace: where its content begins if it is a box
    last: tuple[int, int] | None = None
    for position, character in enumerate(text):
        if character == "{":
            open_starts.append(position + 1 if text.endswith("\\boxed", 0, position) else None)
        elif character == "}" and open_starts:
            start = open_starts.pop()
            if start is not None and (last is None or start > last[0]):
                last = (start, position)
    return None if last is None else text[slice(*last)]
