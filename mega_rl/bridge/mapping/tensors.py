"""The tensors of the supported model families, by their Hugging Face names, each with its size and role.

Tables hold every tensor kind of a decoder layer; a family (``shape.FAMILIES``) chooses among the tables and switches
their optional rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from mega_rl.bridge.mapping.tower import tower_names, whole_tower
from mega_rl.bridge.series import EXPERT as EXPERT_NUMBER, LAYER, Numbers, Series, numbered
from mega_rl.bridge.slices import whole
from mega_rl.models.shape import ModelShape

LM_HEAD = "lm_head.weight"
SCORE = "score.weight"  # of a value head, in the place of the other
ROLES = (
    "embedding",
    "lm_head",
    "score",
    "input_layernorm",
    "post_attention_layernorm",
    "final_layernorm",
    "q_norm",
    "k_norm",
    "router_norm",  # takes the place of post_attention_layernorm in layers with experts
    "latent_norm",
    "router",
    "router_bias",
    "linear",
    "bias",
    "vision",  # all of the tower that sees pictures
)


@dataclass(frozen=True)
class TensorKind:
    """A tensor of a layer: its name in the layer, its dimensions (see ``_sizes``) and its role."""

    suffix: str
    dims: tuple[str, ...]
    role: str
    only_if: str | None = None  # one of ``_options``; None: always there


ATTENTION = (
    TensorKind("self_attn.q_proj.weight", ("q", "hidden"), "linear"),
    TensorKind("self_attn.q_proj.bias", ("q",), "bias", "qkv_bias"),
    TensorKind("self_attn.k_proj.weight", ("kv", "hidden"), "linear"),
    TensorKind("self_attn.k_proj.bias", ("kv",), "bias", "qkv_bias"),
    TensorKind("self_attn.v_proj.weight", ("kv", "hidden"), "linear"),
    TensorKind("self_attn.v_proj.bias", ("kv",), "bias", "qkv_bias"),
    TensorKind("self_attn.o_proj.weight", ("hidden", "q"), "linear"),
    TensorKind("self_attn.q_norm.weight", ("head",), "q_norm", "qk_norm"),
    TensorKind("self_attn.k_norm.weight", ("head",), "k_norm", "qk_norm"),
)
LATENT_ATTENTION = (
    TensorKind("self_attn.q_proj.weight", ("q", "hidden"), "linear", "whole_q"),
    TensorKind("self_attn.q_a_proj.weight", ("q_rank", "hidden"), "linear", "compressed_q"),
    TensorKind("self_attn.q_a_layernorm.weight", ("q_rank",), "latent_norm", "compressed_q"),
    TensorKind("self_attn.q_b_proj.weight", ("q", "q_rank"), "linear", "compressed_q"),
    TensorKind("self_attn.kv_a_proj_with_mqa.weight", ("kv_down", "hidden"), "linear"),
    TensorKind("self_attn.kv_a_layernorm.weight", ("kv_rank",), "latent_norm"),
    TensorKind("self_attn.kv_b_proj.weight", ("kv_up", "kv_rank"), "linear"),
    TensorKind("self_attn.o_proj.weight", ("hidden", "attention"), "linear"),
)
DENSE_MLP = (
    TensorKind("mlp.gate_proj.weight", ("ffn", "hidden"), "linear"),
    TensorKind("mlp.up_proj.weight", ("ffn", "hidden"), "linear"),
    TensorKind("mlp.down_proj.weight", ("hidden", "ffn"), "linear"),
)
ROUTER = (
    TensorKind("mlp.gate.weight", ("experts", "hidden"), "router"),
    TensorKind("mlp.gate.e_score_correction_bias", ("experts",), "router_bias", "score_bias"),
)
EXPERT = (  # once for every {expert}
    TensorKind("mlp.experts.{expert}.gate_proj.weight", ("expert_ffn", "hidden"), "linear"),
    TensorKind("mlp.experts.{expert}.up_proj.weight", ("expert_ffn", "hidden"), "linear"),
    TensorKind("mlp.experts.{expert}.down_proj.weight", ("hidden", "expert_ffn"), "linear"),
)
SHARED_EXPERT = (  # {shared} is Mixture.shared_name
    TensorKind("mlp.{shared}.gate_proj.weight", ("shared_ffn", "hidden"), "linear", "shared"),
    TensorKind("mlp.{shared}.up_proj.weight", ("shared_ffn", "hidden"), "linear", "shared"),
    TensorKind("mlp.{shared}.down_proj.weight", ("hidden", "shared_ffn"), "linear", "shared"),
    TensorKind("mlp.shared_expert_gate.weight", ("one", "hidden"), "router", "shared_gate"),
)
NORMS = (
    TensorKind("input_layernorm.weight", ("hidden",), "input_layernorm"),
    TensorKind("post_attention_layernorm.weight", ("hidden",), "post_attention_layernorm"),
)


def hf_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model's checkpoint with its full shape, in the model's order; a tied lm_head is absent."""
    return {name: size for name, size, _ in _tensors(shape)}


def roles(shape: ModelShape) -> dict[str, str]:
    """Every tensor of ``hf_tensors`` with its role, one of ``ROLES``."""
    return {name: role for name, _, role in _tensors(shape)}


def embedding_name(shape: ModelShape) -> str:
    return f"{shape.decoder}.embed_tokens.weight"


def layer_name(shape: ModelShape, layer: int | str, suffix: str) -> str:
    return f"{shape.decoder}.layers.{layer}.{suffix}"


def final_norm_name(shape: ModelShape) -> str:
    return f"{shape.decoder}.norm.weight"


def _sizes(shape: ModelShape) -> dict[str, int]:
    sizes = {
        "one": 1,
        "hidden": shape.hidden_size,
        "ffn": shape.ffn_size,
        "q": shape.q_size,
        "kv": shape.kv_size,
        "head": shape.head_dim,
        "attention": shape.attention_size,
    }
    if shape.latent:
        latent = shape.latent
        sizes["q_rank"], sizes["kv_rank"] = latent.q_rank or 0, latent.kv_rank
        sizes["kv_down"] = latent.kv_rank + latent.rope_dim
        sizes["kv_up"] = shape.num_heads * (latent.nope_dim + latent.value_dim)
    if shape.mixture:
        mixture = shape.mixture
        sizes["experts"], sizes["expert_ffn"] = mixture.num_experts, mixture.ffn_size
        sizes["shared_ffn"] = mixture.shared_ffn_size
    return sizes


def _options(shape: ModelShape) -> dict[str, bool]:
    latent, mixture = shape.latent, shape.mixture
    return {
        "qkv_bias": shape.qkv_bias,
        "qk_norm": shape.qk_norm,
        "whole_q": latent is not None and latent.q_rank is None,
        "compressed_q": latent is not None and latent.q_rank is not None,
        "score_bias": mixture is not None and mixture.score_bias,
        "shared": mixture is not None and mixture.shared_ffn_size > 0,
        "shared_gate": mixture is not None and mixture.shared_gate,
    }


def _kinds(shape: ModelShape, has_experts: bool) -> list[tuple[str, tuple[int, ...], str]]:
    """The tensors of such a layer in order: name in the layer, with ``{expert}`` in it, full shape and role."""
    kinds = [*(LATENT_ATTENTION if shape.latent else ATTENTION)]
    if has_experts:
        assert shape.mixture is not None
        shared = [replace(kind, suffix=kind.suffix.format(shared=shape.mixture.shared_name)) for kind in SHARED_EXPERT]
        kinds += [*ROUTER, *EXPERT, *shared, NORMS[0], replace(NORMS[1], role="router_norm")]
    else:
        kinds += [*DENSE_MLP, *NORMS]
    sizes, options = _sizes(shape), _options(shape)
    present = [kind for kind in kinds if kind.only_if is None or options[kind.only_if]]
    return [(kind.suffix, tuple(sizes[d] for d in kind.dims), kind.role) for kind in present]


def _tensors(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...], str]]:
    kinds = {has_experts: _kinds(shape, has_experts) for has_experts in map(shape.has_experts, range(shape.num_layers))}
    yield embedding_name(shape), (shape.vocab_size, shape.hidden_size), "embedding"
    for layer in range(shape.num_layers):
        for is_of_expert, group in groupby(kinds[shape.has_experts(layer)], lambda kind: EXPERT_NUMBER in kind[0]):
            together = list(group)
            for expert in range(shape.mixture.num_experts if is_of_expert and shape.mixture else 1):
                for suffix, size, role in together:
                    yield layer_name(shape, layer, suffix.replace(EXPERT_NUMBER, str(expert))), size, role
    yield final_norm_name(shape), (shape.hidden_size,), "final_layernorm"
    if shape.head == "value":
        yield SCORE, (1, shape.hidden_size), "score"
    elif not shape.tied:
        yield LM_HEAD, (shape.vocab_size, shape.hidden_size), "lm_head"
    for name, _, size in tower_names(shape):
        yield name, size, "vision"


def full_series(shape: ModelShape) -> list[Series]:
    """Every tensor of the checkpoint whole, under its own name."""
    vocab = (shape.vocab_size, shape.hidden_size)
    embedding, final_norm = embedding_name(shape), final_norm_name(shape)
    series = numbered([whole(embedding, embedding, vocab)])
    for layers in shape.like_layers(range(shape.num_layers)):
        for suffix, size, _ in _kinds(shape, shape.has_experts(layers[0])):
            experts = range(shape.mixture.num_experts) if shape.mixture and EXPERT_NUMBER in suffix else (0,)
            name = layer_name(shape, LAYER, suffix)
            series += numbered([whole(name, name, size)], Numbers(layers, experts=experts))
    heads = {LM_HEAD: vocab, SCORE: (1, shape.hidden_size)}
    present = [whole(name, name, size) for name, size in heads.items() if name in hf_tensors(shape)]
    series += numbered([whole(final_norm, final_norm, (shape.hidden_size,)), *present])
    return series + whole_tower(shape)
