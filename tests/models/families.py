"""Tiny models of every supported family, for all tests: the one table of them.

A new family is one entry of ``OPTIONS``, and one of every scale that it is tested at; the contract test, which asks for
it, does the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor

from mega_rl.models.shape import FAMILIES

Keys = Mapping[str, Any]  # of a Hugging Face configuration
ARCHITECTURES = {family.name: architecture for architecture, family in FAMILIES.items()}
# Beside sizes: what makes a configuration of this family one that is supported.
OPTIONS: dict[str, Keys] = {
    "qwen2": {},
    "qwen3": {},
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2_moe": {},
    "qwen3_moe": {"norm_topk_prob": True},
    "deepseek_v3": {},
    "qwen2_5_vl": {},
    "qwen3_vl": {},
    "qwen3_vl_moe": {},
}


def new_model(family: str, keys: Keys) -> transformers.PreTrainedModel:
    """A model as transformers makes it, from the global generator."""
    architecture = ARCHITECTURES[family]
    stem = architecture.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
    config = getattr(transformers, f"{stem}Config")
    model: transformers.PreTrainedModel = getattr(transformers, architecture)(config(**{**OPTIONS[family], **keys}))
    return model


def llama3_rope(original_positions: int) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original_positions,
    }


@dataclass(frozen=True)
class Scale:
    """The sizes of one group of tests."""

    common: Keys
    own: Mapping[str, Keys]  # the families that are tested at this scale: what differs there
    variants: Mapping[str, str] = field(default_factory=dict)  # an entry of ``own`` -> the family that it is one of

    def family(self, name: str) -> str:
        return self.variants.get(name, name)

    def keys(self, name: str) -> dict[str, Any]:
        """Of a model with a vision tower: those of its language model are in ``text_config``."""
        own = self.own[name]
        if "vision_config" in own:
            text = {**self.common, **own["text_config"]}
            return {**own, "text_config": text, "tie_word_embeddings": text["tie_word_embeddings"]}
        return {**self.common, **own}

    def text_keys(self, name: str) -> dict[str, Any]:
        """Of the language model, whatever else the model has."""
        keys = self.keys(name)
        text: dict[str, Any] = keys.get("text_config", keys)
        return text

    def config(self, name: str) -> dict[str, Any]:
        """What a ``config.json`` must say."""
        family = self.family(name)
        return {"architectures": [ARCHITECTURES[family]], **OPTIONS[family], **self.keys(name)}

    def new_model(self, name: str, **changes: Any) -> transformers.PreTrainedModel:
        """``changes``: other keys, of the language model."""
        keys = self.keys(name)
        keys = {**keys, "text_config": keys["text_config"] | changes} if "text_config" in keys else {**keys, **changes}
        return new_model(self.family(name), keys)


LATENT: dict[str, Any] = {  # compressed queries and keys, a dense first layer
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
DEEPSEEK: dict[str, Any] = {  # grouped routing with a bias, shared experts
    **LATENT,
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
}
TOWER: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
QWEN2_5_TOWER: dict[str, Any] = {**TOWER, "patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1]}
QWEN3_TOWER: dict[str, Any] = {
    **TOWER,
    "patch_size": 4,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 1],
}


def picture_tokens(vocab_size: int) -> dict[str, int]:
    """The last four of the vocabulary: what the configuration calls them."""
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return {name: vocab_size - 4 + number for number, name in enumerate(names)}


def three_axes(sections: list[int], **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections, **more}


CONTRACT = Scale(  # what every family must hold
    common={
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 48,
        "vocab_size": 131,  # divides by no tensor-parallel size
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    },
    own={
        "qwen2": {"tie_word_embeddings": True},
        "qwen3": {"head_dim": 16},
        "llama": {"head_dim": 16, "rope_parameters": llama3_rope(64)},
        "mistral": {"head_dim": 16},
        "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 40},
        "qwen3_moe": {**EXPERTS, "head_dim": 16, "mlp_only_layers": [1]},
        "deepseek_v3": DEEPSEEK,
        "deepseek_v3_whole_queries": {**DEEPSEEK, "q_lora_rank": None, "n_group": 1, "topk_group": 1},
        "qwen2_5_vl": {
            "text_config": {
                "num_attention_heads": 4,
                "rope_parameters": three_axes([2, 1, 1]),
                "tie_word_embeddings": True,
            },
            "vision_config": {**QWEN2_5_TOWER, "out_hidden_size": 32},
            **picture_tokens(131),
        },
        "qwen3_vl": {
            "text_config": {"head_dim": 16, "rope_parameters": three_axes([3, 3, 2], mrope_interleaved=True)},
            "vision_config": {**QWEN3_TOWER, "out_hidden_size": 32},
            **picture_tokens(131),
        },
        "qwen3_vl_moe": {
            "text_config": {
                **EXPERTS,
                "head_dim": 16,
                "mlp_only_layers": [1],
                "rope_parameters": three_axes([3, 3, 2], mrope_interleaved=True),
            },
            "vision_config": {**QWEN3_TOWER, "out_hidden_size": 32},
            **picture_tokens(131),
        },
    },
    variants={"deepseek_v3_whole_queries": "deepseek_v3"},
)
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e6}
FEW_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
TRAINER = Scale(  # the trainer at every layout; the vocabulary of two families does not divide by a tensor-parallel 2
    common={
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 250,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_parameters": PLAIN_ROPE,
    },
    own={
        "qwen2": {"head_dim": 16, "vocab_size": 251, "tie_word_embeddings": True},
        "qwen3": {"head_dim": 32},
        "llama": {"head_dim": 16, "vocab_size": 251, "num_key_value_heads": 4, "rope_parameters": llama3_rope(128)},
        "qwen3_moe": {**FEW_EXPERTS, "head_dim": 32, "num_experts": 4, "router_aux_loss_coef": 0.0},
        "deepseek_v3": {
            **LATENT,
            **FEW_EXPERTS,
            "head_dim": 8,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
        },
        "qwen2_5_vl": {
            "text_config": {"rope_parameters": three_axes([2, 3, 3]), "vocab_size": 251},
            "vision_config": {**QWEN2_5_TOWER, "out_hidden_size": 64},
            **picture_tokens(251),
        },
        "qwen3_vl": {
            "text_config": {"head_dim": 32, "rope_parameters": three_axes([6, 5, 5], mrope_interleaved=True)},
            "vision_config": {**QWEN3_TOWER, "out_hidden_size": 64},
            **picture_tokens(250),
        },
        "qwen3_vl_moe": {
            "text_config": {
                **FEW_EXPERTS,
                "num_experts": 4,
                "head_dim": 32,
                "rope_parameters": three_axes([6, 5, 5], mrope_interleaved=True),
            },
            "vision_config": {**QWEN3_TOWER, "out_hidden_size": 64},
            **picture_tokens(250),
        },
    },
)
ENGINE = Scale(  # real engines
    common={
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "initializer_range": 0.08,
        "dtype": "float32",
    },
    own={
        "qwen2": {},
        "qwen3": {},
        "llama": {},
        "mistral": {},
        "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 80},
        "qwen3_moe": {**EXPERTS, "mlp_only_layers": [0]},
    },
)
FILES = Scale(  # directories that are written and read
    common={
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 37,
        "max_position_embeddings": 64,
    },
    own={"qwen2": {}, "qwen3": {"head_dim": 16}, "llama": {}},
)


def make(name: str) -> transformers.PreTrainedModel:
    """A float32 model of the contract, the same in every process, whose norms, biases and routers are not trivial."""
    torch.manual_seed(0)
    model = CONTRACT.new_model(name)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("bias") or "norm" in name:
                tensor.add_(0.1 * torch.randn_like(tensor))
            elif "inv_freq" not in name:
                tensor.mul_(20.0 if name.endswith("mlp.gate.weight") else 4.0)  # so that an error is visible
    return model.eval()


def as_saved(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by their names in memory -> by the names of the checkpoint, where every expert has its own."""
    saved: dict[str, Tensor] = {}
    is_qwen2_5_vl = "model.language_model.layers.0.self_attn.q_proj.bias" in tensors
    for name, tensor in tensors.items():
        if is_qwen2_5_vl:
            name = name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
        prefix, fused, part = name.rpartition(".experts.")
        if part == "gate_up_proj":
            for expert, (gate, up) in enumerate(matrix.chunk(2) for matrix in tensor):
                saved[f"{prefix}{fused}{expert}.gate_proj.weight"] = gate
                saved[f"{prefix}{fused}{expert}.up_proj.weight"] = up
        elif part == "down_proj":
            saved |= {f"{prefix}{fused}{expert}.down_proj.weight": matrix for expert, matrix in enumerate(tensor)}
        else:
            saved[name] = tensor
    return saved
