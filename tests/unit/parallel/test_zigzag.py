"""The tokens of context-parallel ranks: by hand, and as a partition for any lengths."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from mega_rl.parallel.zigzag import PADDING, padded_lengths, unpadded_positions, visible_keys, zigzag_positions

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=8)


def test_two_ranks_take_the_outer_and_the_inner_parts() -> None:
    padded = padded_lengths([8, 3], num_ranks=2, multiple=1)
    assert padded == [8, 4]
    assert zigzag_positions(padded, 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert zigzag_positions(padded, 2, 1).tolist() == [2, 3, 4, 5, 9, 10]
    assert unpadded_positions([8, 3], padded).tolist() == [*range(11), PADDING]


def test_a_tail_makes_every_ranks_share_divisible() -> None:
    assert padded_lengths([8], num_ranks=2, multiple=8) == [8, 8]
    assert padded_lengths([16], num_ranks=2, multiple=8) == [16]
    assert unpadded_positions([8], [8, 4]).tolist() == [*range(8), *[PADDING] * 4]


@given(LENGTHS, st.integers(2, 4), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_ranks_hold_every_token_once_and_work_equally_long(lengths: list[int], num_ranks: int, multiple: int) -> None:
    padded = padded_lengths(lengths, num_ranks, multiple)
    assert all(0 <= p - n < 2 * num_ranks for p, n in zip(padded, lengths, strict=False))
    shares = [zigzag_positions(padded, num_ranks, rank).tolist() for rank in range(num_ranks)]
    assert sorted(position for share in shares for position in share) == list(range(sum(padded)))
    assert len({len(share) for share in shares}) == 1 and len(shares[0]) % multiple == 0
    sources = unpadded_positions(lengths, padded).tolist()
    assert [s for s in sources if s != PADDING] == list(range(sum(lengths)))
    starts = [sum(padded[:i]) for i in range(len(padded))]
    work = [sum(p - max(s for s in starts if s <= p) for p in share) for share in shares]  # keys before each query
    assert max(work) - min(work) == 0


def test_a_part_sees_every_position_up_to_its_own_end() -> None:
    """Of one sequence of 8 on 2 ranks: rank 0 holds positions 0, 1 and 6, 7, rank 1 the four between."""
    outer, inner = (visible_keys([8], 2, rank) for rank in range(2))
    assert (outer.num_queries, outer.num_keys) == ((2, 2), (2, 8))
    assert outer.keys.tolist() == [0, 1, *[0, 1, 4, 5, 6, 7, 2, 3]]
    assert (inner.num_queries, inner.num_keys) == ((2, 2), (4, 6))
    assert inner.keys.tolist() == [*[0, 1, 4, 5], *[0, 1, 4, 5, 6, 7]]


@given(LENGTHS, st.integers(2, 4), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_the_keys_of_a_part_are_those_before_its_queries(lengths: list[int], num_ranks: int, multiple: int) -> None:
    padded = padded_lengths(lengths, num_ranks, multiple)
    shares = [zigzag_positions(padded, num_ranks, rank) for rank in range(num_ranks)]
    gathered = [position for share in shares for position in share.tolist()]
    borders = [sum(padded[:i]) for i in range(len(padded) + 1)]
    for rank, share in enumerate(shares):
        found, own = visible_keys(padded, num_ranks, rank), iter(share.tolist())
        keys = iter(found.keys.tolist())
        for number, (num_queries, num_keys) in enumerate(zip(found.num_queries, found.num_keys, strict=True)):
            seen = [gathered[next(keys)] for _ in range(num_keys)]
            start = borders[number // 2]
            assert seen == list(range(start, start + num_keys)), "in order, from the first of the sequence"
            assert [next(own) for _ in range(num_queries)] == seen[-num_queries:], "the queries are the last of them"
        assert next(keys, None) is None and next(own, None) is None
