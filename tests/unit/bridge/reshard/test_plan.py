"""The planner's promises, over random layouts: everything once, from an owner, minimal and balanced."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mega_rl.bridge.mapping.megatron import ModelChunk, Shard, megatron_series, megatron_slices
from mega_rl.bridge.mapping.tensors import full_series
from mega_rl.bridge.mapping.vllm import vllm_series, vllm_slices
from mega_rl.bridge.reshard.buckets import schedule
from mega_rl.bridge.reshard.plan import ReshardPlan, compile_plan
from mega_rl.bridge.reshard.runs import Move
from mega_rl.bridge.series import Series, slices_of
from mega_rl.bridge.slices import Slice, extents, indices, num_elements, whole_box
from mega_rl.models.mixture import Mixture
from mega_rl.models.shape import ModelShape
from mega_rl.parallel.layout import ParallelLayout

Layout = list[list[Slice]]


def cut_tensor(draw: st.DrawFn, name: str, size: tuple[int, ...], num_ranks: int, local_name: str) -> Layout:
    """A random grid over one tensor; every cell goes to at least one random rank, stacked in a local parameter."""
    grid: list[tuple[tuple[int, int], ...]] = [()]
    for length in size:
        inner = draw(st.sets(st.integers(1, length - 1), max_size=2)) if length > 1 else set()
        cuts = sorted({0, length, *inner})
        grid = [(*cell, edge) for cell in grid for edge in zip(cuts, cuts[1:], strict=False)]
    layout: Layout = [[] for _ in range(num_ranks)]
    offset = [0] * num_ranks
    for cell in grid:
        ranks = draw(st.sets(st.integers(0, num_ranks - 1), min_size=1))
        for rank in sorted(ranks):
            rows = cell[0][1] - cell[0][0]
            local = ((offset[rank], offset[rank] + rows), *cell[1:])
            layout[rank].append(Slice(name, cell, local_name, local))
            offset[rank] += rows
    return layout


@st.composite
def random_layouts(draw: st.DrawFn) -> tuple[Layout, Layout]:
    num_ranks = draw(st.integers(1, 4))
    sizes = {"matrix": (draw(st.integers(1, 9)), draw(st.integers(1, 7))), "vector": (draw(st.integers(1, 9)),)}
    sources: Layout = [[] for _ in range(num_ranks)]
    destinations: Layout = [[] for _ in range(num_ranks)]
    for name, size in sizes.items():
        for i in range(draw(st.integers(1, 2))):  # a second grid makes boxes that overlap others in part
            for rank, slices in enumerate(cut_tensor(draw, name, size, num_ranks, f"held{i}.{name}")):
                sources[rank] += slices
        for rank, slices in enumerate(cut_tensor(draw, name, size, num_ranks, f"wanted.{name}")):
            destinations[rank] += slices
    return sources, destinations


Arrays = dict[str, np.ndarray]


def numbered_elements(slices: list[Slice]) -> Arrays:
    """Every element of every tensor is a number of its own, above 0."""
    sizes: dict[str, list[int]] = {}
    for s in slices:
        ends = [end for _, end in s.hf_box]
        sizes[s.hf_name] = [max(pair) for pair in zip(sizes.get(s.hf_name, ends), ends, strict=True)]
    tensors, first = {}, 1
    for name, size in sizes.items():
        count = math.prod(size)
        tensors[name] = np.arange(first, first + count).reshape(size)
        first += count
    return tensors


def local_arrays(slices: list[Slice], tensors: Arrays) -> Arrays:
    """A rank's parameters, made from the whole tensors; 0 where no slice is."""
    sizes: dict[str, list[int]] = {}
    for s in slices:
        ends = [end for _, end in s.local_box]
        sizes[s.local_name] = [max(pair) for pair in zip(sizes.get(s.local_name, ends), ends, strict=True)]
    local = {name: np.zeros(size, int) for name, size in sizes.items()}
    for s in slices:
        place = local[s.local_name][indices(s.local_box)]
        place[...] = tensors[s.hf_name][indices(s.hf_box)].reshape(place.shape)
    return local


def carry_out(plan: ReshardPlan, held: list[Arrays], wanted: list[Arrays], room: int) -> list[Arrays]:
    """What the ranks' parameters are after a sync by numpy, exchange by exchange; checks the exchanges on the way."""
    got = [{name: np.zeros_like(array) for name, array in arrays.items()} for arrays in wanted]

    def write(moves: Iterable[Move]) -> None:
        for m in moves:
            assert num_elements(m.src_box) == num_elements(m.dst_box) == m.num_elements
            place = got[m.dst_rank][m.dst_name][indices(m.dst_box)]
            place += held[m.src_rank][m.src_name][indices(m.src_box)].reshape(place.shape)  # twice shows

    schedules = [schedule(plan, rank, room) for rank in range(plan.num_ranks)]
    assert len({s.num_buckets for s in schedules}) == 1
    for s in schedules:
        write(move for run in s.copies for move in run.moves())
    for buckets in zip(*[s.buckets() for s in schedules], strict=True):
        sent, received = defaultdict(list), defaultdict(list)
        for rank, bucket in enumerate(buckets):
            sends, receives = list(bucket.sends()), list(bucket.receives())
            assert sum(m.num_elements for m in sends + receives) <= room
            assert [m.dst_rank for m in sends] == sorted(m.dst_rank for m in sends)
            assert [m.src_rank for m in receives] == sorted(m.src_rank for m in receives)
            for m in sends:
                sent[m.src_rank, m.dst_rank].append(m)
            for m in receives:
                received[m.src_rank, m.dst_rank].append(m)
            for peer in range(plan.num_ranks):
                size = sum(m.num_elements for m in sent[rank, peer])
                assert bucket.send_sizes().get(peer, 0) == buckets[peer].receive_sizes().get(rank, 0) == size
            write(receives)
        assert {pair: moves for pair, moves in sent.items() if moves} == received, "the two ends differ"
    return got


def check_plan(plan: ReshardPlan, sources: Layout, destinations: Layout, room: int = 10**6) -> None:
    """Every destination element once, from its own place on a source, and no byte more than must be received."""
    tensors = numbered_elements([s for slices in (*sources, *destinations) for s in slices])
    held, wanted = ([local_arrays(slices, tensors) for slices in side] for side in (sources, destinations))
    for rank, arrays in enumerate(carry_out(plan, held, wanted, room)):
        for name, array in arrays.items():
            assert np.array_equal(array, wanted[rank][name]), f"rank {rank}: {name}"
        here, there = ([0, *chain(*[array.flat for array in side[rank].values()])] for side in (held, wanted))
        volume = plan.volume(rank)
        assert volume.received == volume.minimum == len(np.setdiff1d(there, here))
    total = plan.volume()
    assert total.sent == total.received == total.minimum


def inside(inner: tuple[tuple[int, int], ...], outer: tuple[tuple[int, int], ...]) -> bool:
    return all(o0 <= i0 and i1 <= o1 for (i0, i1), (o0, o1) in zip(inner, outer, strict=True))


@settings(max_examples=60, deadline=None)
@given(random_layouts(), st.sampled_from([20, 1000]))
def test_random_layouts(case: tuple[Layout, Layout], room: int) -> None:
    check_plan(compile_plan(*case), *case, room)


SHAPE = ModelShape(
    family="qwen2",
    num_layers=4,
    hidden_size=16,
    ffn_size=32,
    num_heads=8,
    num_kv_heads=4,
    head_dim=2,
    vocab_size=77,
    tied=True,
    qkv_bias=True,
    qk_norm=True,
    norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    max_position_embeddings=64,
)


def trainer(tp: int, pp: int, dp: int) -> Layout:
    """Ranks in Megatron's order: tensor fastest, then data, then pipeline."""
    per_stage = SHAPE.num_layers // pp
    stages = [(range(p * per_stage, (p + 1) * per_stage), p == 0, p == pp - 1) for p in range(pp)]
    return [
        megatron_slices(SHAPE, ModelChunk(layers, Shard(t, tp), *ends))
        for layers, *ends in stages
        for _ in range(dp)
        for t in range(tp)
    ]


def engines(tp: int, world_size: int) -> Layout:
    return [vllm_slices(SHAPE, tp, rank % tp) for rank in range(world_size)]


@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 1, 4), (2, 1, 2), (4, 1, 1), (2, 2, 1), (1, 4, 1), (1, 2, 2)])
@pytest.mark.parametrize("engine_tp", [1, 2, 4])
def test_real_layouts(tp: int, pp: int, dp: int, engine_tp: int) -> None:
    sources, destinations = trainer(tp, pp, dp), engines(engine_tp, 4)
    check_plan(compile_plan(sources, destinations), sources, destinations)


def test_a_plan_is_deterministic() -> None:
    assert compile_plan(trainer(2, 2, 1), engines(2, 4)).moves == compile_plan(trainer(2, 2, 1), engines(2, 4)).moves


def test_data_parallel_owners_share_the_sending() -> None:
    """8 trainer ranks (2 stages x 4 replicas) send to 4 others that hold nothing: all of a stage's owners work."""
    sources = trainer(1, 2, 4) + [[] for _ in range(4)]
    destinations: Layout = [[] for _ in range(8)] + engines(4, 4)
    plan = compile_plan(sources, destinations)
    check_plan(plan, sources, destinations)
    for stage in (range(0, 4), range(4, 8)):
        sent = [plan.volume(rank).sent for rank in stage]
        assert max(sent) <= 1.1 * sum(sent) / len(sent), sent


def test_one_large_tensor_is_shared_out_by_rows() -> None:
    size = (64, 3)
    whole = Slice("w", whole_box(size), "w", whole_box(size))
    plan = compile_plan([[whole], [whole], [whole], [whole], []], [[], [], [], [], [whole]])
    assert [plan.volume(rank).sent for rank in range(5)] == [48, 48, 48, 48, 0]


def vector(name: str, size: int) -> Slice:
    return Slice(name, ((0, size),), name, ((0, size),))


def test_pieces_with_one_owner_count_before_the_others_are_shared_out() -> None:
    """Rank 0 alone holds many small tensors, ranks 0 and 1 a large one that is wanted first."""
    small, large = [vector(f"s{i}", 4) for i in range(60)], vector("large", 240)
    plan = compile_plan([[*small, large], [large], []], [[], [], [large, *small]])
    assert [plan.volume(rank).sent for rank in range(3)] == [240, 240, 0]


def test_large_pieces_are_given_out_before_small_ones() -> None:
    """One row of 32, which is never cut for balance, and 32 single elements that are wanted before it."""
    row = Slice("row", whole_box((1, 32)), "row", whole_box((1, 32)))
    tensors = [*[vector(f"s{i}", 1) for i in range(32)], row]
    plan = compile_plan([tensors, tensors, []], [[], [], tensors])
    assert [plan.volume(rank).sent for rank in range(3)] == [32, 32, 0]


def test_uncovered_elements_are_named() -> None:
    source = Slice("w", ((0, 3), (0, 4)), "w", ((0, 3), (0, 4)))
    wanted = Slice("w", ((0, 4), (0, 4)), "w", ((0, 4), (0, 4)))
    with pytest.raises(ValueError, match=r"w: no rank holds \(\(3, 4\), \(0, 4\)\), which rank 1 wants"):
        compile_plan([[source], []], [[], [wanted]])


@pytest.mark.parametrize("room", [30, 300])
def test_a_small_room_is_kept(room: int) -> None:
    sources, destinations = trainer(2, 2, 1), [slices_of(full_series(SHAPE)), *engines(1, 3)]
    check_plan(compile_plan(sources, destinations), sources, destinations, room)


def test_cuts_move_to_the_start_of_a_row_or_a_tensor() -> None:
    """Where that is near: a 16th of the room for every pair of ranks."""
    matrix = Slice("m", whole_box((64, 16)), "m", whole_box((64, 16)))
    vectors = [vector(f"v{i}", 10) for i in range(100)]
    for tensors, room, shape in (([matrix], 16 * 16, (16,)), (vectors, 16 * 10, ())):
        buckets = schedule(compile_plan([tensors, []], [[], tensors]), 0, room).buckets()
        moves = [move for bucket in buckets for move in bucket.sends()]
        assert 5 <= len(buckets) <= 8 and sum(move.num_elements for move in moves) in (1024, 1000)
        assert all(extents(move.hf_box) == (10,) or extents(move.hf_box)[1:] == shape for move in moves), moves


def test_a_capacity_below_the_number_of_peers_is_refused() -> None:
    plan = compile_plan(trainer(2, 2, 1), [slices_of(full_series(SHAPE)), *engines(1, 3)])
    with pytest.raises(ValueError, match="bridge.bucket_bytes has room for 1 elements"):
        schedule(plan, 0, 1)


SMALL = replace(SHAPE, hidden_size=8, ffn_size=8, num_heads=4, vocab_size=70)


@st.composite
def real_layouts(draw: st.DrawFn) -> tuple[list[list[Series]], list[list[Series]]]:
    """Any trainer of at most 8 ranks, to engines in the same ranks or in others."""
    experts, kv_heads = draw(st.sampled_from([4, 6])), draw(st.sampled_from([2, 4]))
    mixture = Mixture(frozenset(draw(st.sampled_from([(), (1, 3), (0, 1, 2, 3)]))), experts, 2, 4, True, 4)
    shape = replace(SMALL, tied=draw(st.booleans()), num_kv_heads=kv_heads, mixture=mixture if mixture.layers else None)
    tp, pp, dp = draw(st.sampled_from([(1, 1, 4), (2, 1, 2), (2, 2, 2), (1, 4, 2), (2, 2, 1), (1, 2, 4)]))
    ep, etp = draw(st.sampled_from([(e, t) for e in (1, 2) for t in (1, 2, 4) if (tp * dp) % (e * t) == 0]))
    chunks = draw(st.sampled_from([1, 4 // pp])) if pp > 1 else 1
    layout = ParallelLayout.create(
        tp * pp * dp, tp, pp, expert=ep if shape.mixture else 1, expert_tensor=etp, virtual_pipeline=chunks
    )
    sources = [held_by(shape, layout, rank) for rank in range(layout.world_size)]
    engine_tp, is_parallel = draw(st.sampled_from([1, 2, 4])), draw(st.booleans())
    num_workers = draw(st.sampled_from([4, 8]))
    workers = [vllm_series(shape, engine_tp, rank % engine_tp, is_parallel) for rank in range(num_workers)]
    if draw(st.booleans()):  # engines elsewhere
        return sources + [[] for _ in workers], [[] for _ in sources] + workers
    length = max(len(sources), num_workers)
    held, wanted = ([*side, *[[] for _ in range(length - len(side))]] for side in (sources, workers))
    return held, wanted


def held_by(shape: ModelShape, layout: ParallelLayout, rank: int) -> list[Series]:
    tp_rank, _, _, stage = layout.coordinates(rank)
    etp_rank, ep_rank, _, _ = layout.expert_coordinates(rank)
    held: list[Series] = []
    for chunk in range(layout.num_chunks):
        is_last = stage == layout.pipeline - 1 and chunk == layout.num_chunks - 1
        axes = Shard(ep_rank, layout.expert), Shard(etp_rank, layout.expert_tensor)
        layers = layout.layers_of_chunk(shape.num_layers, stage, chunk)
        ends = stage == chunk == 0, is_last
        series = megatron_series(shape, ModelChunk(layers, Shard(tp_rank, layout.tensor), *ends, *axes))
        held += [replace(one, local_name=f"chunk{chunk}.{one.local_name}") for one in series]
    return held


def lowest_possible_load(plan: ReshardPlan, sources: Layout) -> float:
    """Of the largest sender, were elements divisible: the most that any set of ranks alone must send, per rank."""
    held: dict[str, list[tuple[int, Slice]]] = {}
    for rank, slices in enumerate(sources):
        for piece in slices:
            held.setdefault(piece.hf_name, []).append((rank, piece))
    work = Counter[frozenset[int]]()
    for m in plan.moves:
        if not m.is_local:
            work[frozenset(rank for rank, s in held[m.hf_name] if inside(m.hf_box, s.hf_box))] += m.num_elements
    senders = sorted(frozenset().union(*work))
    subsets = (frozenset(r for i, r in enumerate(senders) if bits >> i & 1) for bits in range(1, 1 << len(senders)))
    return max((sum(n for owners, n in work.items() if owners <= u) / len(u) for u in subsets), default=0.0)


@settings(max_examples=40, deadline=None)
@given(real_layouts(), st.sampled_from([100, 5000]))
def test_any_trainer_to_any_engine(case: tuple[list[list[Series]], list[list[Series]]], room: int) -> None:
    plan = compile_plan(*case)
    sources, destinations = ([slices_of(series) for series in side] for side in case)
    check_plan(plan, sources, destinations, room)
    largest = max(plan.volume(rank).sent for rank in range(plan.num_ranks))
    lowest = lowest_possible_load(plan, sources)
    assert largest <= 1.1 * lowest + SMALL.ffn_size, (largest, lowest)  # and one row, which is never cut


def test_a_plan_of_a_large_model_on_256_ranks() -> None:
    """Qwen3-235B-A22B's sizes, TP4 PP2 EP8 on 256 ranks to engines of 8: compiles, minimal and balanced."""
    mixture = Mixture(frozenset(range(94)), 128, 8, 1536, True)
    shape = replace(
        SHAPE, num_layers=94, hidden_size=4096, num_heads=64, num_kv_heads=4, head_dim=128, vocab_size=151936,
        tied=False, qkv_bias=False, mixture=mixture,
    )  # fmt: skip
    layout = ParallelLayout.create(256, 4, 2, expert=8, expert_tensor=1)
    sources = [held_by(shape, layout, rank) for rank in range(256)]
    plan = compile_plan(sources, [vllm_series(shape, 8, rank % 8) for rank in range(256)])
    total, sent = plan.volume(), [plan.volume(rank).sent for rank in range(256)]
    assert total.received == total.minimum == total.sent
    assert max(sent) <= 1.1 * total.sent / 256
