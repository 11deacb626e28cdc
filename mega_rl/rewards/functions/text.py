"""Rewards on the form of a response. Each takes (data_source, solution_str, ground_truth, extra_info)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def format_regex(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any],
    pattern: str,
    score: float = 1.0,
) -> float:
    """``score`` if the pattern is found in the response, else 0.

    Args:
        pattern: a Python regular expression, searched with ``.`` matching newlines; anchor it with ``^`` and ``$`` to
            describe the whole response.
    """
    return score if re.search(pattern, solution_str, re.DOTALL) else 0.0


def repetition(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any],
    ngram_size: int = 4,
    max_penalty: float = 1.0,
) -> float:
    """Between 0 and ``-max_penalty``: ``-max_penalty * (1 - distinct n-grams / n-grams)`` of the response's words.

    Words are what whitespace separates. A response shorter than an n-gram repeats nothing. Source of the formula: the
    n-gram repetition penalty of Yeo et al., arXiv 2502.03373.
    """
    words = solution_str.split()
    ngrams = [tuple(words[i : i + ngram_size]) for i in range(len(words) - ngram_size + 1)]
    return -max_penalty * (1.0 - len(set(ngrams)) / len(ngrams)) if ngrams else 0.0


def overlong(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any],
    num_response_tokens: int,
    max_length: int,
    buffer: int,
    factor: float = 1.0,
) -> float:
    """DAPO's soft punishment of long responses: from 0 down to ``-factor`` over the last ``buffer`` tokens.

    ``factor * max(-1, min(0, (max_length - buffer - length) / buffer))``; with a factor of 1 it is equation 13 of DAPO,
    arXiv 2503.14476, and so no more than ``-factor`` beyond ``max_length``.

    Args:
        max_length: tokens; the length at which the punishment reaches ``-factor``.
        buffer: tokens before ``max_length`` over which it grows from 0.
    """
    return factor * max(-1.0, min(0.0, (max_length - buffer - num_response_tokens) / buffer))


def _check_format_regex(pattern: str, **options: Any) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is no regular expression ({error})") from error


def _check_repetition(ngram_size: int = 4, max_penalty: float = 1.0) -> None:
    if ngram_size < 1 or max_penalty < 0:
        raise ValueError(f"ngram_size {ngram_size} must be at least 1 and max_penalty {max_penalty} at least 0")


def _check_overlong(max_length: int, buffer: int, factor: float = 1.0) -> None:
    if not 0 < buffer <= max_length or factor < 0:
        raise ValueError(
            f"buffer {buffer} must be above 0 and at most max_length {max_length}, and factor {factor} at least 0"
        )


format_regex.check_options = _check_format_regex  # type: ignore[attr-defined]
repetition.check_options = _check_repetition  # type: ignore[attr-defined]
overlong.check_options = _check_overlong  # type: ignore[attr-defined]
