"""The planner's promises, over random layouts: everything once, from an owner, minimal and balanced."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_rl.bridge.buckets import schedule
from mega_rl.bridge.engine_layout import full_slices, vllm_series, vllm_slices
from mega_rl.bridge.mixture import Mixture
from mega_rl.bridge.plan import Plan, compile_plan
from mega_rl.bridge.series import Series, slices_of
from mega_rl.bridge.shape import ModelShape
from mega_rl.bridge.slices import Slice, indices, num_elements, whole_box
from mega_rl.bridge.trainer_layout import megatron_series, megatron_slices, padded_vocab_size
from mega_rl.parallel.layout import ParallelLayout

Layout = list[list[Slice]]


def cut_tensor(draw: st.DrawFn, name: str, size: tuple[int, ...], num_ranks: int) -> Layout:
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
            layout[rank].append(Slice(name, cell, f"p.{name}", local))
            offset[rank] += rows
    return layout


@st.composite
def random_layouts(draw: st.DrawFn) -> tuple[Layout, Layout, dict[str, tuple[int, ...]]]:
    num_ranks = draw(st.integers(1, 4))
    sizes = {"matrix": (draw(st.integers(1, 9)), draw(st.integers(1, 7))), "vector": (draw(st.integers(1, 9)),)}
    sources: Layout = [[] for _ in range(num_ranks)]
    destinations: Layout = [[] for _ in range(num_ranks)]
    for name, size in sizes.items():
        for _ in range(draw(st.integers(1, 2))):  # a second grid makes boxes that overlap others in part
            for rank, slices in enumerate(cut_tensor(draw, name, size, num_ranks)):
                sources[rank] += slices
        for rank, slices in enumerate(cut_tensor(draw, name, size, num_ranks)):
            destinations[rank] += slices
    return sources, destinations, sizes


def check_plan(plan: Plan, sources: Layout, destinations: Layout) -> None:
    """Every destination element once, from an element of the source with the same HF coordinate."""
    held = [{(s.hf_name, s.hf_box, s.local_name, s.local_box) for s in slices} for slices in sources]
    written = {
        (rank, s.local_name, s.local_box): np.zeros([e - b for b, e in s.local_box], int)
        for rank, slices in enumerate(destinations)
        for s in slices
    }
    needed = Counter[int]()
    for rank, slices in enumerate(destinations):
        owned: dict[str, set[tuple[int, ...]]] = {}
        for s in sources[rank]:
            owned.setdefault(s.hf_name, set()).update(coordinates(s))
        for s in slices:
            needed[rank] += len(coordinates(s) - owned.get(s.hf_name, set()))
    received = Counter[int]()
    for m in plan.moves:
        assert any(
            name == m.hf_name
            and local == m.src_name
            and inside(m.hf_box, box)
            and shifted(m.hf_box, box, place) == m.src_box
            for name, box, local, place in held[m.src_rank]
        ), f"{m} is not what rank {m.src_rank} holds"
        targets = [
            s
            for s in destinations[m.dst_rank]
            if s.local_name == m.dst_name and s.hf_name == m.hf_name and inside(m.dst_box, s.local_box)
        ]
        assert targets and shifted(m.hf_box, targets[0].hf_box, targets[0].local_box) == m.dst_box
        place = tuple((a - o, b - o) for (a, b), (o, _) in zip(m.dst_box, targets[0].local_box, strict=True))
        written[m.dst_rank, m.dst_name, targets[0].local_box][indices(place)] += 1
        received[m.dst_rank] += 0 if m.is_local else m.num_elements
    assert all((count == 1).all() for count in written.values())
    for rank in range(plan.num_ranks):
        volume = plan.volume(rank)
        assert received[rank] == needed[rank] == volume.received == volume.minimum
    total = plan.volume()
    assert total.sent == total.received == total.minimum


def coordinates(s: Slice) -> set[tuple[int, ...]]:
    return {tuple(c) for c in np.argwhere(np.ones([e - b for b, e in s.hf_box])) + [b for b, _ in s.hf_box]}


def inside(inner: tuple[tuple[int, int], ...], outer: tuple[tuple[int, int], ...]) -> bool:
    return all(o0 <= i0 and i1 <= o1 for (i0, i1), (o0, o1) in zip(inner, outer, strict=True))


def shifted(
    box: tuple[tuple[int, int], ...], hf: tuple[tuple[int, int], ...], local: tuple[tuple[int, int], ...]
) -> tuple[tuple[int, int], ...]:
    stack = local[: len(local) - len(hf)]  # the number of the expert, where the local parameter has one
    places = zip(box, hf, local[len(stack) :], strict=True)
    return (*stack, *((a - h + p, b - h + p) for (a, b), (h, _), (p, _) in places))


@settings(max_examples=60, deadline=None)
@given(random_layouts())
def test_random_layouts(case: tuple[Layout, Layout, dict[str, tuple[int, ...]]]) -> None:
    sources, destinations, _ = case
    check_plan(compile_plan(sources, destinations), sources, destinations)


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
    vocab = padded_vocab_size(SHAPE.vocab_size, tp)
    return [
        megatron_slices(SHAPE, tp, t, range(p * per_stage, (p + 1) * per_stage), p == 0, p == pp - 1, vocab)
        for p in range(pp)
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


def check_buckets(plan: Plan, capacity: int) -> None:
    """Both ends agree on every exchange, none is above the capacity, and together they are the plan."""
    per_rank = [schedule(plan, rank, capacity).buckets() for rank in range(plan.num_ranks)]
    assert len({len(buckets) for buckets in per_rank}) == 1
    moved: Counter[tuple[int, int, str]] = Counter()
    for buckets in zip(*per_rank, strict=True):
        sends, receives = [list(b.sends()) for b in buckets], [list(b.receives()) for b in buckets]
        for a, bucket in enumerate(buckets):
            assert sum(m.num_elements for m in sends[a] + receives[a]) <= capacity
            assert [m.dst_rank for m in sends[a]] == sorted(m.dst_rank for m in sends[a])
            assert [m.src_rank for m in receives[a]] == sorted(m.src_rank for m in receives[a])
            for b in range(plan.num_ranks):
                there = [m for m in receives[b] if m.src_rank == a]
                assert [m for m in sends[a] if m.dst_rank == b] == there
                assert sum(m.num_elements for m in there) == bucket.send_sizes().get(b, 0)
                assert buckets[b].receive_sizes().get(a, 0) == bucket.send_sizes().get(b, 0)
            for m in sends[a]:
                assert num_elements(m.src_box) == num_elements(m.dst_box) == m.num_elements
                moved[m.src_rank, m.dst_rank, m.hf_name] += m.num_elements
    expected: Counter[tuple[int, int, str]] = Counter()
    for m in plan.moves:
        expected[m.src_rank, m.dst_rank, m.hf_name] += 0 if m.is_local else m.num_elements
    assert moved == +expected


@pytest.mark.parametrize("capacity", [7, 100, 10**6])
def test_buckets_hold_every_piece_and_stay_within_the_capacity(capacity: int) -> None:
    check_buckets(compile_plan(trainer(2, 2, 1), [full_slices(SHAPE), *engines(1, 3)]), capacity)


def test_a_capacity_below_the_number_of_peers_is_refused() -> None:
    plan = compile_plan(trainer(2, 2, 1), [full_slices(SHAPE), *engines(1, 3)])
    with pytest.raises(ValueError, match="bridge.bucket_bytes has room for 1 elements"):
        schedule(plan, 0, 1)


@st.composite
def real_layouts(draw: st.DrawFn) -> tuple[ModelShape, list[list[Series]], list[list[Series]]]:
    """Any trainer of at most 8 ranks, to engines in the same ranks or in others."""
    experts, kv_heads = draw(st.sampled_from([4, 6])), draw(st.sampled_from([2, 4]))
    mixture = Mixture(frozenset(draw(st.sampled_from([(), (1, 3), (0, 1, 2, 3)]))), experts, 2, 8, True, 8)
    shape = replace(SHAPE, tied=draw(st.booleans()), num_kv_heads=kv_heads, mixture=mixture if mixture.layers else None)
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
        return shape, sources + [[] for _ in workers], [[] for _ in sources] + workers
    length = max(len(sources), num_workers)
    return shape, *([*side, *[[] for _ in range(length - len(side))]] for side in (sources, workers))  # type: ignore[return-value]


def held_by(shape: ModelShape, layout: ParallelLayout, rank: int) -> list[Series]:
    tp_rank, _, _, stage = layout.coordinates(rank)
    etp_rank, ep_rank, _, _ = layout.expert_coordinates(rank)
    held: list[Series] = []
    for chunk in range(layout.num_chunks):
        is_last = stage == layout.pipeline - 1 and chunk == layout.num_chunks - 1
        axes = layout.expert, ep_rank, layout.expert_tensor, etp_rank
        layers = layout.layers_of_chunk(shape.num_layers, stage, chunk)
        padded = padded_vocab_size(shape.vocab_size, layout.tensor)
        ends = stage == chunk == 0, is_last
        series = megatron_series(shape, layout.tensor, tp_rank, layers, *ends, padded, *axes)
        held += [replace(one, local_name=f"chunk{chunk}.{one.local_name}") for one in series]
    return held


def lowest_possible_load(plan: Plan, sources: Layout) -> float:
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


@settings(max_examples=8, deadline=None)
@given(real_layouts(), st.sampled_from([64, 1000]))
def test_any_trainer_to_any_engine(case: tuple[ModelShape, list[list[Series]], list[list[Series]]], room: int) -> None:
    _, held, wanted = case
    plan = compile_plan(held, wanted)
    sources, destinations = [slices_of(s) for s in held], [slices_of(s) for s in wanted]
    check_plan(plan, sources, destinations)
    check_buckets(plan, room)
    largest = max(plan.volume(rank).sent for rank in range(plan.num_ranks))
    assert largest <= 1.1 * lowest_possible_load(plan, sources) + SHAPE.ffn_size  # and one row, which is never cut


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
