"""The answers that majorities are counted of."""

from __future__ import annotations

import pytest

from mega_rl.rewards.functions.extraction import EXTRACTORS, extractor
from mega_rl.rewards.functions.registry import BUILT_IN, load_reward


@pytest.mark.parametrize(
    ("name", "options", "text", "expected"),
    [
        ("exact_match", {}, " 12\n", "12"),
        ("exact_match", {}, " \n", None),
        ("exact_match", {"case_sensitive": False}, "Yes", "yes"),
        ("gsm8k", {}, "so 3 #### $1,200.00", "1200"),
        ("gsm8k", {}, "so 3", None),
        ("gsm8k", {"method": "flexible"}, "so 3.50 then", "7/2"),
        ("boxed", {}, r"\boxed{1} or \boxed{\frac{1}{2}}", "1/2"),
        ("boxed", {}, r"\boxed{ x + 1 }", "x+1"),
        ("boxed", {}, r"\boxed{ }", None),
        ("boxed", {}, "12", None),
        ("math_verify", {}, r"\boxed{0.5}", "1/2"),
        ("dapo_math", {}, "Answer: 3\nAnswer: $\\boxed{4.0}$", "4"),
        ("dapo_math", {}, "Answer: 3" + "." * 300, None),
    ],
)
def test_answer_of_a_response(name: str, options: dict[str, object], text: str, expected: str | None) -> None:
    extract = extractor(name, options)
    assert extract is not None and extract(text) == expected


def test_rewards_without_answers_have_no_extractor() -> None:
    assert extractor("repetition", {}) is None and extractor("mine.py:f", {}) is None
    assert set(EXTRACTORS) <= set(BUILT_IN)


@pytest.mark.parametrize("name", sorted(set(EXTRACTORS) - {"math_verify"}))
def test_equal_answers_get_equal_rewards(name: str) -> None:
    """Responses that vote for one answer are all right or all wrong."""
    extract, reward = extractor(name, {}), load_reward(name)
    assert extract is not None
    answers = ["72", "72.0", "$72$", "7 2", "x=72", "144/2", "abc", "a b c", ""]
    shapes = ("{}", "#### {}", r"\boxed{{{}}}", "Answer: {}")
    groups: dict[str, set[float]] = {}
    for text in (shape.format(answer) for shape in shapes for answer in answers):
        if (answer := extract(text)) is not None:
            score = reward(data_source="", solution_str=text, ground_truth="72", extra_info={})
            groups.setdefault(answer, set()).add(score)
    assert groups and all(len(scores) == 1 for scores in groups.values()), groups
