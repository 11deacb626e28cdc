# Sampling while the trainer trains, on devices of their own.
train_devices=6
sample_devices=2
python -m verl.experimental.fully_async_policy.fully_async_main \
    data.train_files="$HOME/data/gsm8k/train.parquet" data.val_files="$HOME/data/gsm8k/test.parquet" \
    data.train_batch_size=0 data.gen_batch_size=1 data.max_prompt_length=512 data.max_response_length=1024 \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct \
    actor_rollout_ref.hybrid_engine=False \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.fsdp_config.param_offload=True \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.rollout.n=16 actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    async_training.staleness_threshold=0.5 async_training.trigger_parameter_sync_step=4 \
    async_training.require_batches=1 async_training.partial_rollout=True \
    rollout.total_rollout_steps=51200 rollout.nnodes=1 rollout.n_gpus_per_node=$sample_devices \
    trainer.nnodes=1 trainer.n_gpus_per_node=$train_devices trainer.save_freq=-1 trainer.test_freq=10
