"""What every single value must be, one line per key; conditions between keys stand in ``validate``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mega_rl.config.algorithm import PRESETS


@dataclass(frozen=True)
class Rule:
    holds: Callable[[Any], bool]
    expected: str  # completes "... is 3: set it to"
    names: tuple[str, ...] = ()  # all that holds, where that is a few names


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def one_of(*names: str) -> Rule:
    return Rule(lambda value: value in names, ("one of " if len(names) > 1 else "") + ", ".join(names), names)


def at_least(low: float) -> Rule:
    return Rule(lambda value: _is_number(value) and value >= low, f"a number >= {low}")


def above(low: float) -> Rule:
    return Rule(lambda value: _is_number(value) and value > low, f"a number > {low}")


def fraction() -> Rule:
    """For 0 <= value < 1."""
    return Rule(lambda value: _is_number(value) and 0 <= value < 1, "a number >= 0 and < 1")


def any_number() -> Rule:
    return Rule(_is_number, "a finite number")


def seed() -> Rule:
    # numpy's legacy generator, which several libraries seed, takes 32 bits
    return Rule(lambda value: _is_number(value) and 0 <= value < 2**32, "a whole number >= 0 and < 2**32")


def step_interval() -> Rule:
    return Rule(lambda value: value == -1 or (_is_number(value) and value >= 1), "-1 (only at the end) or steps >= 1")


def text() -> Rule:
    return Rule(lambda value: isinstance(value, str) and bool(value.strip()), "a string that is not empty")


def list_of(rule: Rule) -> Rule:
    return Rule(lambda value: all(rule.holds(item) for item in value), f"a list in which each entry is {rule.expected}")


def only(value: float, reason: str) -> Rule:
    return Rule(lambda given: given == value, f"{value}, {reason}")


def nullable(rule: Rule) -> Rule:
    return Rule(lambda value: value is None or rule.holds(value), f"null or {rule.expected}")


# What can be computed again by itself in a decoder layer; Megatron's layernorm and moe_act need TransformerEngine.
RECOMPUTE_MODULES = ("core_attn", "mlp", "moe", "shared_experts")

# Keys whose type says all (booleans, free text) are left out; a test lists them.
COMMON: dict[str, Rule] = {
    "model.path": text(),
    "model.dtype": one_of("float32", "bfloat16"),
    "data.max_prompt_length": at_least(1),
    "data.max_response_length": at_least(1),
    "data.train_batch_size": at_least(1),
    "data.seed": seed(),
    "data.chat_template": one_of("auto", "always", "never"),
    "data.max_val_samples": nullable(at_least(1)),
    "bridge.bucket_bytes": at_least(1 << 16),
    "optimizer.lr": at_least(0),
    "optimizer.min_lr": at_least(0),
    "optimizer.schedule": one_of("constant", "cosine", "linear", "wsd"),
    "optimizer.warmup_steps": at_least(0),
    "optimizer.decay_steps": nullable(at_least(1)),
    "optimizer.weight_decay": at_least(0),
    "optimizer.beta1": fraction(),
    "optimizer.beta2": fraction(),
    "optimizer.eps": above(0),
    "optimizer.clip_grad": at_least(0),
    "parallel.tensor": at_least(1),
    "parallel.pipeline": at_least(1),
    "parallel.virtual_pipeline": nullable(at_least(2)),
    "parallel.context": at_least(1),
    "parallel.expert": at_least(1),
    "parallel.expert_tensor": nullable(at_least(1)),
    "memory.recompute": one_of("none", "selective", "full"),
    "memory.recompute_modules": nullable(list_of(one_of(*RECOMPUTE_MODULES))),
    "memory.recompute_num_layers": nullable(at_least(1)),
    "memory.offload": list_of(one_of("weights", "gradients", "optimizer")),
    "memory.optimizer_state_dtype": one_of("float32", "bfloat16"),
    "trainer.stage": one_of("rl", "sft"),
    "trainer.output_dir": text(),
    "trainer.total_steps": nullable(at_least(1)),
    "trainer.total_epochs": nullable(at_least(1)),
    "trainer.seed": seed(),
    "trainer.max_tokens_per_microbatch": at_least(1),
    "trainer.max_skipped_steps": at_least(0),
    "validation.test_freq": step_interval(),
    "checkpoint.save_freq": step_interval(),
    "checkpoint.keep_checkpoints": at_least(0),
    "checkpoint.resume": text(),
    "trainer.logprob_chunk_tokens": at_least(1),
    "logging.wandb_project": nullable(text()),
    "logging.num_text_samples": at_least(0),
    "logging.dump_rollouts": at_least(-1),
    "platform.name": text(),  # which names there are is the platform package's to say
    "platform.num_threads": nullable(at_least(1)),
    "platform.mindspeed.mode": one_of("auto", "required", "off"),
}

_WHOLE = "since the trainer's log-probabilities are those of the whole vocabulary"
# Keys that a supervised run does not read.
RL: dict[str, Rule] = {
    "rollout.placement": one_of("colocated", "separate"),
    "rollout.num_engines": at_least(1),
    "rollout.tensor_parallel_size": at_least(1),
    "rollout.dtype": nullable(one_of("float32", "bfloat16")),
    "rollout.n": at_least(1),
    "rollout.temperature": above(0),
    "rollout.top_p": only(1.0, _WHOLE),
    "rollout.top_k": only(-1, _WHOLE),
    "rollout.min_p": only(0.0, _WHOLE),
    "rollout.stop": list_of(Rule(bool, "a string that is not empty")),
    "rollout.stop_token_ids": list_of(at_least(0)),
    "rollout.simulated_quantization": nullable(one_of("nvfp4", "mxfp4")),
    "rollout.weight_update": one_of("auto", "live", "reload"),
    "rollout.replay": nullable(text()),
    "rollout.kv_cache_bytes": at_least(1),
    "validation.n": at_least(0),
    "validation.temperature": above(0),
    "bridge.verify": one_of("off", "sample", "all"),
    "algorithm.name": one_of(*PRESETS),
    "algorithm.advantage": one_of("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"),
    "algorithm.objective": one_of("ppo", "gspo", "cispo"),
    "algorithm.clip_ratio_low": Rule(lambda v: _is_number(v) and 0 < v <= 1, "a number > 0 and <= 1"),
    "algorithm.clip_ratio_high": above(0),
    "algorithm.dual_clip": nullable(above(1)),
    "algorithm.loss_reduction": one_of("token_mean", "sequence_mean", "sequence_mean_token_sum_norm"),
    "algorithm.kl_coefficient": at_least(0),
    "algorithm.kl_estimator": one_of("k1", "k2", "k3"),
    "algorithm.kl_in": one_of("loss", "reward"),
    "algorithm.entropy_coefficient": any_number(),
    "algorithm.importance_cap": nullable(above(0)),
    "algorithm.importance_correction": one_of("truncate", "mask"),
    "algorithm.importance_level": one_of("token", "sequence"),
    "algorithm.importance_floor": at_least(0),
    "algorithm.minibatches_per_step": at_least(1),
    "algorithm.dynamic_sampling.oversample": Rule(lambda v: _is_number(v) and v >= 1, "a number >= 1"),
    "algorithm.dynamic_sampling.budget": Rule(lambda v: _is_number(v) and v >= 1, "a number >= 1"),
    "algorithm.dynamic_sampling.metric": nullable(text()),
    "reward_workers.num_workers": at_least(1),
    "reward_workers.timeout_s": above(0),
    "reward_workers.memory_bytes": at_least(1 << 26),
    "aqn.sigma_start": above(0),
    "aqn.sigma_end": above(0),
    "aqn.num_stages": at_least(1),
    "aqn.schedule": one_of("exponential", "exponential_eq8", "exponential_alg1", "linear", "cosine", "constant"),
    "aqn.target_modules": nullable(list_of(text())),
    "aqn.exclude_patterns": list_of(text()),
    "aqn.rounding": one_of("nearest", "stochastic", "fp32"),
    "trainer.gates.disabled": list_of(one_of("reference", "ppo_kl", "ratio", "engine")),
    "trainer.gates.reference": at_least(0),
    "trainer.gates.ppo_kl": at_least(0),
    "trainer.gates.ratio": at_least(0),
    "trainer.gates.engine": nullable(above(0)),
    "aqn.old_logprobs": one_of("decoupled", "rollout", "recompute_noisy", "none"),
}
