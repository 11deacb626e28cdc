"""The selector over role tables of the families, names as their checkpoints spell them."""

from __future__ import annotations

from typing import Any

import pytest

from mega_rl.bridge.mapping.tensors import roles
from mega_rl.bridge.outgoing.noise import NORM_ROLES, AqnNoise
from mega_rl.bridge.outgoing.quantize import QUANTIZED_ROLE
from mega_rl.config.schema.sampling import AqnConfig
from mega_rl.errors import InputError
from mega_rl.models.shape import parse_config
from tests.models import families

LLAMA = {
    "input_layernorm": "input_layernorm",
    "self_attn.q_proj": "linear",
    "post_attention_layernorm": "post_attention_layernorm",
    "mlp.down_proj": "linear",
}
QWEN3 = LLAMA | {"self_attn.q_norm": "q_norm", "self_attn.k_norm": "k_norm"}
QWEN3_MOE = QWEN3 | {"post_attention_layernorm": "router_norm", "mlp.gate": "linear"}
DEEPSEEK = {
    "input_layernorm": "input_layernorm",
    "self_attn.q_a_layernorm": "latent_norm",
    "self_attn.kv_a_layernorm": "latent_norm",
    "post_attention_layernorm": "router_norm",
}
# In Gemma the norm before gate/up has another name, and post_attention_layernorm is one of attention's output.
GEMMA = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "output_norm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "output_norm",
}


def model(*layers: dict[str, str]) -> dict[str, str]:
    """Roles of a model whose layers have these tables."""
    inner = {f"model.layers.{i}.{k}.weight": role for i, layer in enumerate(layers) for k, role in layer.items()}
    return {"model.embed_tokens.weight": "embedding", **inner, "model.norm.weight": "final_layernorm"}


def targets(roles: dict[str, str], **keys: Any) -> list[str]:
    """Selected names, without what every name of a layer shares."""
    names = AqnNoise(AqnConfig(enabled=True, **keys), total_steps=10).targets(roles)
    return [name.removeprefix("model.layers.").removesuffix(".weight") for name in names]


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        (model(LLAMA, LLAMA), [f"{i}.{n}_layernorm" for i in (0, 1) for n in ("input", "post_attention")]),
        (model(QWEN3), ["0.input_layernorm", "0.post_attention_layernorm"]),
        (model(QWEN3_MOE), ["0.input_layernorm"]),
        # DeepSeek's first layers are dense, the others have a router.
        (model(LLAMA, DEEPSEEK), ["0.input_layernorm", "0.post_attention_layernorm", "1.input_layernorm"]),
        (model(GEMMA), ["0.input_layernorm", "0.pre_feedforward_layernorm"]),
    ],
    ids=["llama and qwen2.5", "qwen3", "qwen3-moe", "deepseek", "gemma"],
)
def test_default_is_the_norms_before_qkv_and_gate_up(roles: dict[str, str], expected: list[str]) -> None:
    assert targets(roles) == expected


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
@pytest.mark.parametrize("modules", [None, [], ["input_layernorm", "final_layernorm"]])
def test_a_tower_has_no_noise_and_no_simulated_quantisation(family: str, modules: list[str] | None) -> None:
    shape = parse_config(families.CONTRACT.config(family), family)
    noise = AqnNoise(AqnConfig(enabled=True, target_modules=modules, include_router_norms=True), total_steps=10)
    chosen = noise.targets(roles(shape))
    assert len(chosen) >= shape.num_layers and all(name.startswith(f"{shape.decoder}.") for name in chosen)
    assert any("visual." in name and "norm" in name for name in roles(shape))
    quantised = [name for name, role in roles(shape).items() if role == QUANTIZED_ROLE]
    assert quantised and not any("visual." in name for name in quantised)


def test_empty_list_is_every_norm_but_the_router_s() -> None:
    norms = ["0.input_layernorm", "0.post_attention_layernorm", "0.self_attn.q_norm", "0.self_attn.k_norm"]
    assert targets(model(QWEN3), target_modules=[]) == [*norms, "model.norm"]
    without_router = [name for name in norms if name != "0.post_attention_layernorm"]
    assert targets(model(QWEN3_MOE), target_modules=[]) == [*without_router, "model.norm"]
    latent = ["0.self_attn.q_a_layernorm", "0.self_attn.kv_a_layernorm"]
    assert targets(model(DEEPSEEK), target_modules=[])[1:3] == latent


def test_router_norms_are_opted_in() -> None:
    both = ["0.input_layernorm", "0.post_attention_layernorm"]
    assert targets(model(QWEN3_MOE), include_router_norms=True) == both
    assert targets(model(QWEN3_MOE), target_modules=["router_norm"]) == both[1:]
    assert "0.post_attention_layernorm" in targets(model(QWEN3_MOE), target_modules=[], include_router_norms=True)


def test_a_list_selects_roles_and_patterns_take_names_out() -> None:
    assert targets(model(QWEN3), target_modules=["q_norm", "final_layernorm"]) == ["0.self_attn.q_norm", "model.norm"]
    got = targets(model(LLAMA, LLAMA, LLAMA), exclude_patterns=["model.layers.0.*", "*.2.post_attention_layernorm.*"])
    assert got == ["1.input_layernorm", "1.post_attention_layernorm", "2.input_layernorm"]


def test_a_word_is_a_part_of_names_and_must_match_a_norm_of_the_model() -> None:
    post = ["0.post_attention_layernorm"]
    assert targets(model(LLAMA), exclude_patterns=["input_layernorm"]) == post
    chosen = {"target_modules": ["post_attention_layernorm"], "exclude_patterns": ["input_layernorm"]}
    assert targets(model(LLAMA), **chosen) == post  # the NPU guide of verl
    with pytest.raises(InputError, match=r"aqn.exclude_patterns has 'lm_head', which matches no norm of the model"):
        targets(model(LLAMA), exclude_patterns=["lm_head"])


@pytest.mark.parametrize("keys", [{"exclude_patterns": ["*"]}, {"target_modules": ["q_norm"]}])
def test_no_target_is_an_input_error(keys: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"aqn\.target_modules and aqn\.exclude_patterns leave no tensor"):
        targets(model(LLAMA), **keys)


@pytest.mark.parametrize("role", ["linear", "post_attention_layer_norm", "layernorm"])
def test_what_is_not_a_norm_role_is_an_input_error(role: str) -> None:
    with pytest.raises(InputError, match=r"aqn\.target_modules names .* choose among input_layernorm"):
        targets(model(LLAMA), target_modules=["input_layernorm", role])


def test_roles_of_every_table_are_known() -> None:
    used = {role for table in (LLAMA, QWEN3, QWEN3_MOE, DEEPSEEK, GEMMA) for role in table.values()} - {"linear"}
    assert used | {"final_layernorm"} == set(NORM_ROLES)


@pytest.mark.parametrize(
    ("architecture", "more", "expected"),
    [
        ("LlamaForCausalLM", {}, ["0.input", "0.post_attention", "1.input", "1.post_attention"]),
        ("Qwen2ForCausalLM", {}, ["0.input", "0.post_attention", "1.input", "1.post_attention"]),
        ("Qwen3ForCausalLM", {}, ["0.input", "0.post_attention", "1.input", "1.post_attention"]),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [1]}, ["0.input", "1.input", "1.post_attention"]),
        ("Qwen2MoeForCausalLM", {"shared_expert_intermediate_size": 8}, ["0.input", "1.input"]),
    ],
)
def test_the_mapping_s_own_roles_give_the_same(architecture: str, more: dict[str, Any], expected: list[str]) -> None:
    """The roles that a run uses, of real configurations."""
    config = {
        "architectures": [architecture],
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 32,
        "vocab_size": 10,
        "max_position_embeddings": 64,
    }
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    roles_of_model = roles(parse_config(config | mixture | more, "config.json"))
    assert targets(roles_of_model) == [f"{name}_layernorm" for name in expected]
    routers = [name for name, role in roles_of_model.items() if role == "router"]
    linear = [name for name, role in roles_of_model.items() if role == "linear"]
    assert all(name.endswith(("mlp.gate.weight", "shared_expert_gate.weight")) for name in routers)
    assert linear and all(name.endswith("_proj.weight") for name in linear)
