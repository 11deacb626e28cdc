"""What every reward must hold. To check your own, add one line to CASES."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mega_rl.config.schema.sampling import RewardConfig, RewardWorkersConfig
from mega_rl.rewards.functions.registry import BUILT_IN, bind
from mega_rl.rewards.sandbox.sandbox import has_namespaces
from mega_rl.rewards.scorer import Scorer, build_scorer
from mega_rl.types import Prompt, Trajectory

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


ADD = "```python\nprint(sum(map(int, input().split())))\n```"
CODE_OPTIONS = {"isolation": "namespaces" if has_namespaces() else "limits", "timeout_s": 60.0}
CASES = [
    Case("exact_match", truth="42", right="42", wrong="43"),
    Case("gsm8k", truth="42", right="so #### 42", wrong="so #### 43"),
    Case("gsm8k", truth="42", right="so 42", wrong="so 43", options={"method": "flexible"}),
    Case("boxed", truth="1/2", right="\\boxed{\\frac{1}{2}}", wrong="1/2"),
    Case("dapo_math", truth="42", right="Answer: 42", wrong="42"),
    Case("math_verify", truth="1/2", right="so $\\frac{2}{4}$", wrong="so $\\frac{2}{3}$"),
    Case("format_regex", truth="", right="<a>42</a>", wrong="42", options={"pattern": "^<a>.*</a>$"}),
    Case("repetition", truth="", right="a b c d e", wrong="a a a a a a"),
    Case("overlong", truth="", right="a", wrong="a b c", options={"max_length": 3, "buffer": 2}),
    Case("code_tests", '{"inputs": ["1 2"], "outputs": ["3"]}', ADD, ADD.replace("sum", "max"), CODE_OPTIONS),
    Case(f"{ROOT}/examples/add_a_reward/closeness.py:closeness", truth="42", right="42", wrong="47"),
    Case(f"{ROOT}/examples/add_a_reward/closeness.py:closeness_of_batch", truth="42", right="42", wrong="47"),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name.rpartition("/")[2])
def case(request: pytest.FixtureRequest) -> Case:
    if request.param.name == "math_verify" and importlib.util.find_spec("math_verify") is None:
        pytest.skip("math-verify is not installed: pip install --no-deps -r requirements/cpu.lock")
    if request.param.name == "code_tests" and CODE_OPTIONS["isolation"] == "limits" and os.geteuid() == 0:
        pytest.skip("this system allows no unprivileged namespaces, and root runs no programs without them")
    return request.param


@pytest.fixture(scope="module")
def scorer(case: Case) -> Iterator[Scorer]:
    built = build_scorer([RewardConfig(case.name, options=case.options)], RewardWorkersConfig(num_workers=1))
    yield built
    built.close()


def trajectory_of(case: Case, text: str) -> Trajectory:
    prompt = Prompt(3, (1,), "?", case.truth, "some/source", {"index": 3})
    num_tokens = len(text.split())
    return Trajectory.single_turn(prompt, 0, (2,) * num_tokens, (-0.1,) * num_tokens, text, "stop", 0)


def test_right_scores_higher_than_wrong_and_always_the_same(case: Case, scorer: Scorer) -> None:
    trajectories = [trajectory_of(case, text) for text in (case.right, case.wrong)]
    right, wrong = scorer.score(trajectories)
    assert right.value > wrong.value
    assert scorer.score(trajectories[::-1]) == [wrong, right]
    assert right.parts == {case.name.rpartition(":")[2]: right.value}


def test_odd_responses_get_a_finite_score(case: Case, scorer: Scorer) -> None:
    scores = scorer.score([trajectory_of(case, text) for text in ODD_TEXTS])
    for text, score in zip(ODD_TEXTS, scores, strict=True):
        assert isinstance(score.value, float) and math.isfinite(score.value), (text[:20], score)


def test_unknown_options_are_refused_before_the_first_sample(case: Case) -> None:
    with pytest.raises(ValueError, match="no option 'no_such_option'"):
        bind(case.name, case.options | {"no_such_option": 1})


def test_every_built_in_reward_has_a_case() -> None:
    assert BUILT_IN.keys() <= {case.name for case in CASES}
