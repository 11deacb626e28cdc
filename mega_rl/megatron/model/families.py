"""Model families in Megatron's terms: the fields of its configuration that differ between them."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from mega_rl.models.latent import LatentAttention
from mega_rl.models.mixture import Mixture
from mega_rl.models.shape import ModelShape


def config_class(shape: ModelShape) -> type[TransformerConfig]:
    return MLATransformerConfig if shape.latent else TransformerConfig


def family_settings(shape: ModelShape) -> dict[str, Any]:
    """Fields of Megatron's configuration that only some families set."""
    settings = _mixture_settings(shape.mixture, shape.num_layers) if shape.mixture else {}
    return settings | (_latent_settings(shape.latent) if shape.latent else {})


def _mixture_settings(mixture: Mixture, num_layers: int) -> dict[str, Any]:
    is_grouped = mixture.groups_per_token < mixture.num_groups
    return {
        "num_moe_experts": mixture.num_experts,
        "moe_router_topk": mixture.experts_per_token,
        "moe_ffn_hidden_size": mixture.ffn_size,
        "moe_layer_freq": [int(layer in mixture.layers) for layer in range(num_layers)],
        "moe_shared_expert_intermediate_size": mixture.shared_ffn_size or None,
        "moe_shared_expert_gate": mixture.shared_gate,
        "moe_router_score_function": mixture.scores,
        # Softmax before the choice leaves the weights as they are; softmax after it makes them add up to 1.
        "moe_router_pre_softmax": mixture.scores == "softmax" and not mixture.normalize_weights,
        "moe_router_topk_scaling_factor": None if mixture.weight_scale == 1.0 else mixture.weight_scale,
        "moe_router_num_groups": mixture.num_groups if is_grouped else None,
        "moe_router_group_topk": mixture.groups_per_token if is_grouped else None,
        "moe_router_enable_expert_bias": mixture.score_bias,
        "moe_router_bias_update_rate": 0.0,  # ``balance`` moves it
        # As the engine's: vLLM computes the logits in the model's dtype unless config.json says otherwise.
        "moe_router_dtype": "fp32" if mixture.float32_router else None,
        # ``balance`` has them
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": False,
    }


def _latent_settings(latent: LatentAttention) -> dict[str, Any]:
    return {
        "multi_latent_attention": True,
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.nope_dim,
        "qk_pos_emb_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "qk_layernorm": True,  # of the compressed queries and keys
        "rope_type": "rope",
        # Scaling is refused when the model is read; Megatron's defaults would scale the attention's softmax.
        "rotary_scaling_factor": 1.0,
        "mscale_all_dim": 0.0,
    }
