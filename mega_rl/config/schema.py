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
class SamplingConfig:
    """How validation samples; training samples with the keys of ``rollout`` itself."""

    n: int = 1  # samples per prompt for the sampled figures; 0: greedy only
    temperature: float = 1.0


@dataclass
class RolloutConfig:
    tensor_parallel_size: int = 1  # consecutive ranks form one engine
    dtype: str | None = None  # null: as the model
    n: int = 8  # samples per prompt
    temperature: float = 1.0
    stop: list[str] = field(default_factory=list)  # strings that end a response, besides the end-of-sequence token
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    simulated_quantization: str | None = None  # nvfp4 | mxfp4: what four bits leave of the linear weights; null: off
    weight_update: str = "live"  # live: written in place into the engine's parameters | reload: through its loader
    kv_cache_bytes: int = 268435456  # CPU engine only: KV memory per rank, bytes
    validation: SamplingConfig = field(default_factory=SamplingConfig)
    vllm: dict[str, Any] = field(default_factory=dict)  # passed to vllm.LLM, checked against its argument names


@dataclass
class BridgeConfig:
    """How weights move from the trainer to the engines."""

    bucket_bytes: int = 268435456  # extra memory per rank that a sync may take, bytes
    verify: str = "off"  # off | all: after every sync compare each live engine weight with the trainer's; live only


@dataclass
class AlgorithmConfig:
    name: str = "grpo"
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    dual_clip: float | None = None  # c of the dual clip, > 1; null: off
    loss_reduction: str = "token_mean"  # token_mean | sequence_mean | sequence_mean_token_sum_norm
    kl_coefficient: float = 0.001  # 0 needs no reference model
    kl_estimator: str = "k3"  # k1 | k2 | k3 (k3 is the "low-variance KL")
    entropy_coefficient: float = 0.0
    importance_cap: float | None = 2.0  # truncated importance weights against the engine's log-probabilities; null: off
    minibatches_per_step: int = 1  # optimizer steps per rollout batch


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
class TrainerConfig:
    stage: str = "rl"  # rl | sft
    output_dir: str = "runs/default"
    total_steps: int | None = None  # one of total_steps and total_epochs
    total_epochs: int | None = None
    seed: int = 0
    max_tokens_per_microbatch: int = 16384
    max_skipped_steps: int = 5  # consecutive optimizer steps without a finite gradient that end the run; 0: never
    val_before_train: bool = True
    test_freq: int = -1  # steps between validations; -1: only at the end
    save_freq: int = -1  # steps between checkpoints; -1: only at the end
    keep_checkpoints: int = 3  # newest ones kept; 0: all
    async_save: bool = False  # write checkpoints in the background; takes host memory for a copy of the state
    resume: str = "auto"  # auto: newest good checkpoint under output_dir | never | a checkpoint directory
    export_hf: bool = True  # write the final weights as a Hugging Face directory
    logprob_chunk_tokens: int = 1024  # never more float32 logits at a time than this many tokens have


@dataclass
class LoggingConfig:
    progress: bool = True  # progress bar where the console is a terminal
    tensorboard: bool = True
    jsonl: bool = True
    wandb_project: str | None = None  # null: off
    num_text_samples: int = 4  # completions shown per validation


@dataclass
class PlatformConfig:
    name: str = "auto"  # auto | cpu | cuda | npu; the variable MEGA_RL_PLATFORM stands in for auto
    num_threads: int | None = None  # CPU threads per rank; null: cores / ranks on this host


@dataclass
class RunConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    bridge: BridgeConfig = field(default_factory=BridgeConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    aqn: AqnConfig = field(default_factory=AqnConfig)
    rewards: list[RewardConfig] = field(default_factory=list)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    platform: PlatformConfig = field(default_factory=PlatformConfig)
