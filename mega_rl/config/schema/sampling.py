"""A part of the schema: how responses are sampled and rewarded, and how weights come to the engines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from omegaconf import MISSING

from mega_rl.config.schema.device import Dtype
from mega_rl.config.schema.limits import (
    MANY,
    MAX_MEMORY_BYTES,
    AnswerSeconds,
    NonNegativeInt,
    PositiveInt,
    Seed,
    Temperature,
    Text,
    above,
    at_least,
    between,
    name_pattern,
    not_empty,
)

# What a norm is in the model, whatever its Hugging Face name; bridge/outgoing/noise.py explains each.
NormRole = Literal[
    "input_layernorm", "post_attention_layernorm", "router_norm", "q_norm", "k_norm", "latent_norm", "output_norm",
    "final_layernorm",
]  # fmt: skip

# The share of a device's memory that vLLM may take while the trainer lives on the same device, unless
# rollout.vllm.gpu_memory_utilization says otherwise.
COLOCATED_MEMORY_SHARE = 0.4


@dataclass
class RolloutConfig:
    """How vLLM samples the responses that are trained on."""

    n: Annotated[int, between(1, 1 << 16)] = 8  # responses sampled per prompt (the size of a group)
    temperature: Temperature = 1.0  # temperature of sampling; the trainer divides its logits by it too
    # processes that share one engine's weights; colocated: consecutive trainer ranks
    tensor_parallel_size: PositiveInt = 1
    dtype: Dtype | None = None  # dtype of the engine's weights and activations; null: as model.dtype
    placement: Literal["colocated", "separate"] = "colocated"  # engines in the trainer's processes, or in others (Ray)
    # placement separate only; colocated engines are as many as the ranks allow
    num_engines: Annotated[int, between(1, 1 << 16)] = 1
    # synchronous: sampling and training take turns | pinned: engines sample while the trainer trains, a step with the
    # weights of exactly max_staleness steps before, so that nothing depends on the engines' speed, number or death |
    # in_flight: engines take new weights while they sample (docs/asynchronous.md); the last two need placement separate
    mode: Literal["synchronous", "pinned", "in_flight"] = "synchronous"
    # steps that weights may be older than the step that learns from what they sampled
    max_staleness: Annotated[int, between(0, 1 << 10)] = 0
    # synchronous only: a step begins this x data.train_batch_size prompts and ends when enough of their groups have;
    # responses that have not ended go on in the next step, from the tokens that they have; 1: a step waits for all
    oversample: Annotated[float, between(1, 1000)] = 1.0
    # in_flight only: keys and values of a response under way when new weights come. recompute: by the new weights |
    # keep: as they are, cheaper, and of no weights in particular; later responses share none (docs/asynchronous.md)
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    # pinned and in_flight only: an engine with work in hand that makes no step for so many seconds is ended and started
    # again, as one that has died
    engine_timeout_s: Annotated[float, above(0, MANY)] = 600.0
    engine_restarts: NonNegativeInt = 3  # of one engine, pinned and in_flight only; then the run goes on without it
    # pinned and in_flight, on a Ray cluster of your own (RAY_ADDRESS): engines of a trainer that was killed wait for so
    # many seconds for the run to be started again, which goes on with them; then they end
    engine_lease_s: Annotated[float, between(30, MANY)] = 600.0
    # strings that end a response, besides the end-of-sequence token
    stop: list[Annotated[str, not_empty()]] = field(default_factory=list)
    stop_token_ids: list[Annotated[int, at_least(0)]] = field(default_factory=list)  # tokens that end a response
    ignore_eos: bool = False  # go on sampling after the end-of-sequence token
    # request: each response has a seed of its own and is the same in every batch and layout | engine: the engine draws
    # for all responses of a batch at once, which is faster with vLLM below 0.32 and on Ascend
    seeds: Literal["request", "engine"] = "request"
    # CUDA only: vLLM's kernels whose results do not depend on what else is in a batch, so that a response that is
    # sampled again has the same tokens; slower (docs/asynchronous.md)
    batch_invariant: bool = False
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
    replay: Text | None = None  # a directory of recorded rollouts to learn from, without an engine; null: sample
    # CPU only: bytes of key/value cache per rank
    kv_cache_bytes: Annotated[int, between(1 << 20, MAX_MEMORY_BYTES)] = 268435456
    vllm: dict[str, Any] = field(default_factory=dict)  # more arguments of vllm.LLM, checked against their names


@dataclass
class BridgeConfig:
    """How weights move from the trainer to the engines."""

    # extra memory per rank that a weight sync may take, bytes
    bucket_bytes: Annotated[int, between(1 << 16, MAX_MEMORY_BYTES)] = 268435456
    # After every sync, compare hashes of the engine's live weights with the trainer's: of all tensors, or of a sample
    # that comes round to every tensor within 16 syncs. Not possible with rollout.weight_update=reload.
    verify: Literal["off", "sample", "all"] = "off"


@dataclass
class AqnConfig:
    """Adaptive quantisation noise on the norm weights of the policy that samples (QeRL, arXiv 2510.11696)."""

    enabled: bool = False  # whether the policy that samples gets noise
    sigma_start: Annotated[float, above(0, 1000)] = 0.05  # standard deviation of the noise in the first noisy stage
    sigma_end: Annotated[float, above(0, 1000)] = 0.0005  # standard deviation of the noise in the last stage
    num_stages: PositiveInt = 10  # the run is cut into this many equal parts, each with one standard deviation
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
    exclude_patterns: list[Annotated[str, name_pattern()]] = field(default_factory=list)
    include_router_norms: bool = False  # also the norms that feed a mixture-of-experts router
    seed: Seed = 1234  # seed of the noise
    rounding: Literal["nearest", "stochastic", "fp32"] = "nearest"  # of noisy weights to the engine's dtype; fp32: none


@dataclass
class RewardConfig:
    """One entry of the list ``rewards``; the reward of a sample is the weighted sum of the entries for its source."""

    name: str = MISSING  # a built-in reward, or "package.module:function", or "path/to/file.py:function"
    weight: float = 1.0  # factor of this reward in the sum of all
    options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the reward
    # data sources (column data_source) whose rows it scores, as names or shell patterns; []: every row
    only: list[str] = field(default_factory=list)


@dataclass
class RewardWorkersConfig:
    """The processes that rewards run in; all ranks of a node share them."""

    num_workers: Annotated[int, between(1, 1024)] | None = None  # processes per node; null: two for each of its ranks
    timeout_s: AnswerSeconds = 30.0  # limit for one reward of one sample; past it the sample's reward is unknown
    # data memory that one worker may take
    memory_bytes: Annotated[int, between(1 << 26, MAX_MEMORY_BYTES)] = 4294967296
