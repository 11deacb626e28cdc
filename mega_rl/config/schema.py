"""The whole configuration as typed dataclasses: every key, its default and its meaning stand here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class ModelConfig:
    """The policy; the reference model is a frozen copy of its starting weights."""

    path: str = MISSING  # Hugging Face directory: config.json, tokenizer, safetensors
    dtype: str = "bfloat16"  # float32 | bfloat16: what the trainer computes in (master weights are float32)


@dataclass
class DataConfig:
    train_files: list[str] = field(default_factory=list)  # .jsonl or .parquet
    val_files: list[str] = field(default_factory=list)
    max_prompt_length: int = 512  # tokens
    max_response_length: int = 1024  # tokens
    train_batch_size: int = 128  # prompts (rl) or conversations (sft) per step
    filter_overlong_prompts: bool = True  # false: an overlong prompt is an error
    shuffle: bool = True
    seed: int = 0  # of the order of the training data
    chat_template: str = "auto"  # auto: apply where the tokenizer has one | always | never
    system_prompt: str | None = None
    max_val_samples: int | None = None  # the first rows of the validation set


@dataclass
class RolloutConfig:
    placement: str = "colocated"  # colocated: in the trainer's processes | separate: in others, started through Ray
    num_engines: int = 1  # separate only
    tensor_parallel_size: int = 1  # consecutive ranks form one engine; separate: processes of one engine
    dtype: str | None = None  # null: as the model
    n: int = 8  # samples per prompt
    temperature: float = 1.0
    top_p: float = 1.0  # these three cut the distribution, which the trainer does not follow: 1, -1, 0 are accepted
    top_k: int = -1
    min_p: float = 0.0
    stop: list[str] = field(default_factory=list)  # strings that end a response, besides the end-of-sequence token
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    simulated_quantization: str | None = None  # nvfp4 | mxfp4: what four bits leave of the linear weights; null: off
    # live: written in place into the engine's parameters | reload: through its loader | auto: live where it can be
    weight_update: str = "auto"
    replay: str | None = None  # directory of recorded rollouts that stand in for the engine; null: sample
    kv_cache_bytes: int = 268435456  # CPU engine only: KV memory per rank, bytes
    vllm: dict[str, Any] = field(default_factory=dict)  # passed to vllm.LLM, checked against its argument names


@dataclass
class BridgeConfig:
    """How weights move from the trainer to the engines."""

    bucket_bytes: int = 268435456  # extra memory per rank that a sync may take, bytes
    # After every sync compare hashes of the live engine weights with the trainer's, not with weight_update=reload:
    # off | sample: a part of the tensors, every one of them within 16 syncs | all
    verify: str = "off"


@dataclass
class DynamicSamplingConfig:
    """Groups whose samples all have one reward teach nothing: replace them while others are still being sampled."""

    enabled: bool = False
    oversample: float = 1.0  # prompts that a step starts with, times data.train_batch_size; what is too much is carried
    budget: float = 10.0  # prompts that a step may draw, times data.train_batch_size; then it learns from what there is
    metric: str | None = None  # the part of the reward that must differ within a group; null: the whole reward


@dataclass
class AlgorithmConfig:
    """The objective; ``docs/algorithms.md`` has the formulas. The defaults are GRPO's."""

    name: str = "grpo"  # sets the keys that are not given: see PRESETS in config/algorithm.py
    advantage: str = "grpo"  # grpo | dr_grpo | rloo | reinforce_pp | reinforce_pp_baseline
    objective: str = "ppo"  # ppo | gspo | cispo
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    dual_clip: float | None = None  # c of the dual clip, > 1; null: off
    loss_reduction: str = "token_mean"  # token_mean | sequence_mean | sequence_mean_token_sum_norm
    kl_coefficient: float = 0.001  # 0 needs no reference model
    kl_estimator: str = "k3"  # k1 | k2 | k3 (k3 is the "low-variance KL")
    kl_in: str = "loss"  # loss | reward: a term of the loss, or a cost of each token that its advantage carries
    entropy_coefficient: float = 0.0
    importance_cap: float | None = 2.0  # largest weight against the engine's log-probabilities; null: no correction
    importance_correction: str = "truncate"  # truncate (weights above the cap) | mask (weights outside the bounds)
    importance_level: str = "token"  # token | sequence: the ratio of one token, or the product over the response
    importance_floor: float = 0.0  # mask: smallest weight that is kept
    minibatches_per_step: int = 1  # optimizer steps per rollout batch
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)


@dataclass
class AqnConfig:
    """Adaptive quantisation noise on the rollout policy's norm weights (QeRL, arXiv 2510.11696)."""

    enabled: bool = False
    sigma_start: float = 0.05
    sigma_end: float = 0.0005
    num_stages: int = 10
    schedule: str = "exponential"  # exponential | exponential_eq8 | exponential_alg1 | linear | cosine | constant
    target_modules: list[str] | None = None  # null: the norms before q/k/v and before gate/up; []: every norm
    exclude_patterns: list[str] = field(default_factory=list)
    include_router_norms: bool = False
    seed: int = 1234
    rounding: str = "nearest"  # nearest | stochastic | fp32
    old_logprobs: str = "decoupled"  # decoupled | rollout | recompute_noisy | none


@dataclass
class RewardConfig:
    name: str = MISSING  # a built-in reward, or "package.module:function", or "path/to/file.py:function"
    weight: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class RewardWorkersConfig:
    """The processes, per rank, that rewards run in."""

    num_workers: int = 2
    timeout_s: float = 30.0  # of one reward on one sample; past it the sample is unknown
    memory_bytes: int = 4294967296  # data memory of one worker


@dataclass
class OptimizerConfig:
    lr: float = 1e-6
    min_lr: float = 0.0
    schedule: str = "constant"  # constant | cosine | linear | wsd, after the warm-up
    warmup_steps: int = 0  # optimizer steps
    decay_steps: int | None = None  # wsd: the last optimizer steps, over which lr falls to min_lr
    weight_decay: float = 0.01  # not on norms and biases
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_grad: float = 1.0  # global gradient norm; 0: off


@dataclass
class ParallelConfig:
    """The trainer's layout, one key per axis; data parallelism is what the world size leaves."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None  # interleaved pipeline: model chunks per rank; null: off
    context: int = 1  # ranks that share the tokens of every sequence
    expert: int = 1  # ranks that share out the experts of a layer
    expert_tensor: int | None = None  # ranks that share one expert; null: as tensor
    sequence: bool = False  # sequence parallelism over the tensor-parallel ranks
    overlap_grad_reduce: bool = False  # gradients are summed over data-parallel ranks while the backward pass runs
    overlap_param_gather: bool = False  # updated weights are collected while the next forward pass runs


@dataclass
class MemoryConfig:
    """What the trainer gives up to need less device memory; nothing here changes a result."""

    recompute: str = "none"  # none | selective (modules) | full (layers): activations computed again in the backward
    recompute_modules: list[str] | None = None  # selective: core_attn, mlp, moe, ...; null: mlp, or moe where it is one
    recompute_num_layers: int | None = None  # full: of every pipeline stage, the first ones; null: all
    offload: list[str] = field(default_factory=list)  # while the engine samples: weights, gradients, optimizer
    optimizer_on_host: bool = False  # AdamW itself and its state on the host (needs TransformerEngine)
    optimizer_state_dtype: str = "float32"  # float32 | bfloat16 (needs TransformerEngine): of Adam's two moments


@dataclass
class GatesConfig:
    """What must hold in the first step of a run, or it stops with a report; nats per token."""

    disabled: list[str] = field(default_factory=list)  # reference | ppo_kl | ratio | engine
    reference: float = 0.0  # largest |policy - reference| of a token: they are the same weights
    ppo_kl: float = 0.0  # largest |pi_old - policy| of a token: the same weights, computed twice
    ratio: float = 0.0  # largest distance from 1 of the objective's mean and greatest ratio
    engine: float | None = None  # mean |trainer - engine|; null: 1e-4 where both are float32, else 5e-2


@dataclass
class TrainerConfig:
    stage: str = "rl"  # rl | sft
    output_dir: str = "runs/default"
    total_steps: int | None = None  # one of total_steps and total_epochs
    total_epochs: int | None = None
    seed: int = 0
    max_tokens_per_microbatch: int = 16384
    max_skipped_steps: int = 5  # consecutive optimizer steps without a finite gradient that end the run; 0: never
    logprob_chunk_tokens: int = 1024  # never more float32 logits at a time than this many tokens have
    gates: GatesConfig = field(default_factory=GatesConfig)


@dataclass
class CheckpointConfig:
    save_freq: int = -1  # steps between checkpoints; -1: only at the end
    keep_checkpoints: int = 3  # newest ones kept; 0: all
    async_save: bool = False  # write checkpoints in the background; takes host memory for a copy of the state
    resume: str = "auto"  # auto: newest good checkpoint under output_dir | never | a checkpoint directory
    export_hf: bool = True  # write the final weights as a Hugging Face directory


@dataclass
class ValidationConfig:
    """When held-out data is looked at, and how it is sampled; training samples with the keys of ``rollout``."""

    test_freq: int = -1  # steps between validations; -1: only at the end
    val_before_train: bool = True
    n: int = 1  # samples per prompt for the sampled figures; 0: greedy only
    temperature: float = 1.0


@dataclass
class LoggingConfig:
    progress: bool = True  # progress bar where the console is a terminal
    tensorboard: bool = True
    jsonl: bool = True
    wandb_project: str | None = None  # null: off
    num_text_samples: int = 4  # completions shown per step and per validation
    dump_rollouts: int = 0  # newest steps whose rollouts are kept as rollouts/step_N.jsonl; -1: all; 0: none


@dataclass
class MindSpeedConfig:
    """MindSpeed's patches of Megatron-core; ``npu`` only."""

    # auto: where it is installed | required: the run stops where it is not | off: torch_npu's operators alone
    mode: str = "auto"
    # MindSpeed's own argument names (dashes or underscores) and values, checked against the installed MindSpeed
    features: dict[str, Any] = field(default_factory=dict)


@dataclass
class PlatformConfig:
    name: str = "auto"  # auto | cpu | cuda | npu; the variable MEGA_RL_PLATFORM stands in for auto
    num_threads: int | None = None  # CPU threads per rank; null: cores / ranks on this host
    deterministic: bool = False  # the same run on the same devices gives the same bits; slower
    mindspeed: MindSpeedConfig = field(default_factory=MindSpeedConfig)


@dataclass
class RunConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    bridge: BridgeConfig = field(default_factory=BridgeConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    aqn: AqnConfig = field(default_factory=AqnConfig)
    rewards: list[RewardConfig] = field(default_factory=list)
    reward_workers: RewardWorkersConfig = field(default_factory=RewardWorkersConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    platform: PlatformConfig = field(default_factory=PlatformConfig)
