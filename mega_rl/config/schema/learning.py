"""A part of the schema: which weights are trained, what single stages and objectives are set by, and environments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from mega_rl.config.schema.limits import (
    MAX_MEMORY_BYTES,
    AnswerSeconds,
    Fraction,
    LearningRate,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Text,
    Weight,
    above,
    between,
    fraction,
    other_than_0,
)


@dataclass
class AdapterConfig:
    """Low-rank adapters (LoRA, arXiv 2106.09685), for tuning.method lora: W + scale * B A, where only A and B learn."""

    rank: Annotated[int, between(1, 1 << 14)] = 16  # rows of A, columns of B
    alpha: Annotated[float, above(0, 1 << 20)] = 32.0  # the scale is alpha / rank
    # Linear layers with an adapter: all-linear, or ends of module names such as q_proj or self_attn.o_proj, or shell
    # patterns of whole names such as *.layers.3.*
    targets: list[Text] = field(default_factory=lambda: ["all-linear"])
    exclude: list[Text] = field(default_factory=list)  # of these, written the same way, those without one
    # rank of the adapters of experts, of which there are many; null: as rank
    expert_rank: Annotated[int, between(1, 1 << 14)] | None = None
    rslora: bool = False  # the scale is alpha / sqrt(rank) (arXiv 2312.03732)
    dropout: Fraction = 0.0  # share of the input of an adapter that is dropped in training; stages pt, sft, dpo and kto
    # PEFT directory of an adapter to go on training; null: start with adapters that add nothing
    path: Text | None = None
    new: bool = False  # merge the adapter of path into the weights at the start, and train another one


@dataclass
class TuningConfig:
    """Which weights a run trains; docs/tuning.md."""

    # full: all | freeze: those of some layers | lora: adapters beside frozen weights
    method: Literal["full", "freeze", "lora"] = "full"
    train_layers: Annotated[int, other_than_0()] = 2  # freeze: the last so many layers; negative: the first ones
    train_modules: Literal["all", "mlp", "self_attn"] = "all"  # freeze: what of these layers
    # freeze and lora: tensors trained besides, by the end of their Hugging Face name or a shell pattern of it, such as
    # norm.weight or *.layers.0.*
    also_train: list[Text] = field(default_factory=list)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)


@dataclass
class VisionConfig:
    """What is trained of the part of a model that sees pictures; for models that have one, with tuning.method full."""

    freeze: bool = True  # the blocks over patches stay as they are
    freeze_merger: bool = True  # what makes the language model's embeddings of their output, too
    # of host memory of every rank, for what a wholly frozen tower has made of pictures
    cache_bytes: Annotated[int, between(0, MAX_MEMORY_BYTES)] = 4 << 30


@dataclass
class RouterConfig:
    """What the routers of a model with experts learn besides the stage's objective; docs/router.md."""

    aux_loss: Weight = 0.0  # weight of the load-balancing loss, which is 1 per layer if all experts are used alike
    # the tokens that it averages over: those of a sequence, whichever way a batch is packed, or those of a micro-batch
    aux_loss_over: Literal["sequence", "microbatch"] = "sequence"
    z_loss: Weight = 0.0  # weight of the loss that keeps the router's logits small
    # After every optimizer step the bias of each expert's score moves by this, up if the expert took fewer tokens than
    # the mean; models that have such a bias (DeepSeek-V3)
    bias_update_rate: Annotated[float, between(0, 1)] = 0.0


@dataclass
class PreferenceConfig:
    """The loss on pairs of a chosen and a rejected answer (stage dpo); ``docs/preference.md`` has the formulas."""

    # which loss on pairs; simpo and orpo need no reference
    loss: Literal["sigmoid", "hinge", "ipo", "robust", "apo_zero", "apo_down", "sppo", "simpo", "orpo"] = "sigmoid"
    # how closely the policy keeps to the reference: the larger, the closer
    beta: Annotated[float, above(0, 1000)] = 0.1
    # share of pairs taken to be judged wrongly; sigmoid, robust and simpo
    label_smoothing: Annotated[float, fraction(0.5)] = 0.0
    # simpo only: the margin between the rewards that is asked for
    simpo_gamma: Annotated[float, between(0, 1000)] = 0.5
    sft_coefficient: Weight = 0.0  # weight of the chosen answer's own negative log-likelihood, per token
    # Log-probabilities of the model that training started from. cached: computed once, before the first step, and kept
    # in output_dir | none: the loss needs none (simpo, orpo) | auto: none for these two, else cached
    reference: Literal["auto", "cached", "none"] = "auto"


@dataclass
class KtoConfig:
    """The loss on answers that are judged one by one (stage kto)."""

    beta: Annotated[float, above(0, 1000)] = 0.1  # as preference.beta
    desirable_weight: Weight = 1.0  # of good answers
    undesirable_weight: Weight = 1.0  # of bad ones


@dataclass
class RewardModelConfig:
    """The loss on scores of two answers (stage rm)."""

    centre: Weight = 0.0  # weight of (chosen + rejected)^2, which keeps scores near 0; 0: off


@dataclass
class CriticConfig:
    """The model whose values ``algorithm.advantage=gae`` goes by; read with it only."""

    path: Text | None = None  # a reward model's directory, or a language model's; null: model.path with a new head
    shares_base: bool = False  # with tuning.method lora: adapters and a head on the policy's own frozen weights
    tensor: PositiveInt | None = None  # its own parallel.tensor; null: the policy's
    pipeline: PositiveInt | None = None  # its own parallel.pipeline, not interleaved; null: the policy's
    context: PositiveInt | None = None  # its own parallel.context; null: the policy's
    lr: LearningRate = 1e-5  # constant; what else AdamW needs is that of ``optimizer``
    gamma: Annotated[float, between(0, 1)] = 1.0  # discount per token
    lam: Annotated[float, between(0, 1)] = 1.0  # lambda of GAE: 1 trusts what was rewarded alone, 0 the critic alone
    # an update moves a value by so much at most, in units of the reward; null: off
    clip_value: PositiveFloat | None = 0.5
    warmup_steps: NonNegativeInt = 0  # steps in the beginning in which the critic alone learns


@dataclass
class EnvironmentConfig:
    """What answers the model between its turns, so that a response is an episode of several; docs/episodes.md."""

    # tools | python_sandbox | number_guessing | package.module:Class | path/to/file.py:Class; null: single turns
    name: Text | None = None
    options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the environment
    tool_parser: Text = "hermes"  # tools only: which of vLLM's parsers reads the calls that the model writes
    max_turns: PositiveInt = 4  # of the model in one episode
    # Tokens of one turn; null: what is left of data.max_response_length, which is of all turns and replies together.
    max_turn_tokens: PositiveInt | None = None
    # of each message of the environment; a longer one is cut in its middle, and says so
    max_reply_tokens: PositiveInt = 1024
    # limit of one answer of the environment; past it the reward of the episode is unknown
    step_timeout_s: AnswerSeconds = 30.0
    workers: Annotated[int, between(1, 1 << 16)] = 64  # answers that the environments of one engine work on at once
    scored: Literal["last_turn", "all_turns"] = "last_turn"  # the text that rewards are given of an episode
    # Episodes that a limit of turns or tokens ends. score: as all others | leave_out: nothing is learnt from them
    unfinished: Literal["score", "leave_out"] = "score"
    # A chat template that writes earlier turns otherwise than they were sampled (thoughts left out). refuse: an error |
    # keep: what was sampled stays
    history: Literal["refuse", "keep"] = "refuse"
