"""The order of data: a function of (seed, epoch) alone, resumable, and refused for other data."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from mega_rl.data.stream import Stream, epoch_order, fingerprint
from mega_rl.errors import InputError


class Letters:
    """Single letters: enough of a data set for a stream."""

    def __init__(self, letters: str) -> None:
        self.letters = letters
        self.fingerprint = fingerprint([letters.encode()])

    def __len__(self) -> int:
        return len(self.letters)

    def __getitem__(self, position: int) -> str:
        return self.letters[position]


def stream(batch_size: int = 3, shuffle: bool = True, seed: int = 5, letters: str = "abcdefghij") -> Stream[str]:
    return Stream(Letters(letters), batch_size, shuffle, seed)


def take(source: Stream[str], num_batches: int) -> list[str]:
    return ["".join(source.next_batch()) for _ in range(num_batches)]


def test_an_epoch_holds_full_batches_of_different_rows_and_the_next_one_differs() -> None:
    source = stream()
    assert source.steps_per_epoch == 3
    first, second = take(source, 3), take(source, 3)
    assert len(set("".join(first))) == len(set("".join(second))) == 9
    assert first != second
    assert source.epoch == 1


def test_the_order_is_pinned() -> None:
    # A change here reorders the data of every run that is resumed after an upgrade.
    assert epoch_order(8, True, 0, 0).tolist() == [6, 5, 7, 0, 1, 2, 4, 3]
    assert epoch_order(8, True, 0, 1).tolist() == [1, 4, 6, 2, 0, 7, 3, 5]


def test_without_shuffling_it_is_the_order_of_the_files() -> None:
    assert take(stream(shuffle=False), 4) == ["abc", "def", "ghi", "abc"]


@given(st.integers(1, 10), st.integers(0, 12), st.integers(0, 12), st.booleans())
def test_resuming_continues_as_if_never_stopped(batch_size: int, before: int, after: int, shuffle: bool) -> None:
    whole = take(stream(batch_size, shuffle), before + after)
    first = stream(batch_size, shuffle)
    take(first, before)
    resumed = stream(batch_size, shuffle)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert resumed.state_dict() == first.state_dict()
    assert take(resumed, after) == whole[before:]


def test_another_batch_size_continues_at_the_same_row() -> None:
    first = stream(batch_size=2, shuffle=False)
    take(first, 2)
    resumed = stream(batch_size=3, shuffle=False)
    resumed.load_state_dict(first.state_dict())
    assert take(resumed, 3) == ["efg", "hij", "abc"]


def test_global_random_numbers_are_neither_read_nor_written() -> None:
    def states() -> list[object]:
        return [
            random.getstate(),
            np.random.get_state(legacy=False)["state"]["key"].tolist(),
            torch.get_rng_state().tolist(),
        ]

    before = states()
    first = take(stream(), 4)
    assert states() == before
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(2)
    assert take(stream(), 4) == first


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (stream(letters="abcdefghik"), "data.train_files .* give other rows than those of the checkpoint"),
        (stream(seed=6), "data.seed is 6 but the checkpoint was trained with 5"),
        (stream(shuffle=False), "data.shuffle is False but the checkpoint was trained with True"),
    ],
)
def test_other_data_or_order_is_refused(other: Stream[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        other.load_state_dict(stream().state_dict())


def test_an_incomplete_state_is_refused() -> None:
    state = stream().state_dict()
    del state["position"]
    with pytest.raises(InputError, match="data position lacks position"):
        stream().load_state_dict(state)


@pytest.mark.parametrize("batch_size", [0, 11])
def test_a_batch_that_cannot_be_filled_is_refused(batch_size: int) -> None:
    with pytest.raises(InputError, match="data.train_batch_size is .* the data set has 10"):
        stream(batch_size)


def test_fingerprints_see_content_order_and_borders() -> None:
    parts = [[b"ab", b"c"], [b"a", b"bc"], [b"c", b"ab"], [b"ab", b"d"], [b"ab"]]
    assert len({fingerprint(part) for part in parts}) == len(parts)


@given(st.integers(1, 5), st.integers(0, 12), st.booleans())
def test_any_batch_of_a_run_is_known_by_its_number_and_has_spares(batch_size: int, batch: int, shuffle: bool) -> None:
    source = stream(batch_size, shuffle)
    order, expected = source.batch_order, take(stream(batch_size, shuffle), batch + 1)[batch]
    assert "".join(order.item(batch, place) for place in range(batch_size)) == expected
    spares = [order.spare(batch, place) for place in range(10 - batch_size)]
    assert sorted([*expected, *spares]) == list("abcdefghij") and source.epochs == 0
    assert spares != [order.spare(batch + 1, place) for place in range(10 - batch_size)] or batch_size > 3


def test_whole_batches_are_told_from_other_positions() -> None:
    whole, single = stream(), stream()
    assert whole.is_after(0) and not whole.is_after(1)
    for taken in range(1, 2 * whole.steps_per_epoch + 2):
        whole.next_batch()
        assert whole.is_after(taken) and not whole.is_after(taken - 1)
    single.next_item()
    assert not single.is_after(0) and not single.is_after(1)
