"""Rank arithmetic: against tables worked out by hand, and as a bijection for every small layout."""

from __future__ import annotations

import itertools

import pytest

from mega_rl.parallel.layout import Coordinates, EngineLayout, ExpertCoordinates, ParallelLayout

SIZES = list(itertools.product((1, 2, 4), (1, 2), (1, 2, 3), (1, 2, 3)))  # tensor, context, data, pipeline


def layout_of(tensor: int, context: int, data: int, pipeline: int) -> ParallelLayout:
    return ParallelLayout.create(tensor * context * data * pipeline, tensor, pipeline, context=context)


def groups(layout: ParallelLayout, axis: str) -> list[list[int]]:
    """The ranks that differ along one axis only."""
    found: dict[Coordinates, list[int]] = {}
    for rank in range(layout.world_size):
        found.setdefault(layout.coordinates(rank)._replace(**{axis: 0}), []).append(rank)
    return list(found.values())


def test_order_is_tensor_then_data_then_pipeline() -> None:
    layout = ParallelLayout.create(8, tensor=2, pipeline=2)
    assert layout == ParallelLayout(world_size=8, tensor=2, pipeline=2, data=2, expert_tensor=2)
    assert groups(layout, "tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups(layout, "data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups(layout, "pipeline") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.coordinates(5) == Coordinates(tensor=1, context=0, data=0, pipeline=1)


def test_context_neighbours_stand_between_tensor_and_data() -> None:
    layout = ParallelLayout.create(16, tensor=2, pipeline=2, context=2)
    assert groups(layout, "context")[:2] == [[0, 2], [1, 3]]
    assert groups(layout, "data")[:2] == [[0, 4], [1, 5]]
    assert layout.coordinates(11) == Coordinates(tensor=1, context=1, data=0, pipeline=1)
    assert [rank for rank in range(16) if layout.is_counted(rank)] == [0, 4, 8, 12]


def test_experts_are_numbered_over_tensor_context_and_data() -> None:
    layout = ParallelLayout.create(16, tensor=2, pipeline=2, context=2, expert=2, expert_tensor=1)
    assert layout.expert_data == 4
    assert layout.expert_coordinates(5) == ExpertCoordinates(tensor=0, expert=1, data=2, pipeline=0)
    assert layout.expert_coordinates(10) == ExpertCoordinates(tensor=0, expert=0, data=1, pipeline=1)
    as_tensor = ParallelLayout.create(8, tensor=2, expert=2)
    assert as_tensor.expert_coordinates(7) == ExpertCoordinates(tensor=1, expert=1, data=1, pipeline=0)


@pytest.mark.parametrize("sizes", SIZES)
def test_rank_and_coordinates_are_inverse_and_groups_cover_the_world(sizes: tuple[int, int, int, int]) -> None:
    layout = layout_of(*sizes)
    world = layout.world_size
    assert [layout.rank(*layout.coordinates(rank)) for rank in range(world)] == list(range(world))
    assert len({layout.expert_coordinates(rank) for rank in range(world)}) == world
    for axis in Coordinates._fields:
        found = groups(layout, axis)
        assert sorted(rank for group in found for rank in group) == list(range(world))
        assert {len(group) for group in found} == {getattr(layout, axis)}
        assert all(
            [getattr(layout.coordinates(rank), axis) for rank in group] == list(range(len(group))) for group in found
        )


@pytest.mark.parametrize(
    ("world", "sizes"),
    [
        (6, {"tensor": 4}),
        (4, {"tensor": 2, "pipeline": 4}),
        (2, {"tensor": 0}),
        (4, {"context": 3}),
        (4, {"expert": 3}),
        (4, {"tensor": 2, "expert": 4}),
        (4, {"expert": 2, "expert_tensor": 4}),
        (4, {"virtual_pipeline": 2}),
    ],
)
def test_no_layout_is_made_of_a_world_that_does_not_fit(world: int, sizes: dict[str, int]) -> None:
    """A user is told by ``models.fit`` before it comes to this; see tests/unit/models/test_fit.py."""
    with pytest.raises(AssertionError):
        ParallelLayout.create(world, **sizes)


def test_layers_of_stages_follow_each_other() -> None:
    layout = ParallelLayout.create(6, tensor=1, pipeline=3)
    assert [layout.layers_of_chunk(6, stage) for stage in range(3)] == [range(0, 2), range(2, 4), range(4, 6)]
    with pytest.raises(AssertionError):
        layout.layers_of_chunk(7, 0)


def test_an_interleaved_pipeline_goes_through_the_stages_once_per_chunk() -> None:
    layout = ParallelLayout.create(2, pipeline=2, virtual_pipeline=2)
    chunks = {(stage, chunk): layout.layers_of_chunk(8, stage, chunk) for stage in range(2) for chunk in range(2)}
    assert chunks == {(0, 0): range(0, 2), (1, 0): range(2, 4), (0, 1): range(4, 6), (1, 1): range(6, 8)}
    with pytest.raises(AssertionError):
        layout.layers_of_chunk(6, 0)


def test_consecutive_ranks_form_an_engine() -> None:
    layout = EngineLayout(world_size=6, tensor_parallel_size=2)
    assert layout.num_replicas == 3
    assert [layout.replica(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [layout.tensor_rank(rank) for rank in range(6)] == [0, 1, 0, 1, 0, 1]
    assert [list(layout.replica_ranks(replica)) for replica in range(3)] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("size", [0, 4, 12])
def test_no_engine_layout_is_made_of_a_size_that_does_not_fit(size: int) -> None:
    with pytest.raises(AssertionError):
        EngineLayout(world_size=6, tensor_parallel_size=size)
