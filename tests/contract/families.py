"""Tiny models of every supported family. A new family is one entry here: the contract test does the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor

COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 131,  # divides by no tensor-parallel size
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# name -> (architecture without "ForCausalLM", changes to COMMON)
FAMILIES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "llama": ("Llama", {"head_dim": 16, "rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"head_dim": 16, "sliding_window": None}),
    "qwen2_moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 40}),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "deepseek_v3": ("DeepseekV3", DEEPSEEK),
    "deepseek_v3_whole_queries": ("DeepseekV3", {**DEEPSEEK, "q_lora_rank": None, "n_group": 1, "topk_group": 1}),
}


def make(family: str) -> transformers.PreTrainedModel:
    """A float32 model, the same in every process, whose norms, biases and routers are not trivial."""
    architecture, changes = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{architecture}Config")(**{**COMMON, **changes})
    model = getattr(transformers, f"{architecture}ForCausalLM")(config)
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
    for name, tensor in tensors.items():
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
