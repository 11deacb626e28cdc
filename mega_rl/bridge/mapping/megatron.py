"""What a Megatron rank holds of the HF tensors, in the parameter names of Megatron's local layer spec."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from mega_rl.bridge.mapping.tensors import LM_HEAD, SCORE, embedding_name, final_norm_name, layer_name
from mega_rl.bridge.mapping.tower import trainer_tower
from mega_rl.bridge.series import EXPERT, LAYER, Numbers, Series, numbered, slices_of
from mega_rl.bridge.slices import Slice, stack_rows, take_columns, whole
from mega_rl.models.fit import expert_problems, tensor_problems
from mega_rl.models.shape import ModelShape
from mega_rl.parallel.layout import ParallelLayout

# A norm of Megatron's own layer -> its name where TransformerEngine fuses it with the linear layer behind it. Slices,
# plans and policies go by the first; the norm before experts is never fused, and those of heads have one name.
FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def own_name(name: str) -> str:
    """The name of a parameter in Megatron's own layers, of a model whose layers may be TransformerEngine's."""
    for own, fused in FUSED_NORMS.items():
        if name.endswith(f".{fused}"):
            return name.removesuffix(fused) + own
    return name


def padded_vocab_size(vocab_size: int, tensor_parallel: int) -> int:
    """The next multiple of the tensor-parallel size: rows of the whole padded embedding."""
    return -(-vocab_size // tensor_parallel) * tensor_parallel


class Shard(NamedTuple):
    """One of the equal parts that tensors, or the experts of a layer, are cut into."""

    rank: int = 0
    num_shards: int = 1

    def bounds(self, size: int) -> tuple[int, int]:
        """Start and end."""
        return self.rank * size // self.num_shards, (self.rank + 1) * size // self.num_shards


WHOLE = Shard()


@dataclass(frozen=True)
class ModelChunk:
    """Which layers of a model, and which shards of their tensors, one rank's model chunk holds; by default whole ones.

    Experts are laid out by their own two axes, everything else, shared experts included, by ``tensor``.
    """

    layers: range  # global indices
    tensor: Shard = WHOLE
    has_embedding: bool = True
    has_output: bool = True
    experts: Shard = WHOLE  # which experts of a layer
    expert_tensor: Shard = WHOLE  # of each of them
    padded_vocab_size: int | None = None  # rows of the whole padded embedding; None: the function of this name


def megatron_slices(shape: ModelShape, chunk: ModelChunk) -> list[Slice]:
    """``megatron_series`` tensor by tensor: every HF element of a chunk exactly once."""
    return slices_of(megatron_series(shape, chunk))


def megatron_series(shape: ModelShape, chunk: ModelChunk) -> list[Series]:
    """Every HF element that one rank's model chunk holds, each exactly once; vocabulary padding is in no series.

    Local names count layers from 0. A chunk with the output but without the embedding keeps its own copy of tied
    embeddings as ``output_layer.weight``.
    """
    shard, num_shards = chunk.tensor, chunk.tensor.num_shards
    misfits = tensor_problems(shape, num_shards)
    assert not misfits, misfits
    expert_tensor = chunk.expert_tensor.num_shards if shape.mixture else None
    misfits = expert_problems(shape, chunk.experts.num_shards, expert_tensor, 1)
    assert not misfits, misfits
    padded = chunk.padded_vocab_size or padded_vocab_size(shape.vocab_size, num_shards)
    assert padded % num_shards == 0 and padded >= shape.vocab_size
    series: list[Series] = []
    vocab = (shape, shard, padded)
    if chunk.has_embedding:
        series += trainer_tower(shape)
        series += numbered(_vocab_rows("embedding.word_embeddings.weight", embedding_name(shape), *vocab))
    for alike in shape.like_layers(chunk.layers):
        numbers = Numbers(alike, chunk.layers.start)
        local = f"decoder.layers.{LAYER}"
        series += numbered(_attention(shape, shard, local), numbers)
        if shape.has_experts(alike[0]):
            series += numbered(_shared_part(shape, shard, f"{local}.mlp"), numbers)
            series += _experts(shape, chunk, f"{local}.mlp.experts.local_experts.{EXPERT}", numbers)
        else:
            names = f"{local}.mlp", layer_name(shape, LAYER, "mlp")
            series += numbered(gated_mlp(*names, shape.hidden_size, shape.ffn_size, shard), numbers)
    if chunk.has_output:
        last = [whole("decoder.final_layernorm.weight", final_norm_name(shape), (shape.hidden_size,))]
        if shape.head == "value":
            last.append(whole("output_layer.weight", SCORE, (1, shape.hidden_size)))
        elif not shape.tied:
            last += _vocab_rows("output_layer.weight", LM_HEAD, *vocab)
        elif not chunk.has_embedding:
            last += _vocab_rows("output_layer.weight", embedding_name(shape), *vocab)
        series += numbered(last)
    return series


def rank_series(shape: ModelShape, layout: ParallelLayout, rank: int) -> list[Series]:
    """What a rank of the layout holds, all of its model chunks."""
    return [
        replace(one, local_name=chunk_prefix(layout, chunk) + one.local_name)
        for chunk in range(layout.num_chunks)
        for one in chunk_series(shape, layout, rank, chunk)
    ]


def chunk_prefix(layout: ParallelLayout, chunk: int) -> str:
    """What the local names of a model chunk begin with if a rank has several."""
    return f"chunk{chunk}." if layout.num_chunks > 1 else ""


def chunk_series(
    shape: ModelShape, layout: ParallelLayout, rank: int, chunk: int, padded: int | None = None
) -> list[Series]:
    """What a rank of the layout holds of one of its model chunks.

    Args:
        padded: rows of the whole padded embedding; None: ``padded_vocab_size``.
    """
    at, experts_at = layout.coordinates(rank), layout.expert_coordinates(rank)
    held = ModelChunk(
        layout.layers_of_chunk(shape.num_layers, at.pipeline, chunk),
        Shard(at.tensor, layout.tensor),
        has_embedding=at.pipeline == 0 and chunk == 0,
        has_output=at.pipeline == layout.pipeline - 1 and chunk == layout.num_chunks - 1,
        experts=Shard(experts_at.expert, layout.expert),
        expert_tensor=Shard(experts_at.tensor, layout.expert_tensor),
        padded_vocab_size=padded,
    )
    return megatron_series(shape, held)


def _vocab_rows(local_name: str, hf_name: str, shape: ModelShape, shard: Shard, padded: int) -> list[Slice]:
    start, end = (min(row, shape.vocab_size) for row in shard.bounds(padded))
    return stack_rows(local_name, [(hf_name, start, end)], shape.hidden_size)


def _attention(shape: ModelShape, shard: Shard, local: str) -> list[Slice]:
    """Attention and the layer's two norms."""

    def hf(suffix: str) -> str:
        return layer_name(shape, LAYER, suffix)

    hidden = shape.hidden_size
    start, end = shard.bounds(shape.attention_size)
    slices = [whole(f"{local}.input_layernorm.weight", hf("input_layernorm.weight"), (hidden,))]
    project = _latent_qkv if shape.latent else _grouped_qkv
    slices += project(shape, shard, local)
    if shape.qk_norm:
        for part in ("q", "k"):
            name = f"{local}.self_attention.{part}_layernorm.weight"
            slices.append(whole(name, hf(f"self_attn.{part}_norm.weight"), (shape.head_dim,)))
    proj = f"{local}.self_attention.linear_proj.weight"
    slices.append(take_columns(proj, hf("self_attn.o_proj.weight"), hidden, start, end))
    slices.append(whole(f"{local}.pre_mlp_layernorm.weight", hf("post_attention_layernorm.weight"), (hidden,)))
    return slices


def gated_mlp(local: str, hf: str, hidden: int, ffn: int, shard: Shard) -> list[Slice]:
    """Megatron's fused order: the rank's gate rows, then its up rows; the down projection by columns."""
    start, end = shard.bounds(ffn)
    fc1 = [(f"{hf}.{part}_proj.weight", start, end) for part in ("gate", "up")]
    down = take_columns(f"{local}.linear_fc2.weight", f"{hf}.down_proj.weight", hidden, start, end)
    return [*stack_rows(f"{local}.linear_fc1.weight", fc1, hidden), down]


def _shared_part(shape: ModelShape, shard: Shard, local: str) -> list[Slice]:
    """What every token passes in a layer with experts: the router, and the shared expert if there is one."""
    mixture, hidden, hf = shape.mixture, shape.hidden_size, layer_name(shape, LAYER, "mlp")
    assert mixture is not None
    slices = [whole(f"{local}.router.weight", f"{hf}.gate.weight", (mixture.num_experts, hidden))]
    if mixture.score_bias:
        name = f"{hf}.gate.e_score_correction_bias"
        slices.append(whole(f"{local}.router.expert_bias", name, (mixture.num_experts,)))
    if mixture.shared_ffn_size:
        names = f"{local}.shared_experts", f"{hf}.{mixture.shared_name}"
        slices += gated_mlp(*names, hidden, mixture.shared_ffn_size, shard)
    if mixture.shared_gate:
        gate = f"{local}.shared_experts.gate_weight"
        slices.append(whole(gate, f"{hf}.shared_expert_gate.weight", (1, hidden)))
    return slices


def _experts(shape: ModelShape, chunk: ModelChunk, local: str, layers: Numbers) -> list[Series]:
    """One rank's experts, which Megatron counts from 0 on every rank."""
    mixture = shape.mixture
    assert mixture is not None
    hf = layer_name(shape, LAYER, f"mlp.experts.{EXPERT}")
    pieces = gated_mlp(local, hf, shape.hidden_size, mixture.ffn_size, chunk.expert_tensor)
    first, last = chunk.experts.bounds(mixture.num_experts)
    return numbered(pieces, replace(layers, experts=range(first, last), first_expert=first))


def _latent_qkv(shape: ModelShape, shard: Shard, local: str) -> list[Slice]:
    """The projections of latent attention are all cut by rows: the ones up by heads, the ones down anywhere."""
    latent = shape.latent
    assert latent is not None
    rows = [("linear_kv_down_proj", "kv_a_proj_with_mqa", latent.kv_rank + latent.rope_dim, shape.hidden_size)]
    rows.append(
        ("linear_kv_up_proj", "kv_b_proj", shape.num_heads * (latent.nope_dim + latent.value_dim), latent.kv_rank)
    )
    norms = [("kv_layernorm", "kv_a_layernorm", latent.kv_rank)]
    if latent.q_rank is None:
        rows.append(("linear_q_proj", "q_proj", shape.q_size, shape.hidden_size))
    else:
        rows.append(("linear_q_down_proj", "q_a_proj", latent.q_rank, shape.hidden_size))
        rows.append(("linear_q_up_proj", "q_b_proj", shape.q_size, latent.q_rank))
        norms.append(("q_layernorm", "q_a_layernorm", latent.q_rank))
    slices: list[Slice] = []
    for name, hf, height, width in rows:
        part = (layer_name(shape, LAYER, f"self_attn.{hf}.weight"), *shard.bounds(height))
        slices += stack_rows(f"{local}.self_attention.{name}.weight", [part], width)
    for name, hf, size in norms:
        slices.append(
            whole(f"{local}.self_attention.{name}.weight", layer_name(shape, LAYER, f"self_attn.{hf}.weight"), (size,))
        )
    return slices


def _grouped_qkv(shape: ModelShape, shard: Shard, local: str) -> list[Slice]:
    """Megatron's fused order: for every key-value group its query heads, then its key, then its value."""
    rows = {"q": shape.q_size // shape.num_kv_heads, "k": shape.head_dim, "v": shape.head_dim}  # of one group
    first, last = shard.bounds(shape.num_kv_heads)
    slices: list[Slice] = []
    for kind, width in (("weight", shape.hidden_size), ("bias", None)):
        if kind == "bias" and not shape.qkv_bias:
            continue
        parts = [
            (layer_name(shape, LAYER, f"self_attn.{part}_proj.{kind}"), group * rows[part], (group + 1) * rows[part])
            for group in range(first, last)
            for part in ("q", "k", "v")
        ]
        slices += stack_rows(f"{local}.self_attention.linear_qkv.{kind}", parts, width)
    return slices
