HERE=$(dirname "$0")
ARGS=(
   --actor.model_name_or_path Qwen/Qwen3-4B
   --reward.remote_url ${HERE}/reward_func.py
   --data.prompt_dataset org/dapo-math
   --data.max_len 4096
   --rollout.batch_size 128
   --rollout.n_samples_per_prompt 8
   --train.batch_size 256
   --algo.advantage.estimator reinforce_baseline
   --algo.dynamic_filtering_enable
   --algo.dynamic_filtering_range 0.0 1.0
   --actor.eps_clip_low_high 0.2 0.27
   --actor.num_nodes 1
   --actor.num_gpus_per_node 8
   --vllm.num_engines 8
   --ds.zero_stage 3
   --train.colocate_all
   --train.async_enable
   --train.partial_rollout_enable
   --ckpt.output_dir ${HERE}/exp/m
)
ray job submit -- python3 -m openrlhf.cli.train_ppo_ray "${ARGS[@]}"
