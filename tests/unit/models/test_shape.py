"""config.json -> ModelShape, as transformers 4 and 5 write it, and the refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mega_rl.bridge.mapping.tensors import ROLES, hf_tensors, roles
from mega_rl.errors import InputError
from mega_rl.models.config_values import ConfigValues
from mega_rl.models.latent import LatentAttention, read_latent
from mega_rl.models.shape import ModelShape, parse_config, read_model_shape

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def config(architecture: str = "Qwen2ForCausalLM", **changes: Any) -> dict[str, Any]:
    values = {
        "architectures": [architecture],
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "max_position_embeddings": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "vocab_size": 101,
    }
    return {**values, **changes}


def test_transformers_4_and_5_spellings_give_equal_shapes() -> None:
    old = parse_config(config("LlamaForCausalLM", rope_scaling=LLAMA3), "c")
    new = config("LlamaForCausalLM", rope_parameters={**LLAMA3, "rope_theta": 5e5})
    del new["rope_theta"]
    assert parse_config(new, "c") == old
    assert old.rope_theta == 5e5 and old.rope_scaling == LLAMA3
    assert parse_config(config(rope_scaling=None), "c").rope_scaling is None
    assert parse_config(config(rope_parameters={"rope_type": "default", "rope_theta": 7.0}), "c").rope_theta == 7.0


def test_fields_of_the_families() -> None:
    qwen2 = parse_config(config(), "c")
    assert (qwen2.family, qwen2.qkv_bias, qwen2.qk_norm, qwen2.tied, qwen2.head_dim) == (
        "qwen2",
        True,
        False,
        False,
        16,
    )
    qwen3 = parse_config(config("Qwen3ForCausalLM", tie_word_embeddings=True), "c")
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.tied, qwen3.head_dim) == (False, True, True, 128)
    llama = parse_config(config("LlamaForCausalLM", head_dim=32, num_key_value_heads=None), "c")
    assert (llama.qkv_bias, llama.qk_norm, llama.head_dim, llama.num_kv_heads) == (False, False, 32, 4)
    assert llama.norm_eps == 1e-5 and llama.ffn_size == 96 and llama.max_position_embeddings == 128


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["BertModel"]}, "BertModel.*LlamaForCausalLM, .*Qwen2ForCausalLM, .*Qwen3ForCausalLM"),
        ({"architectures": None}, "architectures is None"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"output_router_logits": True}, "output_router_logits.*auxiliary loss"),
        ({"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}, "sliding"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 32}, "head_dim"),
        ({"num_attention_heads": 6}, "multiple of num_attention_heads"),
    ],
)
def test_unsupported_configs_are_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_config(config(**changes), "config.json")


def test_queries_are_compressed_unless_the_file_says_null() -> None:
    ranks = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    latent = {"num_attention_heads": 4, **dict.fromkeys(ranks, 8)}

    def read(**changes: Any) -> LatentAttention:
        values = ConfigValues({**latent, **changes}, "here")
        found = read_latent(values)
        assert values.problems == []
        return found

    assert read().q_rank == 1536  # transformers' default
    assert read(q_lora_rank=None).q_rank is None
    assert read(q_lora_rank=20).q_rank == 20


def test_an_unused_sliding_window_is_accepted() -> None:
    parse_config(config(use_sliding_window=False, sliding_window=32), "c")
    parse_config(config(use_sliding_window=True, sliding_window=32, max_window_layers=2), "c")


def test_reading_directories(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="model.path.*does not exist"):
        read_model_shape(tmp_path / "nowhere")
    with pytest.raises(InputError, match="has no config.json"):
        read_model_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        read_model_shape(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InputError, match="not a JSON object"):
        read_model_shape(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config()))
    assert read_model_shape(tmp_path) == parse_config(config(), "c")


def tiny_transformers_model(family: str, tied: bool) -> tuple[ModelShape, dict[str, tuple[int, ...]]]:
    import transformers

    name = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}[family]
    cfg = getattr(transformers, f"{name}Config")(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=37,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        **({"head_dim": 16} if family == "qwen3" else {}),
    )
    model = getattr(transformers, f"{name}ForCausalLM")(cfg)
    shape = parse_config({**cfg.to_dict(), "architectures": [f"{name}ForCausalLM"]}, "c")
    return shape, {name: tuple(p.shape) for name, p in model.named_parameters()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_tensors_are_those_of_transformers(family: str, tied: bool) -> None:
    shape, parameters = tiny_transformers_model(family, tied)
    assert hf_tensors(shape) == parameters
    assert set(hf_tensors(shape)) == set(roles(shape))


def test_roles() -> None:
    assert set(roles(parse_config(config(), "c")).values()) <= set(ROLES)
    role = roles(parse_config(config("Qwen3ForCausalLM"), "c"))
    assert role["model.embed_tokens.weight"] == "embedding" and role["lm_head.weight"] == "lm_head"
    assert role["model.layers.1.input_layernorm.weight"] == "input_layernorm"
    assert role["model.layers.1.post_attention_layernorm.weight"] == "post_attention_layernorm"
    assert role["model.layers.0.self_attn.q_norm.weight"] == "q_norm" and role["model.norm.weight"] == "final_layernorm"
    assert role["model.layers.0.self_attn.q_proj.weight"] == "linear"
    assert roles(parse_config(config(), "c"))["model.layers.0.self_attn.q_proj.bias"] == "bias"
