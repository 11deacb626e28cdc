"""The configuration as typed dataclasses: each key, its default, its meaning; parts are in ``learning`` and ``device``.

A key that takes one of a few words has a ``Literal`` type, which is the only list of them: the loader and ``validate``
read it, and a test holds every table that is looked up by such a word against it. ``null`` is ``None`` in YAML. Within
a section the keys that most runs set come first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from omegaconf import MISSING

from mega_rl.config.schema.device import (
    Kernels as Kernels,
    Layers as Layers,
    MindSpeedConfig as MindSpeedConfig,
    PlatformConfig as PlatformConfig,
)
from mega_rl.config.schema.learning import (
    AdapterConfig as AdapterConfig,
    CriticConfig as CriticConfig,
    EnvironmentConfig as EnvironmentConfig,
    KtoConfig as KtoConfig,
    PreferenceConfig as PreferenceConfig,
    RewardModelConfig as RewardModelConfig,
    RouterConfig as RouterConfig,
    TuningConfig as TuningConfig,
    VisionConfig as VisionConfig,
)

Dtype = Literal["float32", "bfloat16"]
ContextMethod = Literal["gather", "ulysses"]
# What a norm is in the model, whatever its Hugging Face name; bridge/outgoing/noise.py explains each.
NormRole = Literal[
    "input_layernorm", "post_attention_layernorm", "router_norm", "q_norm", "k_norm", "latent_norm", "output_norm",
    "final_layernorm",
]  # fmt: skip
OffloadPart = Literal["weights", "gradients", "optimizer"]
# Advantages that compare the samples of one prompt with each other, so that rollout.n must be at least 2.
GroupBaseline = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"]
CRITIC_ADVANTAGE = "gae"  # the one that a critic's values make
# What is built in; a user's own function is the other choice (docs/algorithms.md).
Advantage = Literal[GroupBaseline, "reinforce_pp", "gae"]
Objective = Literal["ppo", "gspo", "cispo"]
TOKENS_PER_MICROBATCH = 16384

# The share of a device's memory that vLLM may take while the trainer lives on the same device, unless
# rollout.vllm.gpu_memory_utilization says otherwise.
COLOCATED_MEMORY_SHARE = 0.4


@dataclass
class ModelConfig:
    """The policy; the reference model is the policy as it was before training."""

    path: str = MISSING  # Hugging Face directory, or the id of a model in the local cache of Hugging Face or ModelScope
    dtype: Dtype = "bfloat16"  # what the trainer computes in; the optimizer's master weights are float32
    vision: VisionConfig = field(default_factory=VisionConfig)


@dataclass
class DataConfig:
    """Which files are read, how long their rows may be, and how a batch is drawn."""

    train_files: list[str] = field(default_factory=list)  # .jsonl, .json or .parquet; one file needs no list
    val_files: list[str] = field(default_factory=list)  # held-out data in the same formats; []: no validation
    max_prompt_length: int = 512  # tokens
    max_response_length: int = 1024  # tokens
    max_pixels: int = 1_003_520  # of a picture; a larger one is made smaller (at 28 x 28 a token, 1,280 tokens)
    max_images: int = 16  # pictures of a row
    train_batch_size: int = 128  # per step: prompts (rl), conversations (sft), texts (pt), pairs (dpo), answers (kto)
    filter_overlong_prompts: bool = True  # leave out prompts over max_prompt_length; false: such a prompt is an error
    shuffle: bool = True  # a new order in every epoch; false: the order of the files
    seed: int = 0  # seed of the order of the training data
    chat_template: Literal["auto", "always", "never"] = "auto"  # auto: apply the tokenizer's, if it has one
    system_prompt: str | None = None  # system message of prompts that have none; null: leave them as they are
    # sft: parts of a response that are not learnt from, as pairs of marks such as [["<interpreter>", "</interpreter>"]]
    mask_spans: list[list[str]] = field(default_factory=list)
    # sft: what becomes of a conversation whose earlier turns the chat template rewrites (thoughts). refuse: an error |
    # split: such a turn begins a row of its own, in the context that the template gives it | keep: earlier turns stay
    # as they were written
    rewritten_history: Literal["refuse", "split", "keep"] = "refuse"
    max_val_samples: int | None = None  # use only this many rows of the validation data, from its start; null: all


@dataclass
class RolloutConfig:
    """How vLLM samples the responses that are trained on."""

    n: int = 8  # responses sampled per prompt (the size of a group)
    temperature: float = 1.0  # temperature of sampling; the trainer divides its logits by it too
    tensor_parallel_size: int = 1  # processes that share one engine's weights; colocated: consecutive trainer ranks
    dtype: Dtype | None = None  # dtype of the engine's weights and activations; null: as model.dtype
    placement: Literal["colocated", "separate"] = "colocated"  # engines in the trainer's processes, or in others (Ray)
    num_engines: int = 1  # placement separate only; colocated engines are as many as the ranks allow
    # synchronous: sampling and training take turns | pinned: engines sample while the trainer trains, a step with the
    # weights of exactly max_staleness steps before, so that nothing depends on the engines' speed, number or death |
    # in_flight: engines take new weights while they sample (docs/asynchronous.md); the last two need placement separate
    mode: Literal["synchronous", "pinned", "in_flight"] = "synchronous"
    max_staleness: int = 0  # steps that weights may be older than the step that learns from what they sampled
    # synchronous only: a step begins this x data.train_batch_size prompts and ends when enough of their groups have;
    # responses that have not ended go on in the next step, from the tokens that they have; 1: a step waits for all
    oversample: float = 1.0
    # in_flight only: keys and values of a response under way when new weights come. recompute: by the new weights |
    # keep: as they are, cheaper, and of no weights in particular; later responses share none (docs/asynchronous.md)
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    # pinned and in_flight only: an engine with work in hand that makes no step for so many seconds is ended and started
    # again, as one that has died
    engine_timeout_s: float = 600.0
    engine_restarts: int = 3  # of one engine, pinned and in_flight only; then the run goes on without it
    # pinned and in_flight, on a Ray cluster of your own (RAY_ADDRESS): engines of a trainer that was killed wait for so
    # many seconds for the run to be started again, which goes on with them; then they end
    engine_lease_s: float = 600.0
    stop: list[str] = field(default_factory=list)  # strings that end a response, besides the end-of-sequence token
    stop_token_ids: list[int] = field(default_factory=list)  # tokens that end a response
    ignore_eos: bool = False  # go on sampling after the end-of-sequence token
    # request: each response has a seed of its own and is the same in every batch and layout | engine: the engine draws
    # for all responses of a batch at once, which is faster with vLLM below 0.32 and on Ascend
    seeds: Literal["request", "engine"] = "request"
    # live: write new weights into the engine's parameters in place | reload: send whole tensors through vLLM's loader |
    # auto: live if every engine parameter can be written in place, else reload
    weight_update: Literal["auto", "live", "reload"] = "auto"
    # Adapters in the engine (tuning.method lora). merged: summed into the weights that are sent | slots: in vLLM's own
    # slots for adapters, and only they are sent | auto: slots for dense models on an accelerator, else merged
    adapter: Literal["auto", "slots", "merged"] = "auto"
    # Sample from linear weights rounded to this 4-bit format; null: off.
    simulated_quantization: Literal["nvfp4", "mxfp4"] | None = None
    # Models with experts only: which experts compute a token in the trainer. rollout: those that the engine chose |
    # recompute: those that the pass computing pi_old chose | off: the trainer's router chooses anew in every pass
    routing_replay: Literal["rollout", "recompute", "off"] = "off"
    replay: str | None = None  # a directory of recorded rollouts to learn from, without an engine; null: sample
    kv_cache_bytes: int = 268435456  # CPU only: bytes of key/value cache per rank
    vllm: dict[str, Any] = field(default_factory=dict)  # more arguments of vllm.LLM, checked against their names


@dataclass
class BridgeConfig:
    """How weights move from the trainer to the engines."""

    bucket_bytes: int = 268435456  # extra memory per rank that a weight sync may take, bytes
    # After every sync, compare hashes of the engine's live weights with the trainer's: of all tensors, or of a sample
    # that comes round to every tensor within 16 syncs. Not possible with rollout.weight_update=reload.
    verify: Literal["off", "sample", "all"] = "off"


@dataclass
class DynamicSamplingConfig:
    """Leave out groups (the samples of one prompt) whose rewards are all equal, and sample other prompts instead."""

    enabled: bool = False  # whether such groups are left out
    oversample: float = 1.0  # a step starts this x data.train_batch_size prompts; surplus groups wait for the next step
    budget: float = 10.0  # a step draws at most this x data.train_batch_size prompts, then learns from what it has
    metric: str | None = None  # the reward (by name) that must differ within a group; null: the weighted sum of all


@dataclass
class AlgorithmConfig:
    """The objective; ``docs/algorithms.md`` has the formulas. The defaults are GRPO's."""

    # A preset: it sets those of the following keys that the configuration does not give. See config/algorithm.py.
    name: Literal[
        "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "dapo", "gspo", "cispo", "ppo"
    ] = "grpo"  # fmt: skip
    # how rewards become advantages; gae trains a critic, see ``critic``
    advantage: str = "grpo"
    # What an advantage is of (docs/episodes.md). episode: of a whole response | turn: of each turn of an episode, by
    # what was rewarded from it on, compared with the same turn of the group's others; with an environment only
    credit: Literal["episode", "turn"] = "episode"
    turn_discount: float = 1.0  # credit turn only: what a reward counts for the turn before its own, per turn
    objective: str = "ppo"  # the loss per token; gspo takes one ratio for a whole response
    # How the losses of all tokens become one number: the mean over all tokens, over the means of the sequences, or over
    # the sums of the sequences, which are then divided by data.max_response_length.
    loss_reduction: Literal["token_mean", "sequence_mean", "sequence_mean_token_sum_norm"] = "token_mean"
    clip_ratio_low: float = 0.2  # the ratio of new to old probability is clipped at 1 - clip_ratio_low
    clip_ratio_high: float = 0.2  # the ratio of new to old probability is clipped at 1 + clip_ratio_high
    kl_coefficient: float = 0.001  # weight of the KL from the reference model; 0: there is no reference model
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"  # estimator of that KL; k3 is the "low-variance KL"
    kl_in: Literal["loss", "reward"] = "loss"  # the KL is a term of the loss, or a cost that lowers a token's advantage
    entropy_coefficient: float = 0.0  # weight of the entropy bonus
    minibatches_per_step: int = 1  # optimizer steps per rollout batch
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    # Rarely set.
    # The loss of a token whose advantage A is negative is at most -dual_clip * A; null: off.
    dual_clip: float | None = None
    # Largest importance weight. These weights correct for the engine's probabilities, which differ a little from the
    # trainer's; null: no correction.
    importance_cap: float | None = 2.0
    # Weights above the cap are lowered to it (truncate), or the tokens that have them are left out (mask).
    importance_correction: Literal["truncate", "mask"] = "truncate"
    importance_level: Literal["token", "sequence"] = "token"  # weigh each token, or each response by its product
    importance_floor: float = 0.0  # smallest weight that importance_correction=mask keeps


@dataclass
class AqnConfig:
    """Adaptive quantisation noise on the norm weights of the policy that samples (QeRL, arXiv 2510.11696)."""

    enabled: bool = False  # whether the policy that samples gets noise
    sigma_start: float = 0.05  # standard deviation of the noise in the first noisy stage
    sigma_end: float = 0.0005  # standard deviation of the noise in the last stage
    num_stages: int = 10  # the run is cut into this many equal parts, each with one standard deviation
    # How sigma falls from stage to stage. exponential is QeRL's code; _eq8 and _alg1 are two readings of its paper.
    schedule: Literal["exponential", "exponential_eq8", "exponential_alg1", "linear", "cosine", "constant"] = (
        "exponential"
    )
    # Which probabilities pi_old is (docs/aqn.md). decoupled: the trainer's without noise | rollout: the engine's, with
    # noise | recompute_noisy: the trainer's with the same noise | none: as decoupled, but without importance weights
    old_logprobs: Literal["decoupled", "rollout", "recompute_noisy", "none"] = "decoupled"
    # Rarely set.
    target_modules: list[NormRole] | None = None  # null: the norms before q/k/v and before gate/up; []: every norm
    # Hugging Face names without noise: shell patterns of whole names, and words without *, ? and [ are parts of a name.
    exclude_patterns: list[str] = field(default_factory=list)
    include_router_norms: bool = False  # also the norms that feed a mixture-of-experts router
    seed: int = 1234  # seed of the noise
    rounding: Literal["nearest", "stochastic", "fp32"] = "nearest"  # of noisy weights to the engine's dtype; fp32: none


@dataclass
class RewardConfig:
    """One entry of the list ``rewards``; the reward of a sample is the weighted sum of all entries."""

    name: str = MISSING  # a built-in reward, or "package.module:function", or "path/to/file.py:function"
    weight: float = 1.0  # factor of this reward in the sum of all
    options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the reward


@dataclass
class RewardWorkersConfig:
    """The processes that rewards run in; all ranks of a node share them."""

    num_workers: int | None = None  # processes per node; null: two for each of its ranks
    timeout_s: float = 30.0  # limit for one reward of one sample; past it the sample's reward is unknown
    memory_bytes: int = 4294967296  # data memory that one worker may take


@dataclass
class OptimizerConfig:
    """AdamW and its learning rate."""

    lr: float = 1e-6  # largest learning rate
    min_lr: float = 0.0  # learning rate at the end of cosine, linear and wsd
    # How the learning rate goes on after the warm-up; wsd: constant, then down within decay_steps, which it needs.
    schedule: Literal["constant", "cosine", "linear", "wsd"] = "constant"
    warmup_steps: int = 0  # optimizer steps in which the learning rate rises from 0 to lr
    decay_steps: int | None = None  # wsd only: the last optimizer steps of the run, over which lr falls to min_lr
    weight_decay: float = 0.01  # AdamW's weight decay; norms and biases have none
    clip_grad: float = 1.0  # largest global gradient norm; 0: off
    # Rarely set.
    beta1: float = 0.9  # decay of Adam's mean of gradients
    beta2: float = 0.95  # decay of Adam's mean of squared gradients
    eps: float = 1e-8  # Adam's epsilon


@dataclass
class ParallelConfig:
    """The trainer's layout, one key per axis; data parallelism is what the world size leaves."""

    tensor: int = 1  # ranks that share every layer's weights
    pipeline: int = 1  # ranks that each hold some of the layers
    virtual_pipeline: int | None = None  # interleaved pipeline: model chunks per rank; null: off
    context: int = 1  # ranks that share the tokens of every sequence
    # What these ranks exchange in attention (docs/context.md). gather: each gets all keys and values | ulysses: each
    # gets all tokens of some heads, which it must be possible to divide
    context_method: ContextMethod = "gather"
    expert: int = 1  # ranks that divide the experts of a layer among them
    expert_tensor: int | None = None  # ranks that share the weights of one expert; null: as tensor
    sequence: bool = False  # sequence parallelism: tensor-parallel ranks share the tokens outside of attention and MLP
    # sum gradients over data-parallel ranks while the backward pass still runs; null: on accelerators, if all weights
    # are trained
    overlap_grad_reduce: bool | None = None
    # collect updated weights while the next forward pass already runs; null: on accelerators, if gradient sums overlap
    # and, in stage rl, a step has several minibatches; in stage kto not
    overlap_param_gather: bool | None = None


@dataclass
class MemoryConfig:
    """What the trainer gives up to need less device memory; only optimizer_state_dtype changes a result."""

    # Activations that are dropped and computed again in the backward pass: those of some modules (selective) or of
    # whole layers (full). auto: the least that leaves a tenth of the device's memory free by the plan
    recompute: Literal["none", "selective", "full", "auto"] = "none"
    # selective only; what can be computed again by itself in a decoder layer (Megatron's layernorm and moe_act need
    # TransformerEngine); null: mlp and moe, as far as the model has them
    recompute_modules: list[Literal["core_attn", "mlp", "moe", "shared_experts"]] | None = None
    recompute_num_layers: int | None = None  # full only: the first so many layers of every pipeline stage; null: all
    # What the trainer moves to host memory while a colocated engine samples; in the other stages optimizer alone, and
    # whenever no update runs.
    offload: list[OffloadPart] = field(default_factory=list)
    optimizer_on_host: bool = False  # keep AdamW's state on the host; an update passes it through the device in pieces
    optimizer_state_dtype: Dtype = "float32"  # dtype of Adam's two moments; bfloat16 changes results a little


@dataclass
class GatesConfig:
    """Checks of a step before its weights change; a run stops with a report if one fails; in nats.

    In the first step policy, reference and engine have the same weights, so their log-probabilities must agree. After a
    resume all but the reference are checked again, in all other steps only the engine. The limits ``reference``,
    ``ppo_kl`` and ``ratio`` are, if ``null``, 0 on a CPU and with ``platform.deterministic``, else 1e-3 in float32 and
    0.5 in bfloat16.
    """

    # Gates that are measured and reported but do not stop the run.
    disabled: list[Literal["reference", "ppo_kl", "ratio", "engine"]] = field(default_factory=list)
    reference: float | None = None  # largest |policy - reference| of a token
    ppo_kl: float | None = None  # largest |pi_old - policy| of a token: the same weights, computed twice
    ratio: float | None = None  # largest distance from 1 of the mean and of the largest probability ratio; no unit
    engine: float | None = None  # mean |trainer - engine|; null: 1e-4 if both compute in float32, else 5e-2
    engine_factor: float = 4.0  # after the first step the limit is at least this many times what the last steps showed


@dataclass
class ProfileConfig:
    """Which steps are recorded, as traces with a table of the costliest operators; docs/profile.md."""

    steps: list[int] = field(default_factory=list)  # numbers of steps, from 1; the first two are seldom typical
    ranks: list[int] = field(default_factory=lambda: [0])  # numbers of the ranks that record them


@dataclass
class TrainerConfig:
    """What is run, how long, and where it writes."""

    # rl: reinforcement learning | pt: continued pre-training on plain text | sft: supervised fine-tuning |
    # rm: a reward model, on pairs of answers | dpo: DPO and its family, on such pairs | kto: KTO, on judged answers
    stage: Literal["rl", "pt", "sft", "rm", "dpo", "kto"] = "rl"
    output_dir: str = "runs/default"  # all that a run writes; started again with the same one, a run resumes
    total_steps: int | None = None  # length of the run in steps; give this or total_epochs
    total_epochs: int | None = None  # length in epochs, without what dynamic sampling draws besides; or total_steps
    seed: int = 0  # seed of the model's initialisation and of sampling
    # tokens of one forward pass, all its sequences together; null: the default, or less if the plan has no room for it
    max_tokens_per_microbatch: int | None = TOKENS_PER_MICROBATCH
    # Rarely set.
    collective_timeout_s: float = 1800.0  # a rank that waits longer than this for another one ends the run
    # A run ends, and names the rank, when a rank gives no sign of life or no rank makes progress for this long. The
    # limit is at most 0.9 x collective_timeout_s, and exactly that while models and engines are being built.
    stall_timeout_s: float = 600.0
    max_skipped_steps: int = 5  # a run ends after so many optimizer steps in a row without finite gradients; 0: never
    logprob_chunk_tokens: int = 1024  # tokens per chunk when computing log-probabilities; bounds the float32 logits
    gates: GatesConfig = field(default_factory=GatesConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    # More fields of Megatron-core's TransformerConfig; config/megatron_fields.py says which, and why not the others.
    megatron: dict[str, Any] = field(default_factory=dict)


@dataclass
class CheckpointConfig:
    """When the state of a run is written, and where a run begins."""

    save_freq: int | None = -1  # steps between checkpoints, and one at the end; -1: only at the end; null: never
    keep_checkpoints: int = 3  # the newest ones are kept, older ones deleted; 0: keep all
    async_save: bool = False  # write checkpoints in the background; takes host memory for a copy of the state
    # Steps between copies of the state in the memory of the nodes; 0: none. A run that torchrun --max-restarts starts
    # again goes on from them. Takes host memory for two copies of the state; with many nodes, four.
    local: int = 0
    resume: str = "auto"  # auto: from the newest complete checkpoint under output_dir | never | a checkpoint directory
    # After SIGTERM or SIGUSR1 a run saves at the end of its step and stops; a step that takes longer than so many
    # seconds is not waited for. torchrun kills after 30 s (--shutdown-timeout). 0: the signals end the run at once.
    grace_s: float = 25.0
    export_hf: bool = True  # at the end, write the weights as a Hugging Face directory too


@dataclass
class ValidationConfig:
    """When held-out data is looked at, and how it is sampled; training samples with the keys of ``rollout``."""

    test_freq: int = -1  # steps between validations; -1: only at the end
    val_before_train: bool = True  # also before the first step: where the run begins
    n: int = 1  # samples per prompt for the metrics over samples; 0: only the greedy response
    temperature: float = 1.0  # temperature of the samples of validation


@dataclass
class LoggingConfig:
    """What a run shows and records."""

    progress: bool = True  # progress bar, if the console is a terminal
    tensorboard: bool = True  # event files in output_dir
    jsonl: bool = True  # metrics.jsonl in output_dir
    wandb_project: str | None = None  # null: off
    swanlab_project: str | None = None  # null: off
    num_text_samples: int = 4  # completions shown per step and per validation
    dump_rollouts: int = 0  # keep rollouts/step_N.jsonl of this many newest steps; -1: of all steps; 0: of none


@dataclass
class RunConfig:
    """All sections. Only stage rl reads rollout, environment, algorithm, critic, aqn, rewards, reward_workers."""

    model: ModelConfig = field(default_factory=ModelConfig)
    tuning: TuningConfig = field(default_factory=TuningConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    bridge: BridgeConfig = field(default_factory=BridgeConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    kto: KtoConfig = field(default_factory=KtoConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
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
