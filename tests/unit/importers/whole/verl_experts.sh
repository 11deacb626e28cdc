#!/usr/bin/env bash
# A model with experts on Megatron, started through uv; the shape of a current launcher of verl, in words of our own.
set -xeuo pipefail
ENGINE=${ENGINE:-sglang}
NODES=${NODES:-2}
PER_NODE=${PER_NODE:-8}
prompt=$((1024 * 2))
response=$((1024 * 4))
tp=4
name=experts_${ENGINE}_$(date +%m%d)
DATA=(
    data.train_files="${HOME}/data/dapo-math/train.parquet"
    data.val_files="['${HOME}/data/aime/test.parquet']"
    data.train_batch_size=256
    data.max_prompt_length=${prompt}
    data.max_response_length=${response}
    data.filter_overlong_prompts=True
    data.truncation='left'
)
ACTOR=(
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$(((prompt + response) * 2))
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=${tp}
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=8
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1
    actor_rollout_ref.actor.megatron.param_offload=True
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_aux_loss_coeff=0.01
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_z_loss_coeff=0.001
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_permute_fusion=True
    actor_rollout_ref.actor.optim.lr=1e-6
    +actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True
    +actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_offload_fraction=1
)
LAUNCH=(uv run --frozen --all-packages --extra megatron python)
"${LAUNCH[@]}" -m verl.trainer.main_ppo \
    --config-name=ppo_megatron_trainer.yaml \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B \
    actor_rollout_ref.rollout.name=$ENGINE \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=$tp \
    actor_rollout_ref.rollout.expert_parallel_size=$tp \
    reward_model.reward_manager=dapo \
    trainer.experiment_name="$name" \
    trainer.nnodes=$NODES trainer.n_gpus_per_node=$PER_NODE \
    "${DATA[@]}" "${ACTOR[@]}" "$@"
