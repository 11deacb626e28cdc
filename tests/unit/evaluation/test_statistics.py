"""Estimators against their definitions, spelt out by brute force."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mega_rl.evaluation.statistics import interval_of_mean, maj_at_k, mcnemar, paired_shift, pass_at_k, resampled_means

SAMPLES = st.lists(st.sampled_from(["a", "b", "c", "d", None]), min_size=1, max_size=8)
RIGHT = {"a": 1.0, "b": 0.0, "c": 0.0, "d": 0.5}


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def majority(drawn: tuple[str | None, ...]) -> float:
    votes = Counter(answer for answer in drawn if answer is not None)
    most = max(votes.values(), default=0)
    return mean([RIGHT[answer] for answer, count in votes.items() if count == most]) if votes else 0.0


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_mean_over_all_subsets(answers: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(answers)))
    expected = mean([float(any(drawn)) for drawn in combinations(answers, k)])
    assert pass_at_k(len(answers), sum(answers), k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_1_is_the_share_of_right_answers_however_many() -> None:
    assert pass_at_k(4096, 3, 1) == pytest.approx(3 / 4096)
    assert pass_at_k(4096, 1, 4096) == 1.0 and pass_at_k(4096, 0, 4096) == 0.0


@given(SAMPLES, st.data())
def test_maj_at_k_is_the_mean_over_all_subsets(samples: list[str | None], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(samples)))
    expected = mean([majority(drawn) for drawn in combinations(samples, k)])
    counts = Counter(samples)
    num_blank = counts.pop(None, 0)
    votes = [(count, RIGHT[str(answer)]) for answer, count in counts.items()]
    assert maj_at_k(votes, num_blank, k) == pytest.approx(expected, abs=1e-9)


def test_maj_at_k_of_many_samples_stays_a_number() -> None:
    assert maj_at_k([(600, 1.0), (400, 0.0)], 24, 511) == pytest.approx(1.0, abs=1e-6)
    assert maj_at_k([(512, 1.0), (512, 0.0)], 0, 511) == pytest.approx(0.5, abs=1e-6)


def test_the_bootstrap_has_the_distribution_of_all_resamples() -> None:
    values = [0.0, 1.0, 1.0, 0.25]
    exact = np.array([mean(list(drawn)) for drawn in product(values, repeat=4)])
    means = resampled_means(values, seed=1, num_resamples=40_000)
    for at in (0.2, 0.4, 0.6, 0.8):
        assert (means <= at).mean() == pytest.approx((exact <= at).mean(), abs=0.01)
    low, high = interval_of_mean(values, 1, 40_000)
    assert (low, high) == pytest.approx(tuple(np.quantile(exact, [0.025, 0.975])), abs=0.07)


def test_the_bootstrap_repeats_itself_in_blocks_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [float(i % 3) for i in range(10)]
    whole = resampled_means(values, 3, 101)
    monkeypatch.setattr("mega_rl.evaluation.statistics.BLOCK", 70)
    assert np.array_equal(whole, resampled_means(values, 3, 101))
    assert not np.array_equal(whole, resampled_means(values, 4, 101))
    assert interval_of_mean([0.5], 0, 10) == (0.5, 0.5)


def test_paired_shift_tells_a_shift_from_none() -> None:
    none, some = paired_shift([1.0, -1.0] * 50, 0, 1000), paired_shift([1.0, 1.0, -1.0, 1.0] * 25, 0, 1000)
    assert none.mean == 0.0 and none.p_value > 0.5 and none.interval.low < 0 < none.interval.high
    assert some.mean == 0.5 and some.p_value < 0.01 and some.interval.low > 0
    same = paired_shift([0.0] * 5, 0, 100)
    assert same.p_value == 1.0 and same.interval == (0.0, 0.0)


@given(st.integers(0, 6), st.integers(0, 6))
def test_mcnemar_is_the_sign_test_of_the_discordant_pairs(only_first: int, only_second: int) -> None:
    number = only_first + only_second
    distance = abs(only_first - only_second)
    outcomes = [abs(2 * sum(sides) - number) for sides in product((0, 1), repeat=number)]
    expected = mean([float(outcome >= distance) for outcome in outcomes])
    assert mcnemar(only_first, only_second) == pytest.approx(expected, abs=1e-12)
