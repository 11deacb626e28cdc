"""Tiny Hugging Face models with weights that make mistakes visible: norms and biases are not their trivial values.

The vocabulary of two families does not divide by a tensor-parallel size of 2.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import transformers

DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e6}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


@dataclass(frozen=True)
class TinyFamily:
    config_class: type[transformers.PretrainedConfig]
    model_class: type[transformers.PreTrainedModel]
    tied: bool
    vocab_size: int
    rope: dict[str, object]
    head_dim: int
    num_kv_heads: int = 2
    more: dict[str, object] = field(default_factory=dict)  # what only this family's configuration has


EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.0,
}


LATENT = {  # compressed queries and keys, grouped routing with a bias, a shared expert, a dense first layer
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
}
FAMILIES = {
    "qwen2": TinyFamily(transformers.Qwen2Config, transformers.Qwen2ForCausalLM, True, 251, DEFAULT_ROPE, 16),
    "qwen3": TinyFamily(transformers.Qwen3Config, transformers.Qwen3ForCausalLM, False, 250, DEFAULT_ROPE, 32),
    "llama": TinyFamily(transformers.LlamaConfig, transformers.LlamaForCausalLM, False, 251, LLAMA3_ROPE, 16, 4),
    "qwen3_moe": TinyFamily(
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        False,
        250,
        DEFAULT_ROPE,
        32,
        more=EXPERTS,
    ),
    "deepseek_v3": TinyFamily(
        transformers.DeepseekV3Config,
        transformers.DeepseekV3ForCausalLM,
        False,
        250,
        DEFAULT_ROPE,
        8,
        4,
        more=LATENT,
    ),
}


def make(family: str, num_layers: int = 4, seed: int = 0) -> transformers.PreTrainedModel:
    """A float32 model, the same for the same arguments in every process."""
    row = FAMILIES[family]
    torch.manual_seed(seed)
    config = row.config_class(
        hidden_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=row.num_kv_heads,
        head_dim=row.head_dim,
        intermediate_size=96,
        vocab_size=row.vocab_size,
        max_position_embeddings=512,
        tie_word_embeddings=row.tied,
        rms_norm_eps=1e-6,
        rope_parameters=row.rope,
        **row.more,
    )
    model = row.model_class(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(4.0)  # logits of order 1, so that an error of 1e-4 in them is a small one
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.1 * torch.randn_like(buffer))
    return model.eval()
