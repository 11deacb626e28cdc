"""Grading, figures and comparison of recorded answers, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from mega_rl.config.schema.sampling import RewardConfig
from mega_rl.errors import InputError
from mega_rl.evaluation.comparison import compare
from mega_rl.evaluation.grading import Grading, ProblemOutcome, outcomes
from mega_rl.evaluation.summary import ALL, Bootstrap, default_ks, summarise, table

REWARDS = [RewardConfig("overlong", 0.5, {"max_length": 9, "buffer": 2}), RewardConfig("gsm8k")]
DRAWN = Bootstrap(0, 200)


def response(kind: str, text: str, value: float | None, length: int = 3, finish: str = "stop") -> dict[str, Any]:
    parts = {"overlong": 0.0} | ({} if value is None else {"gsm8k": value})
    return {"kind": kind, "text": text, "parts": parts, "num_tokens": length, "finish_reason": finish}


def problem(number: int, truth: str, *responses: dict[str, Any], source: str = "s") -> dict[str, Any]:
    return {"problem": number, "data_source": source, "ground_truth": truth, "responses": list(responses)}


RECORDS = [
    problem(
        0,
        "1",
        response("greedy", "#### 1", 1.0),
        response("sampled", "#### 1", 1.0),
        response("sampled", "#### 1.0", 1.0),
        response("sampled", "#### 2", 0.0, 9, "length"),
    ),
    problem(
        1,
        "5",
        response("greedy", "#### 4", 0.0),
        response("sampled", "nothing", 0.0),
        response("sampled", "#### 5", None),
        response("sampled", "#### 5", 1.0),
    ),
]


def test_right_and_wrong_by_the_reward_with_a_truth() -> None:
    grading = Grading.of(REWARDS)
    assert grading.reward == "gsm8k" and Grading.of(REWARDS, "overlong", 0.0).extract is None
    assert Grading.of([RewardConfig("repetition")]).reward == "repetition"
    first, second = outcomes(RECORDS, grading)
    assert (first.greedy, first.sampled, first.votes) == (True, (True, True, False), ("1", "1", "2"))
    assert (second.greedy, second.sampled, second.votes) == (False, (False, True), (None, "5"))
    assert (first.num_cut, second.num_unknown, second.num_responses) == (1, 1, 4)
    with pytest.raises(InputError, match="--right-by is 'boxed': choose one of the rewards, overlong, gsm8k"):
        Grading.of(REWARDS, "boxed")


def test_every_source_is_graded_by_its_own_reward() -> None:
    """Of two sources, one reward has no answers that could be counted: no majority there, nor over both."""
    rewards = [
        RewardConfig("gsm8k", only=["g*"]),
        RewardConfig("m.py:proved", only=["m"]),
        RewardConfig("overlong", 0.5, {"max_length": 9, "buffer": 2}),
    ]
    proved = {"kind": "sampled", "text": "qed", "parts": {"proved": 1.0}, "num_tokens": 3, "finish_reason": "stop"}
    records = [problem(0, "1", response("sampled", "#### 1", 1.0), source="gsm"), problem(1, "", proved, source="m")]
    grading = Grading.of(rewards)
    found = outcomes(records, grading)
    assert [(one.sampled, one.votes) for one in found] == [((True,), ("1",)), ((True,), (None,))]
    summary = summarise(found, [1], grading, DRAWN)
    assert {name: set(of["metrics"]) for name, of in summary["sources"].items()} == {
        "gsm": {"pass@1", "maj@1"}, "m": {"pass@1"}, ALL: {"pass@1"},
    }  # fmt: skip
    assert summary["right"]["reward"] == "gsm8k, proved" and "the reward proved" in summary["notes"][0]
    by_length = Grading.of(rewards, "overlong", 0.0)
    assert {by_length.of_source(source).reward for source in ("gsm", "m", "other")} == {"overlong"}
    assert Grading.of(rewards, "proved").of_source("gsm").reward == "gsm8k"


def test_figures_by_hand() -> None:
    grading = Grading.of(REWARDS)
    found = summarise(outcomes(RECORDS, grading), [1, 2, 3], grading, DRAWN)
    (source,) = found["sources"].values()
    values = {name: (metric["value"], metric["num_problems"]) for name, metric in source["metrics"].items()}
    assert values == {
        "greedy": (0.5, 2),
        "pass@1": (pytest.approx((2 / 3 + 1 / 2) / 2), 2),
        "pass@2": (1.0, 2),
        "pass@3": (1.0, 1),  # one sample of the other problem has no reward
        "maj@1": (pytest.approx((2 / 3 + 1 / 2) / 2), 2),
        "maj@2": (pytest.approx(((1 + 0.5 + 0.5) / 3 + 1) / 2), 2),
        "maj@3": (1.0, 1),
    }
    assert all(metric["low"] <= metric["value"] <= metric["high"] for metric in source["metrics"].values())
    assert source["cut_fraction"] == 1 / 8 and source["num_unknown"] == 1 and not found["notes"]
    assert source["response_length_mean"] == pytest.approx((3 + 3 + 9 + 3 + 3 + 3) / 6)
    header, *rows = table(found)
    assert header == ("", "s") and dict(rows)["greedy"].startswith("0.5000  [") and dict(rows)["unknown rewards"] == "1"


def test_several_sources_have_a_row_over_all() -> None:
    grading = Grading.of(REWARDS)
    records = [RECORDS[0], RECORDS[1] | {"data_source": "t"}]
    found = summarise(outcomes(records, grading), [1], grading, DRAWN)
    assert list(found["sources"]) == ["s", "t", ALL]
    assert [source["metrics"]["greedy"]["value"] for source in found["sources"].values()] == [1.0, 0.0, 0.5]


def test_without_answers_there_is_no_majority_but_a_sentence() -> None:
    grading = Grading.of(REWARDS, "overlong", 0.0)
    found = summarise(outcomes(RECORDS, grading), [1], grading, DRAWN)
    assert found["notes"] == [
        "maj@k is left out: no answer can be read out of a response to the reward overlong",
    ]
    assert "maj@1" not in found["sources"]["s"]["metrics"]
    greedy_only = [record | {"responses": record["responses"][:1]} for record in RECORDS]
    alone = summarise(outcomes(greedy_only, grading), [], grading, DRAWN)
    assert list(alone["sources"]["s"]["metrics"]) == ["greedy"] and not alone["notes"]
    assert alone["sources"]["s"]["response_length_mean"] == 3.0


def test_default_ks() -> None:
    assert [default_ks(n) for n in (0, 1, 4, 6)] == [[], [1], [1, 2, 4], [1, 2, 4, 6]]


def outcome(number: int, greedy: bool | None, *sampled: bool, truth: str = "1") -> ProblemOutcome:
    return ProblemOutcome("s", number, truth, greedy, sampled, (None,) * len(sampled), (1,), 0, 1, 0)


def test_a_comparison_names_what_flipped() -> None:
    first = [outcome(i, i < 6, True, i < 5) for i in range(10)] + [outcome(10, True)]
    second = [outcome(i, i > 0, True, i != 4) for i in range(10)] + [outcome(11, True)]
    found = compare(first, second, DRAWN)
    assert (found["num_problems"], found["num_only_in_first"], found["num_only_in_second"]) == (10, 1, 1)
    greedy = found["greedy"]
    assert [p["problem"] for p in greedy["right_to_wrong"]] == [0]
    assert [p["problem"] for p in greedy["wrong_to_right"]] == [6, 7, 8, 9]
    assert (greedy["first"], greedy["second"]) == (0.6, 0.9)
    assert greedy["p_value"] == pytest.approx(2 * (1 + 5) / 2**5) and not greedy["is_significant"]
    sampled = found["sampled"]
    assert (sampled["first"], sampled["second"]) == (pytest.approx(0.75), pytest.approx(0.95))
    assert sampled["difference"]["value"] == pytest.approx(0.2)
    assert sampled["right_to_wrong"] == sampled["wrong_to_right"] == []  # half of the samples is right before and after


def test_a_clear_difference_of_samples_is_significant() -> None:
    first = [outcome(i, None, False, False) for i in range(30)]
    second = [outcome(i, None, True, i % 3 == 0) for i in range(30)]
    found = compare(first, second, DRAWN)
    assert found["greedy"] is None and found["sampled"]["is_significant"]
    assert len(found["sampled"]["wrong_to_right"]) == 30
    assert found["sampled"]["wrong_to_right"][1] == {"data_source": "s", "problem": 1, "first": 0.0, "second": 0.5}


def test_evaluations_of_other_problems_are_not_compared() -> None:
    with pytest.raises(InputError, match="no problem in common"):
        compare([outcome(0, True)], [outcome(1, True)], DRAWN)
    with pytest.raises(InputError, match="problem 0 of s has the ground truth '1' in the first evaluation and '2'"):
        compare([outcome(0, True)], [outcome(0, True, truth="2")], DRAWN)
