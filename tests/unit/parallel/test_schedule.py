"""Properties of the schedule that every training step relies on."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings, strategies as st

from mega_rl.errors import InputError
from mega_rl.parallel.schedule import balance, split_even

MAX_TOKENS = 64


def costs_of(schedule: list[list[list[int]]], lengths: list[int], slope: float) -> list[float]:
    return [sum(lengths[i] * (1 + slope * lengths[i]) for m in rank for i in m) for rank in schedule]


@given(st.lists(st.integers(1, MAX_TOKENS), max_size=50), st.integers(1, 6), st.sampled_from((0.0, 0.05)))
@settings(max_examples=300, deadline=None)
def test_every_schedule_keeps_the_promises(lengths: list[int], num_ranks: int, slope: float) -> None:
    schedule = balance(lengths, num_ranks, MAX_TOKENS, attention_slope=slope)
    microbatches = [microbatch for rank in schedule for microbatch in rank]
    assert sorted(index for microbatch in microbatches for index in microbatch) == list(range(len(lengths)))
    assert len(schedule) == num_ranks
    assert len({len(rank) for rank in schedule}) == 1 and len(schedule[0]) >= 1
    assert all(microbatch == sorted(microbatch) for microbatch in microbatches)
    for rank in schedule:
        loads = [sum(lengths[i] for i in microbatch) for microbatch in rank]
        assert loads == sorted(loads, reverse=True) and loads[0] <= MAX_TOKENS
        assert loads.count(0) == max(0, len(rank) - sum(len(microbatch) for microbatch in rank))
    costs = costs_of(schedule, lengths, slope)
    longest = max(lengths, default=0)
    assert max(costs) - min(costs) <= longest * (1 + slope * longest) + 1e-6
    assert balance(list(lengths), num_ranks, MAX_TOKENS, attention_slope=slope) == schedule


@pytest.mark.parametrize("shortest", [0.02, 0.45, 0.52])
def test_a_large_batch_is_within_one_percent_of_the_bounds(shortest: float) -> None:
    """8,192 sequences, most of them too long to share a micro-batch; the old rule tried one round after another."""
    generator = random.Random(0)
    cap, num_ranks, slope = 16384, 8, 1 / 65536
    lengths = [int(cap * generator.uniform(shortest, 1.0)) for _ in range(8192)]
    schedule = balance(lengths, num_ranks, cap, attention_slope=slope)
    costs = costs_of(schedule, lengths, slope)
    assert max(costs) <= 1.01 * sum(costs) / num_ranks
    fewest = max(sum(2 * length > cap for length in lengths), sum(lengths) / cap)
    assert len(schedule[0]) * num_ranks <= 1.01 * fewest + num_ranks


def test_a_rank_with_a_long_sequence_gets_fewer_tokens() -> None:
    """At this slope the long one, 50 of 250 tokens, costs 300 of 700."""
    lengths = [50] + [10] * 20
    schedule = balance(lengths, 2, 64, attention_slope=0.1)
    with_long = next(rank for rank in schedule if any(0 in microbatch for microbatch in rank))
    tokens = sum(lengths[i] for microbatch in with_long for i in microbatch)
    assert tokens < sum(lengths) / 2
    costs = costs_of(schedule, lengths, 0.1)
    assert max(costs) - min(costs) <= 20


def test_even_work_is_shared_evenly_in_the_fewest_microbatches() -> None:
    schedule = balance([10] * 24, num_data_parallel=3, max_tokens=40)
    assert [[len(microbatch) for microbatch in rank] for rank in schedule] == [[4, 4]] * 3


def test_one_long_sequence_does_not_make_its_rank_the_slow_one() -> None:
    lengths = [60, 20, 20, 20, 20, 20, 20]
    schedule = balance(lengths, num_data_parallel=2, max_tokens=100)
    totals = sorted(sum(lengths[i] for microbatch in rank for i in microbatch) for rank in schedule)
    assert totals == [80, 100]


def test_long_sequences_are_placed_first_so_that_short_ones_fill_the_gaps() -> None:
    assert balance([20, 20, 20, 60], num_data_parallel=2, max_tokens=60) == [[[3]], [[0, 1, 2]]]


def test_fewer_sequences_than_ranks_leaves_explicit_empty_microbatches() -> None:
    assert balance([5], num_data_parallel=3, max_tokens=8) == [[[0]], [[]], [[]]]
    assert balance([], num_data_parallel=2, max_tokens=8) == [[[]], [[]]]


def test_a_sequence_longer_than_a_microbatch_is_an_input_error() -> None:
    with pytest.raises(InputError, match=r"trainer\.max_tokens_per_microbatch = 8 is less than one sequence of 9"):
        balance([3, 9], num_data_parallel=1, max_tokens=8)


@given(st.lists(st.integers(1, MAX_TOKENS), max_size=30), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_an_interleaved_pipeline_gets_whole_rounds(lengths: list[int], num_ranks: int, multiple: int) -> None:
    schedule = balance(lengths, num_ranks, MAX_TOKENS, multiple)
    assert {len(rank) % multiple for rank in schedule} == {0} and len({len(rank) for rank in schedule}) == 1
    assert sorted(i for rank in schedule for microbatch in rank for i in microbatch) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in microbatch) <= MAX_TOKENS for rank in schedule for microbatch in rank)


def test_a_round_is_filled_up_with_empty_microbatches() -> None:
    assert balance([5, 4, 3], num_data_parallel=1, max_tokens=8, multiple=4) == [[[0], [1], [2], []]]


@given(st.integers(0, 200), st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_split_even_is_consecutive_and_even(num_items: int, num_parts: int) -> None:
    parts = split_even(num_items, num_parts)
    assert len(parts) == num_parts
    assert [item for part in parts for item in part] == list(range(num_items))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
