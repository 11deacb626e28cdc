"""The configuration as typed dataclasses: each key, its values, its default, its meaning; parts are in ``sampling``,
``learning`` and ``device``.

The type of a key has its bounds beside it, see ``limits``. A key that takes one of a few words has a ``Literal`` type,
which is the only list of them: the loader and ``validate`` read it, and a test holds every table that is looked up by
such a word against it. ``null`` is ``None`` in YAML. Within a section the keys that most runs set come first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from omegaconf import MISSING

from mega_rl.config.schema.device import Dtype, PlatformConfig
from mega_rl.config.schema.learning import (
    CriticConfig,
    EnvironmentConfig,
    KtoConfig,
    PreferenceConfig,
    RewardModelConfig,
    RouterConfig,
    TuningConfig,
    VisionConfig,
)
from mega_rl.config.schema.limits import (
    MANY,
    Fraction,
    LearningRate,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seed,
    StepInterval,
    Temperature,
    Text,
    Weight,
    above,
    between,
    count_or_share,
    one_of_or_own,
    two_texts,
)
from mega_rl.config.schema.sampling import AqnConfig, BridgeConfig, RewardConfig, RewardWorkersConfig, RolloutConfig

ContextMethod = Literal["gather", "ulysses"]
OffloadPart = Literal["weights", "gradients", "optimizer"]
# Advantages that compare the samples of one prompt with each other, so that rollout.n must be at least 2.
GroupBaseline = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"]
CRITIC_ADVANTAGE = "gae"  # the one that a critic's values make
# What is built in; a user's own function is the other choice (docs/algorithms.md).
Advantage = Literal[GroupBaseline, "reinforce_pp", "gae"]
Objective = Literal["ppo", "gspo", "cispo"]
TOKENS_PER_MICROBATCH = 16384


@dataclass
class ModelConfig:
    """The policy; the reference model is the policy as it was before training."""

    # Hugging Face directory, or the id of a model in the local cache of Hugging Face or ModelScope
    path: Text = MISSING
    dtype: Dtype = "bfloat16"  # what the trainer computes in; the optimizer's master weights are float32
    vision: VisionConfig = field(default_factory=VisionConfig)


@dataclass
class DataConfig:
    """Which files are read, how long their rows may be, and how a batch is drawn."""

    # .jsonl, .json or .parquet; FILE[:N] takes the first N rows of a file; one file needs no list
    train_files: list[str] = field(default_factory=list)
    val_files: list[str] = field(default_factory=list)  # held-out data in the same forms; []: no validation
    max_prompt_length: PositiveInt = 512  # tokens
    max_response_length: PositiveInt = 1024  # tokens
    max_pixels: PositiveInt = 1_003_520  # of a picture; a larger one is made smaller (at 28 x 28 a token, 1,280 tokens)
    max_images: Annotated[int, between(1, 1024)] = 16  # pictures of a row
    # per step: prompts (rl), conversations (sft), texts (pt), pairs (dpo), answers (kto)
    train_batch_size: Annotated[int, between(1, 1 << 18)] = 128
    filter_overlong_prompts: bool = True  # leave out prompts over max_prompt_length; false: such a prompt is an error
    shuffle: bool = True  # a new order in every epoch; false: the order of the files
    seed: Seed = 0  # seed of the order of the training data
    chat_template: Literal["auto", "always", "never"] = "auto"  # auto: apply the tokenizer's, if it has one
    system_prompt: str | None = None  # system message of prompts that have none; null: leave them as they are
    # sft: parts of a response that are not learnt from, as pairs of marks such as [["<interpreter>", "</interpreter>"]]
    mask_spans: list[Annotated[list[str], two_texts()]] = field(default_factory=list)
    # sft: what becomes of a conversation whose earlier turns the chat template rewrites (thoughts). refuse: an error |
    # split: such a turn begins a row of its own, in the context that the template gives it | keep: earlier turns stay
    # as they were written
    rewritten_history: Literal["refuse", "split", "keep"] = "refuse"
    # use only this many rows of the validation data, all of its files together, from its start; null: all
    max_val_samples: PositiveInt | None = None


@dataclass
class DynamicSamplingConfig:
    """Leave out groups (the samples of one prompt) whose rewards are all equal, and sample other prompts instead."""

    enabled: bool = False  # whether such groups are left out
    # a step starts this x data.train_batch_size prompts; surplus groups wait for the next step
    oversample: Annotated[float, between(1, 1000)] = 1.0
    # a step draws at most this x data.train_batch_size prompts, then learns from what it has
    budget: Annotated[float, between(1, MANY)] = 10.0
    # the reward (by name) that must differ within a group; null, or where a row has no such reward: the weighted sum
    metric: Text | None = None


@dataclass
class AlgorithmConfig:
    """The objective; ``docs/algorithms.md`` has the formulas. The defaults are GRPO's."""

    # A preset: it sets those of the following keys that the configuration does not give. See
    # config/checks/algorithm.py.
    name: Literal[
        "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "dapo", "gspo", "cispo", "ppo"
    ] = "grpo"  # fmt: skip
    # how rewards become advantages; gae trains a critic, see ``critic``
    advantage: Annotated[str, one_of_or_own(Advantage)] = "grpo"
    # What an advantage is of (docs/episodes.md). episode: of a whole response | turn: of each turn of an episode, by
    # what was rewarded from it on, compared with the same turn of the group's others; with an environment only
    credit: Literal["episode", "turn"] = "episode"
    # credit turn only: what a reward counts for the turn before its own, per turn
    turn_discount: Annotated[float, above(0, 1)] = 1.0
    # the loss per token; gspo takes one ratio for a whole response
    objective: Annotated[str, one_of_or_own(Objective)] = "ppo"
    # How the losses of all tokens become one number: the mean over all tokens, over the means of the sequences, or over
    # the sums of the sequences, which are then divided by data.max_response_length.
    loss_reduction: Literal["token_mean", "sequence_mean", "sequence_mean_token_sum_norm"] = "token_mean"
    # the ratio of new to old probability is clipped at 1 - clip_ratio_low
    clip_ratio_low: Annotated[float, above(0, 1)] = 0.2
    clip_ratio_high: PositiveFloat = 0.2  # the ratio of new to old probability is clipped at 1 + clip_ratio_high
    kl_coefficient: Weight = 0.001  # weight of the KL from the reference model; 0: there is no reference model
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"  # estimator of that KL; k3 is the "low-variance KL"
    kl_in: Literal["loss", "reward"] = "loss"  # the KL is a term of the loss, or a cost that lowers a token's advantage
    entropy_coefficient: Annotated[float, between(-1, 1)] = 0.0  # weight of the entropy bonus
    minibatches_per_step: PositiveInt = 1  # optimizer steps per rollout batch
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    # Rarely set.
    # The loss of a token whose advantage A is negative is at most -dual_clip * A; null: off.
    dual_clip: Annotated[float, above(1)] | None = None
    # Largest importance weight. These weights correct for the engine's probabilities, which differ a little from the
    # trainer's; null: no correction.
    importance_cap: PositiveFloat | None = 2.0
    # Weights above the cap are lowered to it (truncate), or the tokens that have them are left out (mask).
    importance_correction: Literal["truncate", "mask"] = "truncate"
    importance_level: Literal["token", "sequence"] = "token"  # weigh each token, or each response by its product
    importance_floor: NonNegativeFloat = 0.0  # smallest weight that importance_correction=mask keeps


@dataclass
class OptimizerConfig:
    """AdamW and its learning rate."""

    lr: LearningRate = 1e-6  # largest learning rate
    min_lr: LearningRate = 0.0  # learning rate at the end of cosine, linear and wsd
    # How the learning rate goes on after the warm-up; wsd: constant, then down within decay_steps, which it needs.
    schedule: Literal["constant", "cosine", "linear", "wsd"] = "constant"
    # optimizer steps in which the learning rate rises from 0 to lr; below 1: this share of the run's, rounded up
    warmup_steps: Annotated[float, count_or_share()] = 0
    # wsd only: the last optimizer steps of the run, over which lr falls to min_lr
    decay_steps: PositiveInt | None = None
    weight_decay: Annotated[float, between(0, 100)] = 0.01  # AdamW's weight decay; norms and biases have none
    clip_grad: NonNegativeFloat = 1.0  # largest global gradient norm; 0: off
    # Rarely set.
    beta1: Fraction = 0.9  # decay of Adam's mean of gradients
    beta2: Fraction = 0.95  # decay of Adam's mean of squared gradients
    eps: Annotated[float, above(0, 1)] = 1e-8  # Adam's epsilon

    def num_warmup_steps(self, total_steps: int) -> int:
        """The optimizer steps of the warm-up in a run of so many."""
        return math.ceil(self.warmup_steps * (total_steps if self.warmup_steps < 1 else 1))


@dataclass
class ParallelConfig:
    """The trainer's layout, one key per axis; data parallelism is what the world size leaves."""

    tensor: PositiveInt = 1  # ranks that share every layer's weights
    pipeline: PositiveInt = 1  # ranks that each hold some of the layers
    # interleaved pipeline: model chunks per rank; null: off
    virtual_pipeline: Annotated[int, between(2, MANY)] | None = None
    context: PositiveInt = 1  # ranks that share the tokens of every sequence
    # What these ranks exchange in attention (docs/context.md). gather: each gets all keys and values | ulysses: each
    # gets all tokens of some heads, which it must be possible to divide
    context_method: ContextMethod = "gather"
    expert: PositiveInt = 1  # ranks that divide the experts of a layer among them
    expert_tensor: PositiveInt | None = None  # ranks that share the weights of one expert; null: as tensor
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
    # full only: the first so many layers of every pipeline stage; null: all
    recompute_num_layers: PositiveInt | None = None
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
    reference: NonNegativeFloat | None = None  # largest |policy - reference| of a token
    ppo_kl: NonNegativeFloat | None = None  # largest |pi_old - policy| of a token: the same weights, computed twice
    # largest distance from 1 of the mean and of the largest probability ratio; no unit
    ratio: NonNegativeFloat | None = None
    engine: PositiveFloat | None = None  # mean |trainer - engine|; null: 1e-4 if both compute in float32, else 5e-2
    # after the first step the limit is at least this many times what the last steps showed
    engine_factor: Annotated[float, between(1, 1000)] = 4.0


@dataclass
class ProfileConfig:
    """Which steps are recorded, as traces with a table of the costliest operators; docs/profile.md."""

    steps: list[PositiveInt] = field(default_factory=list)  # numbers of steps, from 1; the first two are seldom typical
    ranks: list[NonNegativeInt] = field(default_factory=lambda: [0])  # numbers of the ranks that record them


@dataclass
class TrainerConfig:
    """What is run, how long, and where it writes."""

    # rl: reinforcement learning | pt: continued pre-training on plain text | sft: supervised fine-tuning |
    # rm: a reward model, on pairs of answers | dpo: DPO and its family, on such pairs | kto: KTO, on judged answers
    stage: Literal["rl", "pt", "sft", "rm", "dpo", "kto"] = "rl"
    output_dir: Text = "runs/default"  # all that a run writes; started again with the same one, a run resumes
    total_steps: PositiveInt | None = None  # length of the run in steps; give this or total_epochs
    # length in epochs, without what dynamic sampling draws besides; or total_steps
    total_epochs: PositiveInt | None = None
    seed: Seed = 0  # seed of the model's initialisation and of sampling
    # tokens of one forward pass, all its sequences together; null: the default, or less if the plan has no room for it
    max_tokens_per_microbatch: PositiveInt | None = TOKENS_PER_MICROBATCH
    # Rarely set.
    # a rank that waits longer than this for another one ends the run
    collective_timeout_s: Annotated[float, between(1, MANY)] = 1800.0
    # A run ends, and names the rank, when a rank gives no sign of life or no rank makes progress for this long. The
    # limit is at most 0.9 x collective_timeout_s, and exactly that while models and engines are being built.
    stall_timeout_s: Annotated[float, between(1, MANY)] = 600.0
    # a run ends after so many optimizer steps in a row without finite gradients; 0: never
    max_skipped_steps: NonNegativeInt = 5
    # tokens per chunk when computing log-probabilities; bounds the float32 logits
    logprob_chunk_tokens: PositiveInt = 1024
    gates: GatesConfig = field(default_factory=GatesConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    # More fields of Megatron-core's TransformerConfig; config/schema/megatron_fields.py says which, and why not
    # the others.
    megatron: dict[str, Any] = field(default_factory=dict)


@dataclass
class CheckpointConfig:
    """When the state of a run is written, and where a run begins."""

    # steps between checkpoints, and one at the end; -1: only at the end; null: never
    save_freq: StepInterval | None = -1
    keep_checkpoints: NonNegativeInt = 3  # the newest ones are kept, older ones deleted; 0: keep all
    async_save: bool = False  # write checkpoints in the background; takes host memory for a copy of the state
    # Steps between copies of the state in the memory of the nodes; 0: none. A run that torchrun --max-restarts starts
    # again goes on from them. Takes host memory for two copies of the state; with many nodes, four.
    local: NonNegativeInt = 0
    resume: Text = "auto"  # auto: from the newest complete checkpoint under output_dir | never | a checkpoint directory
    # After SIGTERM or SIGUSR1 a run saves at the end of its step and stops; a step that takes longer than so many
    # seconds is not waited for. torchrun kills after 30 s (--shutdown-timeout). 0: the signals end the run at once.
    grace_s: Annotated[float, between(0, MANY)] = 25.0
    export_hf: bool = True  # at the end, write the weights as a Hugging Face directory too


@dataclass
class ValidationConfig:
    """When held-out data is looked at, and how it is sampled; training samples with the keys of ``rollout``."""

    test_freq: StepInterval = -1  # steps between validations; -1: only at the end
    val_before_train: bool = True  # also before the first step: where the run begins
    # samples per prompt for the metrics over samples; 0: only the greedy response
    n: Annotated[int, between(0, 1 << 16)] = 1
    temperature: Temperature = 1.0  # temperature of the samples of validation


@dataclass
class LoggingConfig:
    """What a run shows and records."""

    progress: bool = True  # progress bar, if the console is a terminal
    tensorboard: bool = True  # event files in output_dir
    jsonl: bool = True  # metrics.jsonl in output_dir
    wandb_project: Text | None = None  # null: off
    swanlab_project: Text | None = None  # null: off
    num_text_samples: NonNegativeInt = 4  # completions shown per step and per validation
    # keep rollouts/step_N.jsonl of this many newest steps; -1: of all steps; 0: of none
    dump_rollouts: Annotated[int, between(-1, MANY)] = 0


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
