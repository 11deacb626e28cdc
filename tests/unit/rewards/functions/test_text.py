"""Rewards on the form of a response, by hand-computed numbers."""

from __future__ import annotations

from typing import Any

import pytest

from mega_rl.rewards.functions.registry import bind
from mega_rl.rewards.functions.text import format_regex, overlong, repetition


def test_format_regex_spans_lines_and_takes_anchors() -> None:
    pattern = "^<think>.*</think>$"
    assert format_regex("s", "<think>a\nb</think>", "", {}, pattern) == 1.0
    assert format_regex("s", "x<think>a</think>", "", {}, pattern) == 0.0


@pytest.mark.parametrize(
    ("text", "ngram_size", "expected"),
    [
        ("a b c d", 2, 0.0),
        ("a b a b", 2, -1 / 3),  # ab ba ab
        ("a a a a a", 1, -0.8),
        ("a b", 3, 0.0),
        ("", 1, 0.0),
    ],
)
def test_repetition(text: str, ngram_size: int, expected: float) -> None:
    assert repetition("s", text, "", {}, ngram_size) == pytest.approx(expected)
    assert repetition("s", text, "", {}, ngram_size, max_penalty=0.5) == pytest.approx(expected / 2)


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(0, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (20481, -1.0), (40960, -1.0)],
)
def test_overlong_is_dapos(num_tokens: int, expected: float) -> None:
    assert overlong("s", "", "", {}, num_tokens, max_length=20480, buffer=4096) == expected
    assert overlong("s", "", "", {}, num_tokens, max_length=20480, buffer=4096, factor=2.0) == 2 * expected


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("format_regex", {"pattern": "("}, "pattern '\\(' is no regular expression"),
        ("repetition", {"ngram_size": 0}, "ngram_size 0 must be at least 1"),
        ("repetition", {"ngram_size": "4"}, "ngram_size of repetition is '4'; give a value of type int"),
        ("overlong", {"max_length": 10, "buffer": 0}, "buffer 0 must be above 0"),
        ("overlong", {"max_length": 10, "buffer": 11}, "at most max_length 10"),
        ("overlong", {"max_length": 10}, "needs the option buffer"),
        ("overlong", {"num_response_tokens": 3}, "is an argument of every reward"),
        ("code_tests", {"timeout_s": 0}, "timeout_s 0 must be above 0"),
        ("code_tests", {"isolation": "none"}, "choose from namespaces, limits"),
    ],
)
def test_impossible_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bind(name, options)
