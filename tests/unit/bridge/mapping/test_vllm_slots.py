"""vLLM's slots for adapters as live parameters: which boxes they are, and what a sync of them moves."""

from __future__ import annotations

from math import prod

import pytest
import torch

from mega_rl.bridge.mapping.adapter import adapter_series, adapter_tensors
from mega_rl.bridge.mapping.live_check import difference
from mega_rl.bridge.mapping.megatron import rank_series
from mega_rl.bridge.mapping.tuning import AdapterPlan, tuning_plan
from mega_rl.bridge.mapping.vllm import vllm_series
from mega_rl.bridge.mapping.vllm_slots import slot_series, slots_of
from mega_rl.bridge.reshard.plan import compile_plan
from mega_rl.bridge.series import Series, slices_of
from mega_rl.config.schema.learning import AdapterConfig, TuningConfig
from mega_rl.config.schema.sections import ParallelConfig
from mega_rl.errors import InputError
from mega_rl.models.shape import ModelShape
from mega_rl.parallel.layout import ParallelLayout
from tests.distributed.bridge.test_bridge_execute import SHAPE


def plan(rank: int = 4, targets: tuple[str, ...] = ("all-linear",), shape: ModelShape = SHAPE) -> AdapterPlan:
    return tuning_plan(TuningConfig("lora", adapter=AdapterConfig(rank=rank, targets=list(targets))), shape).adapters


def trainer(size: int, adapters: AdapterPlan) -> list[list[Series]]:
    layout = ParallelLayout.of(ParallelConfig(tensor=size, sequence=size > 1), size)
    return [adapter_series(rank_series(SHAPE, layout, rank), adapters) for rank in range(size)]


@pytest.mark.parametrize(("trainer_size", "engine_size"), [(1, 1), (2, 2), (2, 1), (1, 2)])
def test_a_sync_is_the_adapter_once_per_engine(trainer_size: int, engine_size: int) -> None:
    """Where both are cut alike nothing is sent; what layers cut by rows keep whole is on every rank of an engine."""
    adapters = plan()
    world_size = max(trainer_size, engine_size)
    sources = [*trainer(trainer_size, adapters), *([] for _ in range(world_size - trainer_size))]
    wanted = [slot_series(SHAPE, engine_size, rank % engine_size, adapters) for rank in range(world_size)]
    volume = compile_plan(sources, wanted).volume()
    num_engines = world_size // engine_size
    cut_by_columns = ("o_proj", "down_proj")
    expected = 0
    for name, size in adapter_tensors(SHAPE, adapters).items():
        is_whole = ("lora_A" in name) != any(part in name for part in cut_by_columns)
        expected += prod(size) * num_engines * (engine_size if is_whole else 1)
    assert volume.local + volume.received == expected
    assert volume.sent == volume.received == volume.minimum
    assert (volume.sent == 0) == (trainer_size == engine_size)


def test_slots_of_a_part_of_a_fused_layer_keep_their_places() -> None:
    """v_proj is the third projection of its layer, whether or not the others have an adapter."""
    names = slots_of(SHAPE, plan(targets=("v_proj", "down_proj"))).names
    layer = "model.layers.0"
    assert {name for name in names if name.startswith(layer)} == {
        f"{layer}.{slot}"
        for part in "AB"
        for slot in (f"self_attn.qkv_proj.lora_{part}.2", f"mlp.down_proj.lora_{part}.0")
    }


def test_slots_are_matched_like_weights() -> None:
    wanted = slices_of([*vllm_series(SHAPE, 2, 1), *slot_series(SHAPE, 2, 1, plan())])
    sizes: dict[str, list[int]] = {}
    for piece in wanted:
        ends = [end for _, end in piece.local_box]
        sizes[piece.local_name] = [max(pair) for pair in zip(sizes.get(piece.local_name, ends), ends, strict=True)]
    live = {name: torch.empty(size, dtype=torch.bfloat16, device="meta") for name, size in sizes.items()}
    assert difference(live, wanted, torch.bfloat16) is None
    del live["model.layers.1.mlp.gate_up_proj.lora_B.1"]
    assert "gate_up_proj.lora_B.1" in str(difference(live, wanted, torch.bfloat16))


@pytest.mark.parametrize(("rank", "size"), [(1, 1), (4, 8), (8, 8), (12, 16)])
def test_the_smallest_size_of_vllms_is_taken(rank: int, size: int) -> None:
    assert slots_of(SHAPE, plan(rank, ("down_proj",))).max_rank == size


def test_adapters_without_slots_are_refused() -> None:
    up = "model.layers.0.mlp.up_proj.weight"
    for ranks, word in (
        ({up: 513}, "more than the 512"),
        ({up: 4, "model.layers.1.mlp.experts.0.up_proj.weight": 4}, "exclude"),
    ):
        with pytest.raises(InputError, match=word):
            slots_of(SHAPE, AdapterPlan(ranks, 8.0))
