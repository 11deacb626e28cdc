"""Both sides' slices against plain torch, and bit-exact round trips HF -> local -> HF."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from mega_rl.bridge.mapping.megatron import ModelChunk, Shard, megatron_slices, own_name, padded_vocab_size
from mega_rl.bridge.mapping.tensors import full_series, hf_tensors
from mega_rl.bridge.mapping.vllm import engine_experts, vllm_slices
from mega_rl.bridge.series import slices_of
from mega_rl.bridge.slices import Slice, flat_range, indices, num_elements, subtract, whole_box
from mega_rl.models.fit import engine_problems, engine_vocab_size, tensor_problems
from mega_rl.models.mixture import Mixture
from mega_rl.models.shape import ModelShape

Tensors = dict[str, torch.Tensor]
FAMILIES = ["qwen2", "qwen3", "llama"]


def model_shape(family: str = "qwen2", tied: bool = False, kv_heads: int = 4, vocab: int = 77) -> ModelShape:
    return ModelShape(
        family=family,
        num_layers=3,
        hidden_size=16,
        ffn_size=24,
        num_heads=8,
        num_kv_heads=kv_heads,
        head_dim=6 if family == "qwen3" else 2,
        vocab_size=vocab,
        tied=tied,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling=None,
        max_position_embeddings=64,
    )


def random_model(shape: ModelShape) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(size, generator=generator) for name, size in hf_tensors(shape).items()}


def to_local(slices: list[Slice], model: Tensors) -> Tensors:
    """Local parameters as small as the slices allow; asserts that each element is written at most once."""
    sizes: dict[str, list[int]] = {}
    for s in slices:
        ends = [end for _, end in s.local_box]
        sizes[s.local_name] = [max(a, b) for a, b in zip(sizes.get(s.local_name, ends), ends, strict=True)]
    local = {name: torch.full(size, torch.nan) for name, size in sizes.items()}
    for s in slices:
        place = local[s.local_name][indices(s.local_box)]
        assert place.isnan().all(), f"{s} overlaps another slice"
        place.copy_(model[s.hf_name][indices(s.hf_box)])
    for name, tensor in local.items():
        assert not tensor.isnan().any(), f"{name} has a hole"
    return local


def to_hf(shape: ModelShape, per_rank: list[tuple[list[Slice], Tensors]]) -> Tensors:
    full = {name: torch.full(size, torch.nan) for name, size in hf_tensors(shape).items()}
    for slices, local in per_rank:
        for s in slices:
            full[s.hf_name][indices(s.hf_box)] = local[s.local_name][indices(s.local_box)]
    return full


def assert_equal(a: Tensors, b: Tensors) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def stages(shape: ModelShape, num_stages: int) -> list[tuple[range, bool, bool]]:
    cuts = [i * shape.num_layers // num_stages for i in range(num_stages + 1)]
    return [(range(cuts[i], cuts[i + 1]), i == 0, i == num_stages - 1) for i in range(num_stages)]


def expected_megatron(shape: ModelShape, model: Tensors, tp: int, rank: int, layer: int) -> Tensors:
    """One layer the way Megatron shards it, in plain torch."""
    prefix, groups = f"model.layers.{layer}.", shape.num_kv_heads

    def qkv(kind: str) -> torch.Tensor:
        parts = [model[f"{prefix}self_attn.{part}_proj.{kind}"] for part in "qkv"]
        grouped = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
        fused = torch.cat(grouped, 1).chunk(tp)[rank]
        return fused.reshape(-1, *parts[0].shape[1:])

    expected = {
        "input_layernorm.weight": model[prefix + "input_layernorm.weight"],
        "pre_mlp_layernorm.weight": model[prefix + "post_attention_layernorm.weight"],
        "self_attention.linear_qkv.weight": qkv("weight"),
        "self_attention.linear_proj.weight": model[prefix + "self_attn.o_proj.weight"].chunk(tp, 1)[rank],
        "mlp.linear_fc1.weight": torch.cat(
            [model[f"{prefix}mlp.{part}_proj.weight"].chunk(tp)[rank] for part in ("gate", "up")]
        ),
        "mlp.linear_fc2.weight": model[prefix + "mlp.down_proj.weight"].chunk(tp, 1)[rank],
    }
    if shape.qkv_bias:
        expected["self_attention.linear_qkv.bias"] = qkv("bias")
    if shape.qk_norm:
        expected["self_attention.q_layernorm.weight"] = model[prefix + "self_attn.q_norm.weight"]
        expected["self_attention.k_layernorm.weight"] = model[prefix + "self_attn.k_norm.weight"]
    return expected


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_megatron_layers_equal_plain_torch(family: str, tp: int) -> None:
    shape = model_shape(family)
    model = random_model(shape)
    for rank in range(tp):
        local = to_local(megatron_slices(shape, ModelChunk(range(1, 3), Shard(rank, tp), False, False)), model)
        expected = {
            f"decoder.layers.{i}.{name}": tensor
            for i in range(2)
            for name, tensor in expected_megatron(shape, model, tp, rank, i + 1).items()
        }
        assert_equal(dict(sorted(local.items())), dict(sorted(expected.items())))


@pytest.mark.parametrize("family", FAMILIES)
def test_names_of_fused_norms(family: str) -> None:
    """The two norms in linear layers of TransformerEngine have the names of norms apart, and nothing else changes."""
    slices = megatron_slices(model_shape(family), ModelChunk(range(2), padded_vocab_size=80))
    assert all(own_name(piece.local_name) == piece.local_name for piece in slices)
    at = "chunk1.decoder.layers.0."
    assert own_name(f"{at}self_attention.linear_qkv.layer_norm_weight") == f"{at}input_layernorm.weight"
    assert own_name(f"{at}mlp.linear_fc1.layer_norm_weight") == f"{at}pre_mlp_layernorm.weight"
    for other in (
        "mlp.shared_experts.linear_fc1.layer_norm_weight",
        "self_attention.linear_q_up_proj.layer_norm_weight",
    ):
        assert own_name(at + other) == at + other


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_megatron_round_trip_is_bit_exact(family: str, tied: bool, tp: int, pp: int) -> None:
    shape = model_shape(family, tied)
    model = random_model(shape)
    per_rank = []
    for layers, first, last in stages(shape, pp):
        for rank in range(tp):
            slices = megatron_slices(shape, ModelChunk(layers, Shard(rank, tp), first, last))
            local = to_local(slices, model)
            assert ("output_layer.weight" in local) == (last and (not tied or pp > 1))
            assert ("embedding.word_embeddings.weight" in local) == first
            per_rank.append((slices, local))
    assert_equal(to_hf(shape, per_rank), model)


def test_megatron_vocabulary_rows_leave_the_padding_out() -> None:
    shape = model_shape(vocab=5)
    assert padded_vocab_size(5, 4) == 8 and padded_vocab_size(8, 4) == 8
    rows = []
    for rank in range(4):
        slices = megatron_slices(shape, ModelChunk(range(0), Shard(rank, 4), has_output=False))
        rows.append([(s.hf_box[0], s.local_box[0]) for s in slices])
    assert rows == [[((0, 2), (0, 2))], [((2, 4), (0, 2))], [((4, 5), (0, 1))], []]


def test_a_tied_last_stage_keeps_its_copy_of_the_embedding() -> None:
    shape = model_shape(tied=True)
    slices = megatron_slices(shape, ModelChunk(range(2, 3), has_embedding=False))
    assert {s.hf_name for s in slices if s.local_name == "output_layer.weight"} == {"model.embed_tokens.weight"}


def expected_vllm(shape: ModelShape, model: Tensors, tp: int, rank: int) -> Tensors:
    """A worker's parameters the way vLLM's weight loaders fill them, in plain torch; vocabulary without padding."""
    replicas = max(1, tp // shape.num_kv_heads)
    expected = {}
    for layer in range(shape.num_layers):
        p = f"model.layers.{layer}."
        for kind in ("weight", "bias") if shape.qkv_bias else ("weight",):
            q, k, v = (model[f"{p}self_attn.{part}_proj.{kind}"] for part in "qkv")
            kv = [part.chunk(tp // replicas)[rank // replicas] for part in (k, v)]
            expected[f"{p}self_attn.qkv_proj.{kind}"] = torch.cat([q.chunk(tp)[rank], *kv])
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            expected[p + name] = model[p + name].chunk(tp, 1)[rank]
        gate_up = [model[f"{p}mlp.{part}_proj.weight"].chunk(tp)[rank] for part in ("gate", "up")]
        expected[f"{p}mlp.gate_up_proj.weight"] = torch.cat(gate_up)
    rows = engine_vocab_size(shape) // tp
    for name in model:
        if "norm" in name:
            expected[name] = model[name]
        elif name in ("model.embed_tokens.weight", "lm_head.weight") and rank * rows < shape.vocab_size:
            expected[name] = model[name][rank * rows : (rank + 1) * rows]
    return expected


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_slices_equal_plain_torch_and_round_trip(family: str, tied: bool, tp: int, kv_heads: int) -> None:
    shape = model_shape(family, tied, kv_heads)
    model = random_model(shape)
    per_rank = []
    for rank in range(tp):
        slices = vllm_slices(shape, tp, rank)
        local = to_local(slices, model)
        expected = expected_vllm(shape, model, tp, rank)
        assert_equal(dict(sorted(local.items())), dict(sorted(expected.items())))
        per_rank.append((slices, local))
    assert_equal(to_hf(shape, per_rank), model)


def test_full_slices_are_the_model() -> None:
    shape = model_shape()
    model = random_model(shape)
    assert_equal(to_local(slices_of(full_series(shape)), model), model)


@pytest.mark.parametrize(
    ("shape", "tp", "words"),
    [
        (model_shape(), 3, "parallel.tensor is 3.*num_attention_heads"),
        (model_shape(kv_heads=2), 4, "parallel.tensor is 4.*num_key_value_heads"),
    ],
)
def test_megatron_sizes_that_do_not_divide(shape: ModelShape, tp: int, words: str) -> None:
    assert re.search(
        words, "\n".join(tensor_problems(shape, tp))
    )  # what a user is told, before the layout is asked for
    with pytest.raises(AssertionError, match=words):
        megatron_slices(shape, ModelChunk(range(1), Shard(0, tp)))


@pytest.mark.parametrize(
    ("shape", "tp", "words"),
    [
        (model_shape(), 3, "rollout.tensor_parallel_size is 3.*num_attention_heads"),
        (model_shape(kv_heads=6), 4, "rollout.tensor_parallel_size is 4.*num_key_value_heads"),
    ],
)
def test_vllm_sizes_that_do_not_divide(shape: ModelShape, tp: int, words: str) -> None:
    assert re.search(words, "\n".join(engine_problems(shape, tp)))
    with pytest.raises(AssertionError, match=words):
        vllm_slices(shape, tp, 0)


def test_boxes_are_cut_by_element_number_and_subtracted_without_overlap() -> None:
    box = ((1, 6), (0, 7), (2, 5))
    flat = torch.arange(num_elements(box)).view(5, 7, 3)
    full = torch.zeros(6, 7, 5, dtype=torch.long)
    full[indices(box)] = flat
    for start, end in [(0, 105), (0, 1), (104, 105), (4, 5), (20, 43), (21, 63), (22, 41), (1, 104), (3, 9)]:
        parts = flat_range(box, start, end)
        assert torch.cat([full[indices(part)].flatten() for part in parts]).tolist() == list(range(start, end))
    seen = torch.zeros(6, 7, 5)
    hole = ((0, 3), (2, 4), (3, 9))
    for part in subtract(box, hole):
        seen[indices(part)] += 1
    expected = torch.zeros(6, 7, 5)
    expected[indices(box)] = 1
    expected[indices(hole)] = 0
    assert torch.equal(seen, expected)
    assert subtract(box, whole_box((9, 9, 9))) == []


def test_a_parallel_engine_counts_its_own_experts_from_0() -> None:
    mixture = Mixture(frozenset(range(3)), 10, 2, 8, True)
    shape = replace(model_shape(), mixture=mixture)
    for rank, first in enumerate((0, 3, 6, 8)):
        slices = [s for s in vllm_slices(shape, 4, rank, expert_parallel=True) if s.local_name.endswith("w2_weight")]
        places = {s.local_box[0][0]: s.hf_name.split(".")[5] for s in slices}
        assert places == {i: str(first + i) for i in range(len(engine_experts(10, 4, rank)))}
        assert {s.hf_box for s in slices} == {((0, shape.hidden_size), (0, 8))}


@pytest.mark.parametrize(("num_experts", "workers"), [(8, 1), (8, 4), (10, 4), (3, 4)])
def test_experts_of_a_parallel_engine_are_those_of_vllm(num_experts: int, workers: int) -> None:
    manager = pytest.importorskip("vllm.model_executor.layers.fused_moe.expert_map_manager")
    for rank in range(workers):
        count, places, _ = manager.determine_expert_map(workers, rank, num_experts)
        experts = engine_experts(num_experts, workers, rank)
        assert len(experts) == count
        if places is not None:
            assert [places[e].item() for e in experts] == list(range(count))
