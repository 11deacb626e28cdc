"""What the bridge and the trainer need to know of a model, read from its Hugging Face config.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mega_rl.errors import InputError
from mega_rl.models.config_values import positive_integer, positive_number, refuse_unless
from mega_rl.models.latent import LatentAttention, read_latent
from mega_rl.models.mixture import Mixture, read_deepseek_mixture, read_qwen_mixture


@dataclass(frozen=True)
class Family:
    """One row per supported architecture: what its config.json does not say, and transformers' defaults for it."""

    name: str
    qkv_bias: bool = False
    qk_norm: bool = False
    free_head_dim: bool = True  # false: head_dim is always hidden_size / num_attention_heads
    default_head_dim: int | None = None  # where config.json has none; None: hidden_size / num_attention_heads
    # How a sliding window is switched on: by_layer (use_sliding_window, from max_window_layers on) | all_layers
    # (use_sliding_window) | always (sliding_window alone).
    window: str = "by_layer"
    default_window: int | None = None  # tokens, where config.json has no sliding_window
    mixture: Callable[[Mapping[str, Any], str], Mixture] | None = None  # reads the experts; None: all layers are dense
    latent: Callable[[Mapping[str, Any], str], LatentAttention] | None = None  # None: grouped-query attention


FAMILIES: dict[str, Family] = {
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, free_head_dim=False),
    "Qwen3ForCausalLM": Family("qwen3", qk_norm=True, default_head_dim=128),
    "LlamaForCausalLM": Family("llama"),
    "MistralForCausalLM": Family("mistral", window="always", default_window=4096),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe", qkv_bias=True, free_head_dim=False, window="all_layers", mixture=partial(read_qwen_mixture, True)
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe", qk_norm=True, window="all_layers", mixture=partial(read_qwen_mixture, False)
    ),
    "DeepseekV3ForCausalLM": Family("deepseek_v3", mixture=read_deepseek_mixture, latent=read_latent),
}
LLAMA3_ROPE_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class ModelShape:
    """The sizes and options of one decoder; equal shapes have equal tensors."""

    family: str  # Family.name
    num_layers: int
    hidden_size: int
    ffn_size: int  # of the dense layers
    num_heads: int  # query heads
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # rows of the embedding, without padding
    tied: bool  # the output layer is the embedding
    qkv_bias: bool
    qk_norm: bool  # RMS norm of every query and key head
    norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None  # None: plain rotary; else rope_type llama3 with LLAMA3_ROPE_KEYS
    max_position_embeddings: int  # tokens
    mixture: Mixture | None = None  # None: every layer is dense
    latent: LatentAttention | None = None  # None: grouped-query attention; else head_dim is that of queries and keys

    def has_experts(self, layer: int) -> bool:
        return self.mixture is not None and layer in self.mixture.layers

    def like_layers(self, layers: Sequence[int]) -> list[tuple[int, ...]]:
        """The layers without experts and those with, where there are any: layers of one kind have the same tensors."""
        kinds = (tuple(i for i in layers if self.has_experts(i) == has_experts) for has_experts in (False, True))
        return [kind for kind in kinds if kind]

    @property
    def has_dense_layers(self) -> bool:
        return self.mixture is None or len(self.mixture.layers) < self.num_layers

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def attention_size(self) -> int:
        """Columns of the attention's output projection."""
        return self.num_heads * (self.latent.value_dim if self.latent else self.head_dim)

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


def read_model_shape(model_dir: str | Path) -> ModelShape:
    """The shape that ``model_dir/config.json`` describes; InputError for what is missing, malformed or unsupported."""
    return parse_config(read_config(model_dir), str(Path(model_dir) / "config.json"))


def read_config(model_dir: str | Path) -> dict[str, Any]:
    """The parsed ``model_dir/config.json``; InputError where it is missing or malformed."""
    path = Path(model_dir) / "config.json"
    if not Path(model_dir).is_dir():
        raise InputError(f"model.path: {model_dir} is not a directory; give a Hugging Face model directory")
    if not path.is_file():
        raise InputError(f"model.path: {path} is missing; give a directory with a Hugging Face config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"model.path: {path} is not valid JSON ({error}); copy the model again") from error
    if not isinstance(config, dict):
        raise InputError(f"model.path: {path} holds no JSON object; copy the model again")
    return config


def parse_config(config: Mapping[str, Any], where: str) -> ModelShape:
    """As ``read_model_shape`` from the parsed JSON; ``where`` names it in messages."""
    family = _family(config, where)
    _refuse_unsupported(config, family, where)
    hidden, heads = (
        positive_integer(config, "hidden_size", where),
        positive_integer(config, "num_attention_heads", where),
    )
    kv_heads = (
        heads if config.get("num_key_value_heads") is None else positive_integer(config, "num_key_value_heads", where)
    )
    if heads % kv_heads:
        raise InputError(f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    theta, scaling = _rope(config, where)
    latent = family.latent(config, where) if family.latent else None
    return ModelShape(
        family=family.name,
        num_layers=positive_integer(config, "num_hidden_layers", where),
        hidden_size=hidden,
        ffn_size=positive_integer(config, "intermediate_size", where),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=latent.key_dim if latent else _head_dim(config, family, hidden, heads, where),
        vocab_size=positive_integer(config, "vocab_size", where),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        norm_eps=positive_number(config, "rms_norm_eps", 1e-6, where),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=positive_integer(config, "max_position_embeddings", where),
        mixture=family.mixture(config, where) if family.mixture else None,
        latent=latent,
    )


def _family(config: Mapping[str, Any], where: str) -> Family:
    names = config.get("architectures") or []
    architecture = names[0] if isinstance(names, list) and names else None
    if architecture not in FAMILIES:
        raise InputError(
            f"{where}: architectures is {architecture or 'missing'}; supported are {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[architecture]


def _refuse_unsupported(config: Mapping[str, Any], family: Family, where: str) -> None:
    refuse_unless(config, "hidden_act", "silu", where)
    if family.qkv_bias:
        refuse_unless(config, "qkv_bias", True, where)
    for key, fix in (
        ("attention_bias", "a bias on the attention output is not supported"),
        ("mlp_bias", "a bias in the MLP is not supported"),
        ("quantization_config", "give the unquantised model"),
        ("output_router_logits", "no stage trains with the routers' auxiliary loss that it asks for; set it to false"),
    ):
        if config.get(key):
            raise InputError(f"{where}: {key} is {config[key]!r}; {fix}")
    if _has_window(config, family):
        raise InputError(
            f"{where}: a sliding attention window is in use; only full attention is supported, so where no sequence is "
            "longer than the window, switch it off in a copy of the file"
        )


def _has_window(config: Mapping[str, Any], family: Family) -> bool:
    """Whether a layer attends to fewer tokens than the model takes."""
    layer_types = config.get("layer_types")
    if layer_types is not None:
        return any(kind != "full_attention" for kind in layer_types)
    window = config.get("sliding_window", family.default_window)
    if family.window == "always":
        return window is not None and window < config.get("max_position_embeddings", 0)
    if not config.get("use_sliding_window") or window is None:
        return False
    first = (config.get("max_window_layers") or 0) if family.window == "by_layer" else 0
    return bool(first < config.get("num_hidden_layers", 0))


def _head_dim(config: Mapping[str, Any], family: Family, hidden: int, heads: int, where: str) -> int:
    if config.get("head_dim") is not None:
        head_dim = positive_integer(config, "head_dim", where)
        if not family.free_head_dim and head_dim * heads != hidden:
            raise InputError(
                f"{where}: head_dim {head_dim} x num_attention_heads {heads} is not hidden_size {hidden}, "
                f"which {family.name} needs"
            )
        return head_dim
    if family.default_head_dim is not None:
        return family.default_head_dim
    if hidden % heads:
        raise InputError(f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    return hidden // heads


def _rope(config: Mapping[str, Any], where: str) -> tuple[float, dict[str, Any] | None]:
    """theta and scaling, from rope_parameters (transformers 5) or rope_theta and rope_scaling (transformers 4)."""
    merged = {"rope_theta": config.get("rope_theta"), **(config.get("rope_scaling") or {})}
    merged.update(config.get("rope_parameters") or {})
    theta = merged.get("rope_theta")
    theta = 10000.0 if theta is None else positive_number(merged, "rope_theta", 0.0, where)
    kind = merged.get("rope_type", merged.get("type", "default"))
    for source in (config, merged):
        if source.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise InputError(f"{where}: partial_rotary_factor is not 1; only full rotary embedding is supported")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise InputError(f"{where}: rope type {kind!r} is not supported; supported are default and llama3")
    missing = [key for key in LLAMA3_ROPE_KEYS if key not in merged]
    if missing:
        raise InputError(f"{where}: rope type llama3 lacks {', '.join(missing)}")
    for key in LLAMA3_ROPE_KEYS:
        positive_number(merged, key, 0.0, where)
    return theta, {"rope_type": "llama3", **{key: merged[key] for key in LLAMA3_ROPE_KEYS}}
