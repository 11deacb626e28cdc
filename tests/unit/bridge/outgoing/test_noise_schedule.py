"""The noise schedule, exactly: tables, boundaries of stages, all small K and totals."""

from __future__ import annotations

import math

import pytest

from mega_rl.bridge.outgoing.noise import AqnNoise, sigma_at, stage_of
from mega_rl.config.schema.sampling import AqnConfig

SCHEDULES = ("exponential", "exponential_eq8", "exponential_alg1", "linear", "cosine", "constant")


def table(schedule: str, num_stages: int, start: float = 5e-2, end: float = 5e-4) -> list[float]:
    """One sigma per stage: a run of one step per stage."""
    return [sigma_at(schedule, stage, num_stages, num_stages, start, end) for stage in range(num_stages)]


def test_table_of_the_specification() -> None:
    expected = [0, 0.05, 0.0281, 0.0158, 0.00889, 0.005, 0.00281, 0.00158, 0.000889, 0.0005]
    got = table("exponential", 10)
    assert got == pytest.approx(expected, rel=2e-3)
    assert (got[0], got[1], got[-1]) == (0.0, 0.05, 0.0005)


def test_the_three_exponentials_differ_as_stated() -> None:
    assert table("exponential_eq8", 3) == pytest.approx([5e-2, 5e-3, 5e-4])
    assert table("exponential_alg1", 3) == pytest.approx([0, 5e-2, 5e-3])
    assert table("exponential", 3) == pytest.approx([0, 5e-2, 5e-4])
    assert table("exponential_alg1", 10)[1:] == table("exponential_eq8", 10)[:-1]


def test_linear_cosine_and_constant() -> None:
    assert table("linear", 5, 4.0, 2.0) == pytest.approx([4.0, 3.5, 3.0, 2.5, 2.0])
    assert table("cosine", 5, 4.0, 2.0) == pytest.approx([4.0, 3 + math.sqrt(0.5), 3.0, 3 - math.sqrt(0.5), 2.0])
    assert table("constant", 4, 4.0, 2.0) == [4.0] * 4


def test_one_stage_is_constant_and_two_are_clean_then_start() -> None:
    for schedule in SCHEDULES:
        assert table(schedule, 1) == [0.05]
    assert table("exponential", 2) == table("exponential_alg1", 2) == [0.0, 0.05]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_value_is_finite_within_bounds_and_ends_where_it_should(schedule: str) -> None:
    for num_stages in range(1, 13):
        sigmas = table(schedule, num_stages)
        assert all(math.isfinite(sigma) and 0 <= sigma <= 0.05 for sigma in sigmas)
        noisy = [sigma for sigma in sigmas if sigma > 0]
        assert noisy == sorted(noisy, reverse=True)
        if schedule in ("exponential", "exponential_eq8", "linear", "cosine") and num_stages > 2:
            assert sigmas[-1] == 0.0005


def test_stage_boundaries_for_all_totals() -> None:
    for num_stages in range(1, 13):
        for total in range(1, 2001):
            assert stage_of(0, total, num_stages) == 0
            assert stage_of(total, total, num_stages) == stage_of(10 * total, total, num_stages) == num_stages - 1
            for stage in range(1, num_stages):
                first = -(-stage * total // num_stages)  # the first step at or beyond stage / K of the run
                assert stage_of(first, total, num_stages) >= stage > stage_of(first - 1, total, num_stages)


def test_sigma_depends_on_the_step_alone_so_a_resumed_run_continues_it() -> None:
    config = AqnConfig(enabled=True)
    whole = [AqnNoise(config, 37).sigma(step) for step in range(37)]
    assert [AqnNoise(config, 37).sigma(step) for step in range(20, 37)] == whole[20:]
    assert len(set(whole)) == 10


def test_disabled_is_sigma_zero() -> None:
    assert AqnNoise(AqnConfig(enabled=False), 10).sigma(5) == 0.0
