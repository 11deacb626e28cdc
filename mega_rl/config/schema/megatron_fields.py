"""The fields of Megatron-core 0.16's TransformerConfig and MLATransformerConfig: which ``trainer.megatron`` may set.

The trainer sets most of them itself, from keys of ours or because it depends on the value. They are listed here by why
they cannot be set, so that a configuration is checked without importing Megatron; a contract test holds the lists
against the installed Megatron-core.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from mega_rl.errors import shown

# What may be set: the field and its type. None of them changes what the model computes, but for rounding.
FREE: dict[str, type] = {
    "batch_p2p_sync": bool,
    "clone_scatter_output_in_embedding": bool,
    "disable_bf16_reduced_precision_matmul": bool,
    "distribute_saved_activations": bool,
    "gradient_accumulation_fusion": bool,
    "microbatch_group_size_per_vp_stage": int,
    "moe_shared_expert_overlap": bool,
    "num_microbatches_with_partial_activation_checkpoints": int,
    "overlap_p2p_comm_warmup_flush": bool,
}

# What a key of ours sets: field -> that key.
KEYS: dict[str, str] = {
    "tensor_model_parallel_size": "parallel.tensor",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "virtual_pipeline_model_parallel_size": "parallel.virtual_pipeline",
    "context_parallel_size": "parallel.context",
    "expert_model_parallel_size": "parallel.expert",
    "expert_tensor_parallel_size": "parallel.expert_tensor",
    "moe_extended_tp": "parallel.expert_tensor",
    "sequence_parallel": "parallel.sequence",
    "overlap_p2p_comm": "parallel.virtual_pipeline",
    "batch_p2p_comm": "parallel.virtual_pipeline",
    "params_dtype": "model.dtype",
    "pipeline_dtype": "model.dtype",
    "autocast_dtype": "model.dtype",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "enable_autocast": "model.dtype",
    "deterministic_mode": "platform.deterministic",
    "recompute_granularity": "memory.recompute",
    "recompute_method": "memory.recompute",
    "recompute_num_layers": "memory.recompute_num_layers",
    "recompute_modules": "memory.recompute_modules",
    "moe_layer_recompute": "memory.recompute_modules",
    "cpu_offloading": "memory.offload",
    "cpu_offloading_num_layers": "memory.offload",
    "cpu_offloading_activations": "memory.offload",
    "cpu_offloading_weights": "memory.offload",
    "cpu_offloading_double_buffering": "memory.offload",
    "fine_grained_activation_offloading": "memory.recompute",
    "offload_modules": "memory.recompute",
    "min_offloaded_tensor_size": "memory.recompute",
    "moe_enable_routing_replay": "rollout.routing_replay",
    "moe_router_load_balancing_type": "router.aux_loss_over",
    "moe_aux_loss_coeff": "router.aux_loss",
    "moe_z_loss_coeff": "router.z_loss",
    "moe_router_bias_update_rate": "router.bias_update_rate",
}

# Why the others cannot be set: the end of a sentence -> fields.
OTHERS: dict[str, str] = {
    "is read from the config.json of model.path: change it there": """
        num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels softmax_scale
        softmax_type layernorm_epsilon layernorm_zero_centered_gamma add_bias_linear add_qkv_bias gated_linear_unit
        activation_func glu_linear_offset activation_func_clamp_value num_moe_experts rotary_interleaved window_size
        window_attn_skip_freq normalization qk_layernorm qk_l2_norm attention_output_gate multi_latent_attention
        no_rope_freq moe_shared_expert_intermediate_size moe_shared_expert_gate moe_layer_freq moe_ffn_hidden_size
        moe_router_topk moe_router_topk_limited_devices moe_router_num_groups moe_router_group_topk
        moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_score_function moe_router_dtype
        moe_router_enable_expert_bias moe_latent_size q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim
        v_head_dim rope_type rotary_base rotary_percent rotary_scaling_factor original_max_position_embeddings
        beta_fast beta_slow mscale mscale_all_dim mrope_section apply_residual_connection_post_layernorm""",
    "would make the trainer compute other probabilities than the engine: leave it out": """
        hidden_dropout attention_dropout fp32_residual_connection apply_query_key_layer_scaling
        attention_softmax_in_fp32 moe_router_force_load_balancing moe_input_jitter_eps moe_token_dropping
        moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy moe_apply_probs_on_input
        qk_clip qk_clip_alpha qk_clip_threshold fp8 fp8_recipe fp8_param
        fp8_quantizer_factory fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad
        fp8_dot_product_attention fp8_multi_head_attention tp_only_amax_red first_last_layers_bf16
        num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 fp4 fp4_recipe fp4_param fp4_quantizer_factory
        quant_recipe""",
    "would add to the objective, which the stage alone defines: leave it out": """
        mtp_num_layers mtp_loss_scaling_factor mtp_standalone""",
    "would part the layers otherwise than the weight sync and checkpoints do: leave it out": """
        num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage pipeline_model_parallel_layout
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split""",
    "needs kernels of TransformerEngine, apex or others that this trainer does not use: leave it out": """
        use_te_rng_tracker tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad
        tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag
        tp_comm_split_rs tp_comm_atomic_rs tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1
        tp_comm_bootstrap_backend overlap_moe_expert_parallel_comm delay_wgrad_compute
        ep_overlap_early_attn_memory_release use_ring_exchange_p2p defer_embedding_wgrad_compute wgrad_deferral_limit
        activation_func_fp8_input_store bias_activation_fusion masked_softmax_fusion persist_layer_norm
        memory_efficient_layer_norm bias_dropout_fusion apply_rope_fusion use_fused_weighted_squared_relu
        fused_single_qkv_rope use_kitchen use_kitchen_attention kitchen_attention_backend
        moe_router_padding_for_quantization moe_router_padding_for_fp8 moe_grouped_gemm moe_use_legacy_grouped_gemm
        moe_enable_deepep moe_flex_dispatcher_backend moe_permute_fusion moe_router_fusion moe_deepep_num_sms
        moe_hybridep_num_sms enable_cuda_graph cuda_graph_use_single_mempool cuda_graph_retain_backward_graph
        cuda_graph_warmup_steps external_cuda_graph cuda_graph_impl cuda_graph_scope disable_parameter_transpose_cache
        use_te_activation_func transformer_impl symmetric_ar_type pipeline_model_parallel_comm_backend""",
    "is set by the trainer, which depends on its value: leave it out": """
        perform_initialization use_cpu_initialization calculate_per_token_loss variable_seq_lengths
        deallocate_pipeline_outputs moe_token_dispatcher_type timers finalize_model_grads_func grad_scale_func
        no_sync_func grad_sync_func param_sync_func init_method output_layer_init_method embedding_init_method
        init_model_with_meta_device hetereogenous_dist_checkpoint heterogeneous_block_specs
        hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank hybrid_context_parallel cp_comm_type""",
    "has no effect in this trainer, which has its own attention, head, log and engine: leave it out": """
        async_tensor_model_parallel_allreduce cross_entropy_loss_fusion cross_entropy_fusion_impl
        _cpu_offloading_context barrier_with_L1_time attention_backend log_max_attention_logit test_mode
        experimental_attention_variant dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk
        dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss linear_attention_freq linear_conv_kernel_dim
        linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads init_method_std
        embedding_init_method_std moe_per_layer_logging config_logger_dir flash_decode batch_invariant_mode
        inference_rng_tracker inference_sampling_seed use_inference_optimized_layers inference_fuse_tp_communication
        is_hybrid_model mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path
        mlp_chunks_for_prefill cache_mla_latents""",
}
WHY: dict[str, str] = {name: why for why, names in OTHERS.items() for name in names.split()}


def field_problems(fields: Mapping[str, Any]) -> list[str]:
    """A sentence for every field of ``trainer.megatron`` that is unknown, not free to set, or of another type."""
    return [sentence for name, value in fields.items() if (sentence := _problem(str(name), value))]


def _problem(name: str, value: Any) -> str | None:
    where = f"trainer.megatron.{name}"
    if name in KEYS:
        return f"{where} is set by {KEYS[name]}: give that instead"
    if name in WHY:
        return f"{where} {WHY[name]}"
    if name not in FREE:
        near = difflib.get_close_matches(name, [*FREE, *KEYS, *WHY], n=1, cutoff=0.75)
        guess = f"did you mean {near[0]}?" if near else f"those that can be set are {', '.join(FREE)}"
        return f"{where} is no field of Megatron-core's TransformerConfig: {guess}"
    if type(value) is not FREE[name] or (type(value) is int and value < 1):
        wanted = "true or false" if FREE[name] is bool else "a whole number >= 1"
        return f"{where} is {shown(value)}: set it to {wanted}"
    return None
