"""The answer that a response gives, as the built-in rewards read it: what majorities are counted of.

Two responses vote for the same answer if their texts here are equal, so numbers stand in one form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mega_rl.rewards.functions.forms import canonical, parse_number
from mega_rl.rewards.functions.math import ANSWER_LINE, ANY_NUMBER, MARKED_NUMBER, MAX_ANSWER_DISTANCE, last_boxed

Extractor = Callable[[str], str | None]


def extractor(name: str, options: Mapping[str, Any]) -> Extractor | None:
    """What reads the answer out of a response to the reward of this name; None if the reward has no such notion.

    The extractor returns None for a response without an answer.
    """
    make = EXTRACTORS.get(name)
    return None if make is None else make(options)


def _whole(options: Mapping[str, Any]) -> Extractor:
    is_exact = options.get("case_sensitive", True)
    return lambda text: (text if is_exact else text.casefold()).strip() or None


def _number(options: Mapping[str, Any]) -> Extractor:
    pattern = MARKED_NUMBER if options.get("method", "strict") == "strict" else ANY_NUMBER

    def last_number(text: str) -> str | None:
        found = pattern.findall(text)
        number = parse_number(found[-1]) if found else None
        return None if number is None else str(number)

    return last_number


def _box(options: Mapping[str, Any]) -> Extractor:
    return lambda text: _canonical(last_boxed(text))


def _answer_line(options: Mapping[str, Any]) -> Extractor:
    def last_line(text: str) -> str | None:
        lines = ANSWER_LINE.findall(text[-MAX_ANSWER_DISTANCE:])
        box = last_boxed(lines[-1]) if lines else None
        return _canonical(box if box is not None else lines[-1] if lines else None)

    return last_line


def _canonical(answer: str | None) -> str | None:
    return None if answer is None else canonical(answer) or None


# A built-in reward -> from its options to the extractor. math_verify is read like boxed: only a box is sure to be one
# expression without running a parser of mathematics in this process.
EXTRACTORS: dict[str, Callable[[Mapping[str, Any]], Extractor]] = {
    "exact_match": _whole,
    "gsm8k": _number,
    "boxed": _box,
    "math_verify": _box,
    "dapo_math": _answer_line,
}
