"""What every single value must be, one line per key; conditions between keys stand in ``validate``.

Keys whose type is a ``Literal`` have no line here: the schema lists their words. Keys whose type says all (booleans,
free text) have none either; a test lists them.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from mega_rl.config.typed import is_nullable, leaves, not_null


@dataclass(frozen=True)
class Rule:
    holds: Callable[[Any], bool]
    expected: str  # completes "... is 3: set it to"
    names: tuple[str, ...] = ()  # all words that hold, if only a few do; of a list: for each entry


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
    expected = f"a list in which each entry is {rule.expected}"
    return Rule(lambda value: all(rule.holds(item) for item in value), expected, rule.names)


def nullable(rule: Rule) -> Rule:
    return Rule(lambda value: value is None or rule.holds(value), f"null or {rule.expected}", rule.names)


def rule_of_type(hint: Any) -> Rule | None:
    """The rule that a type with choices says; None for another type."""
    if typing.get_origin(hint) is Literal:
        return one_of(*typing.get_args(hint))
    if is_nullable(hint):
        rule = rule_of_type(not_null(hint))
        return rule and nullable(rule)
    if typing.get_origin(hint) is list:
        rule = rule_of_type(*typing.get_args(hint))
        return rule and list_of(rule)
    return None


RULES: dict[str, Rule] = {
    "model.path": text(),
    "data.max_prompt_length": at_least(1),
    "data.max_response_length": at_least(1),
    "data.train_batch_size": at_least(1),
    "data.seed": seed(),
    "data.max_val_samples": nullable(at_least(1)),
    "bridge.bucket_bytes": at_least(1 << 16),
    "optimizer.lr": at_least(0),
    "optimizer.min_lr": at_least(0),
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
    "memory.recompute_num_layers": nullable(at_least(1)),
    "trainer.output_dir": text(),
    "trainer.total_steps": nullable(at_least(1)),
    "trainer.total_epochs": nullable(at_least(1)),
    "trainer.seed": seed(),
    "trainer.max_tokens_per_microbatch": at_least(1),
    "trainer.collective_timeout_s": above(0),
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
    "rollout.num_engines": at_least(1),
    "rollout.tensor_parallel_size": at_least(1),
    "rollout.n": at_least(1),
    "rollout.temperature": above(0),
    "rollout.stop": list_of(Rule(bool, "a string that is not empty")),
    "rollout.stop_token_ids": list_of(at_least(0)),
    "rollout.replay": nullable(text()),
    "rollout.kv_cache_bytes": at_least(1),
    "validation.n": at_least(0),
    "validation.temperature": above(0),
    "algorithm.clip_ratio_low": Rule(lambda v: _is_number(v) and 0 < v <= 1, "a number > 0 and <= 1"),
    "algorithm.clip_ratio_high": above(0),
    "algorithm.dual_clip": nullable(above(1)),
    "algorithm.kl_coefficient": at_least(0),
    "algorithm.entropy_coefficient": any_number(),
    "algorithm.importance_cap": nullable(above(0)),
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
    "aqn.target_modules": nullable(list_of(text())),
    "aqn.exclude_patterns": list_of(text()),
    "trainer.gates.reference": at_least(0),
    "trainer.gates.ppo_kl": at_least(0),
    "trainer.gates.ratio": at_least(0),
    "trainer.gates.engine": nullable(above(0)),
}

# What a run of stage sft does not read: sections, and keys of sections that it reads otherwise.
ONLY_RL = (
    "rollout.", "bridge.", "algorithm.", "aqn.", "reward_workers.", "trainer.gates.",
    "validation.n", "validation.temperature",
)  # fmt: skip


def rules(is_rl: bool) -> dict[str, Rule]:
    """Dotted key -> its rule, in the order of the schema; if not ``is_rl``, without the keys that only rl reads."""
    found = {name: RULES.get(name) or rule_of_type(hint) for name, hint in leaves()}
    return {name: rule for name, rule in found.items() if rule and (is_rl or not name.startswith(ONLY_RL))}
