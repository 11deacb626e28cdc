"""The trainer's buffers in integers; that Megatron's have the same bytes is shown by
tests/distributed/planning/test_memory_plan.py.
"""

from __future__ import annotations

import math

import pytest

from mega_rl.bridge.mapping.tensors import hf_tensors
from mega_rl.bridge.mapping.tuning import tuning_plan
from mega_rl.config.schema.sections import RunConfig
from mega_rl.models.shape import ModelShape, parse_config
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.planning.state import Buffer, Parameter, chunk_parameters, stage_parameters, trainer_state
from tests.unit.config.test_shipped import model_config


def buffer(*sizes: int, shares: int = 2, limit: int | None = None, shared: int | None = None) -> Buffer:
    parameters = [Parameter(f"p{i}", "mlp", n, is_shared_embedding=i == shared) for i, n in enumerate(sizes)]
    return Buffer(tuple(parameters), shares, limit)


@pytest.mark.parametrize(
    ("found", "num_elements"),
    [
        (buffer(10), 128),
        (buffer(10, 130), 256),  # 130 elements, then 10 from 192 on
        (buffer(10, 128, shares=3), 384),  # a bucket ends at a multiple of 3 * 128
        (buffer(1, 1, 1), 256),  # at 0, 64 and 128
        (buffer(64, 64, 65), 256),
        (buffer(64, 64, 65, limit=100), 384),  # the last two fill a bucket of 192, which ends at 256
        (buffer(10, 20, shared=1), 256),  # a bucket of its own
    ],
)
def test_padding_of_a_buffer(found: Buffer, num_elements: int) -> None:
    assert found.num_elements == num_elements


@pytest.mark.parametrize("limit", [None, 150])
@pytest.mark.parametrize("shares", [1, 2, 3, 8])
def test_every_element_has_one_owner(shares: int, limit: int | None) -> None:
    found = buffer(7, 300, 64, 1, 129, shares=shares, limit=limit, shared=3)
    owned = [sum(found.owned(share)) for share in range(shares)]
    assert sum(owned) == 7 + 300 + 64 + 1 + 129 and max(owned) <= found.num_elements // shares


def shape_of(model: str) -> ModelShape:
    return parse_config(model_config(model), model)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("Qwen2.5-7B-Instruct", ParallelLayout.create(8, tensor=4, pipeline=2)),
        ("Qwen2.5-0.5B-Instruct", ParallelLayout.create(4, tensor=2, pipeline=2, virtual_pipeline=2)),
        ("Qwen3-30B-A3B", ParallelLayout.create(16, tensor=4, pipeline=2, expert=8, expert_tensor=1)),
    ],
)
def test_the_ranks_hold_the_whole_model(model: str, layout: ParallelLayout) -> None:
    """Shards times the ranks that share them are the checkpoint's elements, but for padding and what all ranks hold."""
    shape = shape_of(model)
    total = 0
    for stage in range(layout.pipeline):
        for chunk in range(layout.num_chunks):
            for p in chunk_parameters(shape, layout, stage, chunk):
                copies = layout.expert * layout.expert_tensor if p.kind == "experts" else layout.tensor
                is_whole = p.kind == "norms and router"
                is_copy = shape.tied and p.kind == "output layer"
                total += 0 if is_copy else p.num_elements * (1 if is_whole else copies)
    padding = -shape.vocab_size % layout.tensor * shape.hidden_size * (1 if shape.tied else 2)
    assert total - padding == sum(map(math.prod, hf_tensors(shape).values()))


def test_state_of_a_rank() -> None:
    shape, layout = shape_of("Qwen2.5-7B-Instruct"), ParallelLayout.create(8, tensor=4)
    config = RunConfig()
    held = stage_parameters(config, shape, layout, 0, tuning_plan(config.tuning, shape))
    states = [trainer_state(config, layout, rank, held, has_reference=True) for rank in range(8)]
    (found,) = held.buffers
    elements = sum(p.num_elements for p in found.parameters)
    for state in states:
        assert state.gradients == 2 * state.weights and state.moments == 2 * state.masters
        assert state.reference == 2 * elements == sum(state.by_kind.values()) <= state.weights < 2.001 * elements
    # ranks 0 and 4 are the two data-parallel replicas of the first shard
    assert states[0].masters + states[4].masters == 4 * elements
    config.model.dtype = "float32"
    held = stage_parameters(config, shape, layout, 0, tuning_plan(config.tuning, shape))
    alone = trainer_state(config, layout, 0, held, has_reference=False)
    assert alone.masters == 0 and alone.reference == 0  # float32 weights are their own masters
    assert alone.weights == alone.gradients == 2 * states[0].weights


def test_state_of_a_rank_with_adapters() -> None:
    """Rank 16 on every linear layer of Qwen2.5-7B: 40.4 million values, 16 bytes each beside their weight."""
    shape, layout = shape_of("Qwen2.5-7B-Instruct"), ParallelLayout.create(1)
    config = RunConfig()
    config.tuning.method, config.tuning.adapter.rank = "lora", 16
    held = stage_parameters(config, shape, layout, 0, tuning_plan(config.tuning, shape))
    (buffer,) = held.buffers
    state = trainer_state(config, layout, 0, held, has_reference=False)
    trained = sum(p.num_elements for p in buffer.parameters)
    assert trained == 40_370_176 and {p.kind for p in buffer.parameters} == {"adapters"}
    assert state.gradients == 4 * buffer.num_elements and state.optimizer == 12 * trained
    assert sum(p.num_elements for p in held.frozen) == sum(map(math.prod, hf_tensors(shape).values()))
    assert state.by_kind["adapters"] == 2 * trained and state.reference == 0


def test_state_of_a_rank_with_frozen_layers() -> None:
    shape, layout = shape_of("Qwen2.5-7B-Instruct"), ParallelLayout.create(2, pipeline=2)
    config = RunConfig()
    config.tuning.method, config.tuning.train_layers = "freeze", 2
    plan = tuning_plan(config.tuning, shape)
    first, last = (stage_parameters(config, shape, layout, stage, plan) for stage in range(2))
    assert first.buffers == () and trainer_state(config, layout, 0, first, has_reference=False).gradients == 0
    (buffer,) = last.buffers
    sizes = hf_tensors(shape)
    assert sum(p.num_elements for p in buffer.parameters) == sum(math.prod(sizes[name]) for name in plan.trained)
