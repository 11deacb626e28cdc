"""What a run trains, by names; and that the adapters of all ranks cover every element of A and B."""

from __future__ import annotations

from typing import Any

import pytest

from mega_rl.bridge.mapping.adapter import (
    adapted_weights,
    adapter_series,
    adapter_tensors,
    full_adapter_series,
    names_of,
)
from mega_rl.bridge.mapping.megatron import rank_series
from mega_rl.bridge.mapping.tensors import hf_tensors
from mega_rl.bridge.mapping.tuning import TuningPlan, tuning_plan
from mega_rl.bridge.series import slices_of
from mega_rl.bridge.slices import extents, intersect, num_elements, whole_box
from mega_rl.config.schema.learning import AdapterConfig, TuningConfig
from mega_rl.errors import InputError
from mega_rl.models.shape import ModelShape, parse_config
from mega_rl.parallel.layout import ParallelLayout
from tests.models.families import CONTRACT

LAYERS = 4


def shape_of(family: str) -> ModelShape:
    return parse_config(CONTRACT.config(family), family)


def plan_of(family: str, method: str = "lora", **keys: Any) -> TuningPlan:
    own = {key: keys.pop(key) for key in list(keys) if key in AdapterConfig.__dataclass_fields__}
    settings = TuningConfig(method=method, adapter=AdapterConfig(**{"rank": 4, **own}), **keys)
    return tuning_plan(settings, shape_of(family))


def test_full_trains_everything() -> None:
    plan = plan_of("qwen3", "full")
    assert plan.is_full and plan.trained == set(hf_tensors(shape_of("qwen3"))) and not plan.adapters.ranks


@pytest.mark.parametrize(("count", "layers"), [(1, {3}), (-2, {0, 1}), (4, {0, 1, 2, 3}), (-4, {0, 1, 2, 3})])
def test_freeze_trains_layers(count: int, layers: set[int]) -> None:
    plan = plan_of("qwen3", "freeze", train_layers=count)
    assert {int(name.split(".")[2]) for name in plan.trained} == layers
    assert all(len([n for n in plan.trained if f".layers.{layer}." in n]) == 11 for layer in layers)


@pytest.mark.parametrize("modules", ["mlp", "self_attn"])
def test_freeze_trains_modules(modules: str) -> None:
    plan = plan_of("qwen2", "freeze", train_layers=1, train_modules=modules, also_train=["norm", "embed_tokens"])
    beside = {"model.norm.weight", "model.embed_tokens.weight"}
    assert beside <= plan.trained and all(f".{modules}." in name for name in plan.trained - beside)


def test_adapters_stand_beside_every_linear_layer() -> None:
    plan = plan_of("deepseek_v3", expert_rank=2, rslora=True, alpha=8.0)
    ranks = plan.adapters.ranks
    assert {name.split(".")[-2] for name in ranks} == {
        "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    assert {rank for name, rank in ranks.items() if ".experts." in name} == {2}
    assert {rank for name, rank in ranks.items() if ".experts." not in name} == {4}  # the shared expert's too
    assert plan.adapters.scale(4) == 4.0 and not plan.trained


def test_targets_and_exclusions_go_by_ends_of_names_or_patterns() -> None:
    ranks = plan_of(
        "qwen3", targets=["self_attn.q_proj", "*.mlp.*"], exclude=["*.layers.1.*", "down_proj"]
    ).adapters.ranks
    assert len(ranks) == 3 * 3 and not any(".layers.1." in name or "down_proj" in name for name in ranks)


@pytest.mark.parametrize(
    ("family", "keys", "sentence"),
    [
        ("qwen3", {"targets": ["q_prj"]}, "tuning.adapter.targets has 'q_prj', which is no linear layer of this model"),
        ("qwen3", {"targets": ["lm_head"]}, "tuning.adapter.targets has 'lm_head', which is no linear layer"),
        ("qwen3", {"targets": []}, "leave no layer to adapt"),
        ("qwen3", {"exclude": ["*"]}, "leave no layer to adapt"),
        ("qwen3", {"exclude": ["experts"]}, "tuning.adapter.exclude has 'experts'"),
        (
            "qwen3",
            {"rank": 33},
            "tuning.adapter.rank is 33, more than model.layers.0.self_attn.q_proj.weight of 128 x 32",
        ),
        ("qwen3", {"expert_rank": 2}, "tuning.adapter.expert_rank is 2, but no expert has an adapter"),
        ("qwen3_moe", {"expert_rank": 25}, "tuning.adapter.expert_rank is 25, more than model.layers.0.mlp.experts.0"),
        ("qwen3_moe", {"exclude": ["*.experts.3.up_proj"]}, "not that of every expert of its layer"),
        ("qwen3_moe", {"dropout": 0.1}, "tuning.adapter.dropout is 0.1, but experts have adapters"),
        ("qwen3", {"also_train": ["o_proj"]}, "which has an adapter too"),
        ("qwen3", {"also_train": ["nrm"]}, "tuning.also_train has 'nrm', which is no tensor of this model"),
        ("deepseek_v3", {"also_train": ["e_score_correction_bias"]}, "which is no tensor of this model"),
        (
            "qwen3",
            {"targets": ["o_proj"], "also_train": ["gate_proj"]},
            "tuning.also_train trains model.layers.0.mlp.gate_proj.weight without model.layers.0.mlp.up_proj.weight",
        ),
        ("qwen3", {"method": "freeze", "train_layers": 5}, "tuning.train_layers is 5, and the model has 4 layers"),
        ("qwen3", {"method": "freeze", "train_layers": 0}, "tuning.train_layers is 0"),
    ],
)
def test_what_cannot_be_is_refused(family: str, keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as error:
        plan_of(family, **keys)
    assert sentence in str(error.value) and "\n" not in str(error.value)


LAYOUTS = [
    ParallelLayout.create(1),
    ParallelLayout.create(4, tensor=2, pipeline=2),
    ParallelLayout.create(2, pipeline=2, virtual_pipeline=2),
    ParallelLayout.create(4, tensor=2, expert=2, expert_tensor=1),
    ParallelLayout.create(4, tensor=4, expert=2, expert_tensor=2),
]
PARTS: list[dict[str, Any]] = [{}, {"targets": ["q_proj", "v_proj", "up_proj"], "exclude": ["*.layers.2.*"]}]


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "qwen2_moe", "deepseek_v3_whole_queries"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("keys", PARTS, ids=["all", "part"])
def test_the_ranks_hold_every_element(family: str, layout: ParallelLayout, keys: dict[str, Any]) -> None:
    """Of each rank disjoint places that fill its parameters; of all ranks together every element of every tensor."""
    if keys and family.startswith("deepseek"):  # which has no v_proj
        keys = {"targets": ["q_proj", "up_proj"]}
    if layout.expert > 1 and shape_of(family).mixture is None:
        layout = ParallelLayout.create(layout.world_size, layout.tensor)
    shape, plan = shape_of(family), plan_of(family, **keys).adapters
    sizes = adapter_tensors(shape, plan)
    seen: dict[str, set[tuple[tuple[int, int], ...]]] = {name: set() for name in sizes}
    for rank in range(layout.world_size):
        pieces = slices_of(adapter_series(rank_series(shape, layout, rank), plan))
        places: dict[str, list[Any]] = {}
        for piece in pieces:
            seen[piece.hf_name].add(piece.hf_box)
            assert intersect(piece.hf_box, whole_box(sizes[piece.hf_name])) == piece.hf_box
            assert all(intersect(piece.local_box, other) is None for other in places.get(piece.local_name, []))
            places.setdefault(piece.local_name, []).append(piece.local_box)
        for boxes in places.values():
            ends = [max(box[dim][1] for box in boxes) for dim in range(2)]
            assert sum(map(num_elements, boxes)) == ends[0] * ends[1], "a parameter with elements of no tensor"
    for name, boxes in seen.items():
        assert sum(map(num_elements, boxes)) == sizes[name][0] * sizes[name][1], name


def test_files_hold_the_tensors_whole() -> None:
    shape, plan = shape_of("qwen3_moe"), plan_of("qwen3_moe", expert_rank=2).adapters
    found = {piece.hf_name: extents(piece.hf_box) for piece in slices_of(full_adapter_series(shape, plan))}
    assert found == adapter_tensors(shape, plan)
    assert found[names_of("model.layers.0.mlp.experts.5.gate_proj.weight")[1]] == (24, 2)


def test_projections_of_a_fused_weight_keep_their_order() -> None:
    """Query, key and value rows alternate in the trainer; without an adapter on the keys their place stays."""
    shape = shape_of("qwen2")
    series = rank_series(shape, ParallelLayout.create(1), 0)
    plan = plan_of("qwen2", targets=["q_proj", "v_proj"]).adapters
    (weight,) = adapted_weights(series, plan)
    assert [one.hf_name.split(".")[-2] for one in weight.projections] == ["q_proj", "k_proj", "v_proj"]
    assert [one.number for one in weight.projections] == [0, None, 1]
    assert {len(one.local_rows) for one in weight.projections} == {shape.num_kv_heads}
