# A model that sees, adapters and one response of a prompt.
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=geo3k/train.parquet \
    data.val_files=geo3k/test.parquet data.train_batch_size=512 data.image_key=images \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct actor_rollout_ref.model.lora_rank=64 \
    actor_rollout_ref.model.exclude_modules='.*visual.*' actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    +actor_rollout_ref.rollout.engine_kwargs.vllm.mm_processor_cache_gb=0 \
    +actor_rollout_ref.rollout.engine_kwargs.vllm.max_model_len=4096 \
    trainer.n_gpus_per_node=8 trainer.nnodes=1
