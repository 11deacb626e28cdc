"""What every reward must hold. To check your own, add one line to CASES."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from mega_rl.config.schema import RewardConfig
from mega_rl.rewards.registry import BUILT_IN, Scorer, build_scorer
from mega_rl.types import Completion, InputError, Prompt

ROOT = Path(__file__).parents[2]
ODD_TEXTS = [
    "",
    " \n\t",
    "####",
    "\\boxed{",
    "1" * 10_000,
    "9" * 500 + "/0",
    "x" * 10_000,
    "-,.$%",
    "٣٤ 七 ½ \x00",
    "1e999",
]


@dataclass(frozen=True)
class Case:
    name: str  # as in the configuration
    truth: str
    right: str  # a response that scores higher ...
    wrong: str  # ... than this one
    options: dict[str, Any] = field(default_factory=dict)


CASES = [
    Case("exact_match", truth="42", right="42", wrong="43"),
    Case("gsm8k", truth="42", right="so #### 42", wrong="so #### 43"),
    Case("gsm8k", truth="42", right="so 42", wrong="so 43", options={"method": "flexible"}),
    Case("boxed", truth="1/2", right="\\boxed{\\frac{1}{2}}", wrong="1/2"),
    Case("format_regex", truth="", right="<a>42</a>", wrong="42", options={"pattern": "^<a>.*</a>$"}),
    Case(f"{ROOT}/examples/add_a_reward/closeness.py:closeness", truth="42", right="42", wrong="47"),
]


def scorer_of(case: Case, **more_options: Any) -> Scorer:
    return build_scorer([RewardConfig(case.name, options=case.options | more_options)])


def completion_of(case: Case, text: str) -> Completion:
    # A read-only mapping: a reward that writes to extra_info fails here, not on the next sample.
    prompt = Prompt(3, (1,), "?", case.truth, "some/source", MappingProxyType({"index": 3}))
    return Completion(prompt, 0, (2,), (-0.1,), text, "stop", 0)


each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.rpartition("/")[2])


@each_case
def test_right_scores_higher_than_wrong_and_always_the_same(case: Case) -> None:
    completions = [completion_of(case, text) for text in (case.right, case.wrong)]
    right, wrong = scorer_of(case).score(completions)
    assert right.value > wrong.value
    assert scorer_of(case).score(completions) == [right, wrong]
    assert right.parts == {case.name.rpartition(":")[2]: right.value}


@each_case
@pytest.mark.parametrize("text", ODD_TEXTS, ids=range(len(ODD_TEXTS)))
def test_odd_responses_get_a_finite_score(case: Case, text: str) -> None:
    (score,) = scorer_of(case).score([completion_of(case, text)])
    assert isinstance(score.value, float) and math.isfinite(score.value)


@each_case
def test_unknown_options_are_refused_before_the_first_sample(case: Case) -> None:
    with pytest.raises(InputError, match="no option 'no_such_option'"):
        scorer_of(case, no_such_option=1)


def test_every_built_in_reward_has_a_case() -> None:
    assert BUILT_IN.keys() <= {case.name for case in CASES}
