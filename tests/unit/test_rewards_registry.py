"""Finding rewards, binding their options, and the one sentence for everything that can go wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega_rl.config.schema import RewardConfig
from mega_rl.rewards.registry import build_scorer
from mega_rl.rewards.text import format_regex
from mega_rl.types import Completion, InputError, Prompt

REWARDS_FILE = """
import numpy
from typing import Literal
def length(data_source, solution_str, ground_truth, extra_info): return len(solution_str)
def raises(data_source, solution_str, ground_truth, extra_info): return extra_info["absent"]
def nan(data_source, solution_str, ground_truth, extra_info): return float("nan")
def text(data_source, solution_str, ground_truth, extra_info): return "1.0"
def nothing(data_source, solution_str, ground_truth, extra_info): pass
def narrow(*, data_source, solution_str, ground_truth, extra_info): return numpy.float32(0.5)
def anything(**given): return given["factor"] * (given["ground_truth"] == "t")
def three(data_source, solution_str, ground_truth): return 0.0
def levels(data_source, solution_str, ground_truth, extra_info, level: Literal["low", "high"] = "low"):
    return float(level == "high")
number = 3
"""


@pytest.fixture(scope="module")
def rewards_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "my_rewards.py"
    path.write_text(REWARDS_FILE)
    return path


def completion(text: str = "abc") -> Completion:
    return Completion(Prompt(7, (1,), "?", "t", "src"), 2, (1,), (0.0,), text, "stop", 0)


def value_of(name: str, **options: Any) -> float:
    (score,) = build_scorer([RewardConfig(name, options=options)]).score([completion()])
    return score.value


def test_weighted_sum_and_parts(rewards_file: Path) -> None:
    rewards = [
        RewardConfig(f"{rewards_file}:length", weight=0.5),
        RewardConfig("format_regex", weight=-1.0, options={"pattern": "b", "score": 0.25}),
    ]
    scores = build_scorer(rewards).score([completion("abc"), completion("xx")])
    assert [(score.value, score.parts) for score in scores] == [
        (1.25, {"length": 3.0, "format_regex": 0.25}),
        (1.0, {"length": 2.0, "format_regex": 0.0}),
    ]


def test_names_of_all_three_kinds(rewards_file: Path) -> None:
    assert value_of("exact_match") == 0.0
    assert value_of("mega_rl.rewards.math:exact_match") == 0.0
    assert value_of(f"{rewards_file}:narrow") == np.float32(0.5)
    assert value_of(f"{rewards_file}:anything", factor=3) == 3.0
    assert value_of(f"{rewards_file}:levels", level="high") == 1.0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("exact_mach", {}, r"'exact_mach' is not a built-in reward \(did you mean exact_match\?\)"),
        ("exact_match", {"case_sensitve": True}, r"no option 'case_sensitve' \(did you mean case_sensitive\?\)"),
        ("exact_match", {"solution_str": "x"}, "solution_str of exact_match is an argument of every reward"),
        ("gsm8k", {"method": "loose"}, "method of gsm8k is 'loose'; choose from strict, flexible"),
        ("format_regex", {}, "format_regex needs the option pattern"),
        ("FILE:lenght", {}, r"has no function 'lenght' \(did you mean length\?\)"),
        ("FILE:number", {}, "has no function 'number'"),
        ("FILE:length", {"x": 1}, "no option 'x'; it has none"),
        ("FILE:levels", {"level": "mid"}, "is 'mid'; choose from low, high"),
        ("FILE:three", {}, "does not take extra_info"),
        ("absent.py:f", {}, "absent.py, which is no file"),
        ("no_such_package.rewards:f", {}, "cannot be imported .*ModuleNotFoundError"),
    ],
)
def test_configuration_errors(rewards_file: Path, name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_scorer([RewardConfig(name.replace("FILE", str(rewards_file)), options=options)])


def test_a_list_without_rewards_or_with_a_name_twice_or_a_wrong_weight() -> None:
    with pytest.raises(InputError, match="rewards is empty"):
        build_scorer([])
    with pytest.raises(InputError, match="lists gsm8k twice"):
        build_scorer([RewardConfig("gsm8k"), RewardConfig("gsm8k", options={"method": "flexible"})])
    with pytest.raises(InputError, match="weight of gsm8k is nan"):
        build_scorer([RewardConfig("gsm8k", weight=float("nan"))])


def test_a_file_that_does_not_import(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0\n")
    with pytest.raises(InputError, match="broken.py cannot be imported .ZeroDivisionError"):
        build_scorer([RewardConfig(f"{broken}:f")])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("raises", r"the reward raises failed on src prompt 7 sample 2 \(KeyError: 'absent'\)"),
        ("nan", "the reward nan returned nan on src prompt 7 sample 2"),
        ("text", "the reward text returned '1.0' on src prompt 7 sample 2"),
        ("nothing", "the reward nothing returned None on src prompt 7 sample 2"),
    ],
)
def test_what_a_reward_may_not_do(rewards_file: Path, function: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        value_of(f"{rewards_file}:{function}")


def test_format_regex_spans_lines_and_takes_anchors() -> None:
    pattern = "^<think>.*</think>$"
    assert format_regex("s", "<think>a\nb</think>", "", {}, pattern) == 1.0
    assert format_regex("s", "x<think>a</think>", "", {}, pattern) == 0.0
