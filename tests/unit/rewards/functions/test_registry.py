"""Finding rewards, binding their options, and the one sentence for everything that can be wrong at the start."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mega_rl.config.schema.sampling import RewardConfig, RewardWorkersConfig
from mega_rl.errors import InputError
from mega_rl.rewards.functions.registry import bind
from mega_rl.rewards.scorer import Scorer, WeightedReward, build_scorer
from mega_rl.types import Prompt, Trajectory
from tests.recorded.trajectories import two_turns

REWARDS_FILE = """
import numpy
from typing import Literal
def length(data_source, solution_str, ground_truth, extra_info): return len(solution_str)
def nan(data_source, solution_str, ground_truth, extra_info): return float("nan")
def narrow(*, data_source, solution_str, ground_truth, extra_info): return numpy.float32(0.5)
def anything(**given): return given["factor"] * (given["ground_truth"] == "t")
def no_response(data_sources, ground_truths): return [0.0]
def trl(prompts, completions, level, **columns): return [len(c) + len(columns["hint"][0]) for c in completions]
def trl_column(completions, solution, hint): return [float(s == "t" and h == "hh") for s, h in zip(solution, hint)]
def plain(response, answer): return float(response == "abc" and answer == "t")
def with_score(solution_str, ground_truth): return {"score": 2, "acc": True, "pred": "x", "length": 3.5}
async def waits(data_source, solution_str, ground_truth, extra_info, num_response_tokens, sure: bool = True): return 1
def nothing(): return 0.0
def levels(data_source, solution_str, ground_truth, extra_info, level: Literal["low", "high"] = "low"):
    return float(level == "high")
number = 3
"""


@pytest.fixture(scope="module")
def rewards_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "my_rewards.py"
    path.write_text(REWARDS_FILE)
    return path


def trajectory(text: str = "abc") -> Trajectory:
    return Trajectory.single_turn(Prompt(7, (1,), "?", "t", "src"), 2, (1,), (0.0,), text, "stop", 0)


def value_of(name: str, **options: Any) -> float:
    reward = bind(name, options)
    return reward.function(**reward.arguments([("src", "abc", "t", {}, 1)]))


def test_workers_are_sent_a_text_and_how_many_tokens_were_sampled() -> None:
    sent: list[Any] = []

    def submit(samples: list[bytes], rewards: Sequence[int]) -> Future[list[list[float]]]:
        sent.extend(map(pickle.loads, samples))
        result: Future[list[list[float]]] = Future()
        result.set_result([[1.0] * len(samples)])
        return result

    pool: Any = SimpleNamespace(submit=submit)
    Scorer([WeightedReward("a", 1.0)], pool).score([two_turns(), trajectory("abc")])
    assert sent == [
        ("arithmetic", "call 7", "7", {"prompt": two_turns().prompt.text}, 5),
        ("src", "abc", "t", {"prompt": "?"}, 1),
    ]


def test_weighted_sum_parts_and_what_is_unknown(rewards_file: Path) -> None:
    rewards = [
        RewardConfig(f"{rewards_file}:length", weight=0.5),
        RewardConfig("format_regex", weight=-1.0, options={"pattern": "b", "score": 0.25}),
    ]
    one = RewardWorkersConfig(num_workers=1)
    scorer = build_scorer(rewards, one)
    scores = scorer.score([trajectory("abc"), trajectory("xx")])
    scorer.close()
    assert [(score.value, score.parts) for score in scores] == [
        (1.25, {"length": 3.0, "format_regex": 0.25}),
        (1.0, {"length": 2.0, "format_regex": 0.0}),
    ]
    # A weight of 0 does not make an unknown reward known: it would hide that it fails.
    scorer = build_scorer([*rewards, RewardConfig(f"{rewards_file}:nan", weight=0.0)], one)
    (score,) = scorer.score([trajectory("abc")])
    scorer.close()
    assert not score.is_known and score.parts == {"length": 3.0, "format_regex": 0.25}
    assert {name: unknown.cause for name, unknown in score.unknown.items()} == {"nan": "not_a_number"}


def of_source(source: str, text: str = "abc") -> Trajectory:
    return Trajectory.single_turn(Prompt(7, (1,), "?", "abc", source), 2, (1,), (0.0,), text, "stop", 0)


def test_a_row_is_scored_by_the_rewards_of_its_source(rewards_file: Path) -> None:
    """One name twice is two rewards, of other sources each; a failing reward costs the rows of its sources only."""
    length = f"{rewards_file}:length"
    rewards = [
        RewardConfig(length, weight=0.5, only=["a"]),
        RewardConfig("exact_match"),
        RewardConfig(length, weight=2.0, only=["b*", "c"]),
        RewardConfig(f"{rewards_file}:nan", only=["bad"]),
    ]
    scorer = build_scorer(rewards, RewardWorkersConfig(num_workers=2))
    sources = ["b1", "a", "other", "c", "bad", "A", "a"]
    expected = [7.0, 2.5, 1.0, 7.0, math.nan, 1.0, 2.5]
    together = scorer.score([of_source(source) for source in sources])
    alone = [scorer.start(of_source(source)).result() for source in sources]
    scorer.close()
    for scores in (together, alone):
        assert [score.value for score in scores] == pytest.approx(expected, nan_ok=True)
        assert [set(score.parts) for score in scores[1:4]] == [
            {"length", "exact_match"}, {"exact_match"}, {"length", "exact_match"},
        ]  # fmt: skip
        assert set(scores[4].unknown) == {"nan"} and not any(score.unknown for score in scores[:4])


def test_names_of_all_three_kinds(rewards_file: Path) -> None:
    assert value_of("exact_match") == 0.0
    assert value_of("mega_rl.rewards.functions.math:exact_match") == 0.0
    assert value_of(f"{rewards_file}:narrow") == np.float32(0.5)
    assert value_of(f"{rewards_file}:anything", factor=3) == 3.0
    assert value_of(f"{rewards_file}:levels", level="high") == 1.0


def test_signatures_of_others_are_known_by_their_parameters(rewards_file: Path) -> None:
    sample = ("src", "abc", "t", {"prompt": "?", "hint": "hh"}, 1)
    values = {}
    for name, options in {"trl": {"level": 1}, "trl_column": {}, "plain": {}}.items():
        reward = bind(f"{rewards_file}:{name}", options)
        values[name] = reward.function(**reward.arguments([sample]))
    assert values == {"trl": [5], "trl_column": [1.0], "plain": 1.0}


def test_a_dictionary_has_a_score_and_figures(rewards_file: Path) -> None:
    scorer = build_scorer([RewardConfig(f"{rewards_file}:with_score")], RewardWorkersConfig(num_workers=1))
    (score,) = scorer.score([trajectory("abc")])
    scorer.close()
    assert score.value == 2.0
    assert score.parts == {"with_score": 2.0, "with_score/acc": 1.0, "with_score/length": 3.5}


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
        ("FILE:no_response", {}, "takes data_sources, ground_truths, but no solution_str"),
        ("FILE:plain", {"answer": "x"}, "answer of FILE:plain is an argument of every reward"),
        ("FILE:waits", {"num_response_tokens": 3}, "num_response_tokens of FILE:waits is an argument of every reward"),
        ("FILE:waits", {"sure": 1}, "sure of FILE:waits is 1; give a value of type bool"),
        ("FILE:nothing", {}, "takes nothing, but no solution_str"),
        ("absent.py:f", {}, "absent.py, which is no file"),
        ("no_such_package.rewards:f", {}, "cannot be imported .*ModuleNotFoundError"),
    ],
)
def test_configuration_errors(rewards_file: Path, name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("FILE", str(rewards_file))):
        bind(name.replace("FILE", str(rewards_file)), options)


def test_what_a_worker_refuses_is_an_input_error(rewards_file: Path) -> None:
    with pytest.raises(InputError, match="has no function 'lenght'"):
        build_scorer([RewardConfig(f"{rewards_file}:lenght")])


def test_a_list_without_rewards_or_with_a_name_twice_or_a_wrong_weight() -> None:
    with pytest.raises(InputError, match="rewards is empty"):
        build_scorer([])
    with pytest.raises(InputError, match="lists gsm8k twice"):
        build_scorer([RewardConfig("gsm8k"), RewardConfig("gsm8k", options={"method": "flexible"})])
    with pytest.raises(InputError, match="lists gsm8k twice"):
        build_scorer([RewardConfig("gsm8k", only=["a"]), RewardConfig("gsm8k")])
    with pytest.raises(InputError, match="weight of gsm8k is nan"):
        build_scorer([RewardConfig("gsm8k", weight=float("nan"))])


def test_a_file_that_does_not_import(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0\n")
    with pytest.raises(ValueError, match="broken.py cannot be imported .ZeroDivisionError"):
        bind(f"{broken}:f", {})
