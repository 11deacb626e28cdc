"""What the bridge and the trainer need to know of a model, read from its Hugging Face config.json.

The only reader of that file: a dry run, a run, the planner and the converter refuse the same models with the same
sentences.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from mega_rl.errors import InputError, input_error, shown
from mega_rl.models.config_values import ConfigValues
from mega_rl.models.files import CONFIG_FILE, read_config
from mega_rl.models.latent import LatentAttention, read_latent
from mega_rl.models.mixture import Mixture, read_deepseek_mixture, read_qwen3_vl_mixture, read_qwen_mixture
from mega_rl.models.vision import ReadTower, Tower, read_qwen2_5_tower, read_qwen3_tower, text_values


@dataclass(frozen=True)
class Family:
    """One row per supported architecture: what its config.json does not say, and transformers' defaults for it."""

    name: str
    qkv_bias: bool = False
    qk_norm: bool = False
    free_head_dim: bool = True  # false: head_dim is always hidden_size / num_attention_heads
    default_head_dim: int | None = None  # if config.json has none; None: hidden_size / num_attention_heads
    # How a sliding window is switched on: by_layer (use_sliding_window, from max_window_layers on) | all_layers
    # (use_sliding_window) | always (sliding_window itself).
    window: str = "by_layer"
    default_window: int | None = None  # tokens, if config.json has no sliding_window
    mixture: Callable[[ConfigValues], Mixture] | None = None  # reads the experts; None: all layers are dense
    latent: Callable[[ConfigValues], LatentAttention] | None = None  # None: grouped-query attention
    decoder: str = "model"  # what the checkpoint's names of the decoder's tensors begin with
    tower: ReadTower | None = None  # reads the part that sees pictures; None: there is none
    tower_prefix: str = ""  # what the checkpoint's names of the tower's tensors begin with
    fused_experts: bool = False  # files hold the experts of a layer in two tensors


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
    "Qwen2_5_VLForConditionalGeneration": Family(
        "qwen2_5_vl", qkv_bias=True, free_head_dim=False, tower=read_qwen2_5_tower, tower_prefix="visual"
    ),
    "Qwen3VLForConditionalGeneration": Family(
        "qwen3_vl",
        qk_norm=True,
        default_head_dim=128,
        decoder="model.language_model",
        tower=read_qwen3_tower,
        tower_prefix="model.visual",
    ),
    "Qwen3VLMoeForConditionalGeneration": Family(
        "qwen3_vl_moe",
        qk_norm=True,
        window="all_layers",
        mixture=read_qwen3_vl_mixture,
        decoder="model.language_model",
        tower=read_qwen3_tower,
        tower_prefix="model.visual",
        fused_experts=True,
    ),
}
BY_NAME = {family.name: family for family in FAMILIES.values()}
Head = Literal["vocabulary", "value"]  # what stands on the last layer: logits of all tokens, or one number
LANGUAGE: tuple[Head, ...] = ("vocabulary",)
VALUE: tuple[Head, ...] = ("value",)
# What the name of an architecture ends with.
SUFFIXES: Mapping[Head, str] = {"vocabulary": "ForCausalLM", "value": "ForSequenceClassification"}
MAX_LAYERS = 4096
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
    head: Head = "vocabulary"  # value: a reward model or critic, whose ``tied`` is always false
    tower: Tower | None = None  # what sees pictures; None: a model of text alone

    @property
    def architecture(self) -> str:
        """The first of ``architectures`` in config.json."""
        name = next(name for name, family in FAMILIES.items() if family.name == self.family)
        return name.replace(SUFFIXES["vocabulary"], SUFFIXES[self.head])

    @property
    def tower_prefix(self) -> str:
        """What the checkpoint's names of the tower's tensors begin with."""
        return BY_NAME[self.family].tower_prefix

    @property
    def decoder(self) -> str:
        """What the checkpoint's names of the decoder's tensors begin with; the same for all models of a family."""
        return BY_NAME[self.family].decoder

    @property
    def fused_experts(self) -> bool:
        """Whether files hold the experts of a layer in two tensors, not every matrix by itself."""
        return BY_NAME[self.family].fused_experts

    def has_experts(self, layer: int) -> bool:
        return self.mixture is not None and layer in self.mixture.layers

    def like_layers(self, layers: Sequence[int]) -> list[tuple[int, ...]]:
        """The layers without experts and those with, if there are any: layers of one kind have the same tensors."""
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


def value_shape(shape: ModelShape) -> ModelShape:
    """The same decoder with a value head."""
    return replace(shape, head="value", tied=False)


def inspect_model(
    model_dir: str | Path, key: str = "model.path", allowed: Collection[Head] = LANGUAGE
) -> tuple[ModelShape | None, list[str]]:
    """The shape that ``model_dir/config.json`` describes, or None and a sentence for everything wrong with the file.

    Args:
        key: the configuration key or the option that named the directory; the sentences quote it.
        allowed: what the model may have on its last layer.
    """
    try:
        config = read_config(model_dir, key)
    except InputError as error:
        return None, [str(error)]
    return inspect_config(config, f"{Path(model_dir) / CONFIG_FILE} (of {key})", allowed)


def read_model_shape(
    model_dir: str | Path, key: str = "model.path", allowed: Collection[Head] = LANGUAGE
) -> ModelShape:
    """As ``inspect_model``; InputError with all the sentences instead of None."""
    return _shape_or_error(*inspect_model(model_dir, key, allowed))


def parse_config(config: Mapping[str, Any], where: str) -> ModelShape:
    """As ``read_model_shape`` from the parsed JSON; ``where`` names it in the sentences."""
    return _shape_or_error(*inspect_config(config, where))


def _shape_or_error(shape: ModelShape | None, problems: list[str]) -> ModelShape:
    if shape is None:
        raise input_error("unusable model", problems)
    return shape


def inspect_config(
    config: Mapping[str, Any], where: str, allowed: Collection[Head] = LANGUAGE
) -> tuple[ModelShape | None, list[str]]:
    """As ``inspect_model`` from the parsed JSON; ``where`` names it in the sentences."""
    values = ConfigValues(config, where)
    family, head = _family(values, allowed)
    if family is None:  # nothing is known of its other keys
        return None, values.problems
    whole = values
    if family.tower:
        values = ConfigValues(text_values(config), where)
    tower = family.tower(whole, values) if family.tower else None
    _unsupported(values, family)
    if head == "value":
        _one_label(values)
    heads, kv_heads = _heads(values)
    num_layers, hidden = values.integer("num_hidden_layers", most=MAX_LAYERS), values.integer("hidden_size")
    positions = values.integer("max_position_embeddings")
    _window(values, family)
    theta, scaling = _rope(values, tower is not None)
    latent = family.latent(values) if family.latent else None
    shape = ModelShape(
        family=family.name,
        num_layers=num_layers,
        hidden_size=hidden,
        ffn_size=values.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=latent.key_dim if latent else _head_dim(values, family, hidden, heads),
        vocab_size=values.integer("vocab_size"),
        tied=values.flag("tie_word_embeddings") and head == "vocabulary",
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        norm_eps=values.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=positions,
        mixture=family.mixture(values) if family.mixture else None,
        latent=latent,
        head=head,
        tower=tower,
    )
    if tower is not None:
        _axes_fit(values, tower, shape.head_dim)
        values.problems[:0] = whole.problems
    return (None if values.problems else shape), values.problems


def _axes_fit(config: ConfigValues, tower: Tower, head_dim: int) -> None:
    if config.good("mrope_section") and 2 * sum(tower.rope_sections) != head_dim:
        sections = list(tower.rope_sections)
        config.add(f"mrope_section is {sections}, which must add up to half of the head's {head_dim} channels")


def _family(config: ConfigValues, allowed: Collection[Head]) -> tuple[Family | None, Head]:
    """By the first architecture, the only one that transformers and vLLM look at too."""
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    by_architecture = {
        name.replace(SUFFIXES["vocabulary"], SUFFIXES[head]): (family, head)
        for head in allowed
        for name, family in FAMILIES.items()
        if head == "vocabulary" or family.tower is None
    }
    if isinstance(first, str) and first in by_architecture:
        return by_architecture[first]
    supported = ", ".join(sorted(by_architecture))
    config.add(f"architectures is {shown(names)}, of which the first counts: choose a model of {supported}")
    return None, "vocabulary"


def _one_label(config: ConfigValues) -> None:
    labels, number = config.get("id2label"), config.get("num_labels")
    if isinstance(labels, dict):
        number = len(labels)
    if number != 1:
        found = 2 if number is None else number  # what transformers takes if the file does not say
        config.add(f"num_labels is {shown(found)}: a value needs a model of one label")


def _unsupported(config: ConfigValues, family: Family) -> None:
    config.require("hidden_act", "silu")
    if family.qkv_bias:
        config.require("qkv_bias", True)
    for key, fix in (
        ("attention_bias", "a bias on the attention output is not supported"),
        ("mlp_bias", "a bias in the MLP is not supported"),
        ("quantization_config", "give the unquantised model"),
        ("output_router_logits", "no stage trains with the routers' auxiliary loss that it asks for; set it to false"),
    ):
        if config.get(key):
            config.add(f"{key} is {shown(config.get(key))}; {fix}", key)


def _heads(config: ConfigValues) -> tuple[int, int]:
    """Numbers of query heads and of key/value heads, the second equal to the first if the file does not say."""
    heads = config.integer("num_attention_heads")
    if config.get("num_key_value_heads") is None:
        return heads, heads
    kv_heads = config.integer("num_key_value_heads")
    if config.good("num_attention_heads", "num_key_value_heads") and heads % kv_heads:
        config.add(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    return heads, kv_heads


def _window(config: ConfigValues, family: Family) -> None:
    """Complains if a layer attends to fewer tokens than the model takes."""
    kinds = config.get("layer_types")
    if kinds is not None and not isinstance(kinds, list):
        config.add(f"layer_types is {shown(kinds)}; it must be a list of kinds of attention", "layer_types")
    elif _has_window(config, family) if kinds is None else any(kind != "full_attention" for kind in kinds):
        config.add(
            "a sliding attention window is in use; only full attention is supported, so if no sequence is longer than "
            "the window, switch it off in a copy of the file"
        )


def _has_window(config: ConfigValues, family: Family) -> bool:
    keys = ("sliding_window", "max_window_layers", "num_hidden_layers", "max_position_embeddings")
    if family.window != "always" and not config.get("use_sliding_window"):
        return False
    if config.get("sliding_window", family.default_window) is None:
        return False
    window = config.integer("sliding_window", family.default_window)
    first = config.get("max_window_layers") or 0
    if not isinstance(first, int):
        config.add(f"max_window_layers is {shown(first)}; it must be a number of layers", "max_window_layers")
    if not config.good(*keys):
        return False
    if family.window == "always":
        return window < int(config.get("max_position_embeddings"))
    return family.window == "all_layers" or first < int(config.get("num_hidden_layers"))


def _head_dim(config: ConfigValues, family: Family, hidden: int, heads: int) -> int:
    is_known = config.good("hidden_size", "num_attention_heads")
    if config.get("head_dim") is not None:
        head_dim = config.integer("head_dim")
        if not family.free_head_dim and is_known and config.good("head_dim") and head_dim * heads != hidden:
            config.add(
                f"head_dim {head_dim} x num_attention_heads {heads} is not hidden_size {hidden}, which {family.name} "
                "needs"
            )
        return head_dim
    if family.default_head_dim is not None:
        return family.default_head_dim
    if is_known and hidden % heads:
        config.add(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    return hidden // heads


def _rope(config: ConfigValues, has_axes: bool) -> tuple[float, dict[str, Any] | None]:
    """theta and scaling, from rope_parameters (transformers 5) or rope_theta and rope_scaling (transformers 4).

    ``has_axes``: positions have three axes (``mrope``), which is no scaling.
    """
    given = {"rope_theta": config.get("rope_theta"), **config.section("rope_scaling")}
    given |= config.section("rope_parameters")
    rope = ConfigValues(given, config.where)
    theta = 10000.0 if rope.get("rope_theta") is None else rope.number("rope_theta", 0.0)
    if rope.get("mrope_section") is not None and not has_axes:
        rope.add("mrope_section is set, but the model sees no pictures; remove it in a copy of the file")
    is_plain = has_axes and rope.get("rope_type", rope.get("type")) == "mrope"
    scaling = None if is_plain else _rope_scaling(rope)
    if any(source.get("partial_rotary_factor") not in (None, 1) for source in (config, rope)):
        rope.add("partial_rotary_factor is not 1; only full rotary embedding is supported")
    config.problems += rope.problems
    return theta, scaling


def _rope_scaling(rope: ConfigValues) -> dict[str, Any] | None:
    """None for plain rotary embedding."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        rope.add(f"rope type {shown(kind)} is not supported; supported are default and llama3")
        return None
    missing = [key for key in LLAMA3_ROPE_KEYS if key not in rope.values]
    if missing:
        rope.add(f"rope type llama3 lacks {', '.join(missing)}")
        return None
    for key in LLAMA3_ROPE_KEYS:
        rope.number(key, 0.0)
    return {"rope_type": "llama3", **{key: rope.get(key) for key in LLAMA3_ROPE_KEYS}}
