"""What every single value must be, one line per key; conditions between keys stand in ``validate``.

Keys whose type is a ``Literal`` have no line here: the schema lists their words. Keys whose type says all (booleans,
free text) have none either; a test lists them.
"""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from mega_rl.config.reading.typed import (
    is_nullable,
    leaves,
    not_null,
)
from mega_rl.config.schema.sections import Advantage, Objective
from mega_rl.own_code import is_own

MANY = 2**31 - 1  # of steps, tokens, processes: a larger number is a mistake
MAX_MEMORY_BYTES = 1 << 50
OWN_NAMES = ("package.module:function", "path/to/file.py:function")
MIN_TEMPERATURE = 0.01  # vLLM samples lower ones at this, and the trainer would not
_PATTERN = re.compile(r"(?:[\w.*?-]|\[!?[\w.-]+\])+", re.ASCII)


@dataclass(frozen=True)
class Rule:
    holds: Callable[[Any], bool]
    expected: str  # completes "... is 3: set it to"
    names: tuple[str, ...] = ()  # all words that hold, if only a few do, own code aside; of a list: for each entry


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def one_of(*names: str) -> Rule:
    return Rule(lambda value: value in names, ("one of " if len(names) > 1 else "") + ", ".join(names), names)


def one_of_or_own(*names: str) -> Rule:
    expected = f"one of {', '.join(names)}, or {' or '.join(OWN_NAMES)}"
    return Rule(lambda value: value in names or (isinstance(value, str) and is_own(value)), expected, names)


def between(low: float, most: float) -> Rule:
    return Rule(lambda value: _is_number(value) and low <= value <= most, f"a number >= {low} and <= {most}")


def at_least(low: float) -> Rule:
    return Rule(lambda value: _is_number(value) and value >= low, f"a number >= {low}")


def above(low: float, most: float | None = None) -> Rule:
    """``most`` None: no upper bound."""
    end = "" if most is None else f" and <= {most}"
    limit = math.inf if most is None else most
    return Rule(lambda value: _is_number(value) and low < value <= limit, f"a number > {low}{end}")


def fraction() -> Rule:
    """For 0 <= value < 1."""
    return Rule(lambda value: _is_number(value) and 0 <= value < 1, "a number >= 0 and < 1")


def any_number() -> Rule:
    return Rule(_is_number, "a finite number")


def seed() -> Rule:
    # numpy's legacy generator, which several libraries seed, takes 32 bits
    return Rule(lambda value: _is_number(value) and 0 <= value < 2**32, "a whole number >= 0 and < 2**32")


def step_interval() -> Rule:
    expected = f"-1 (only at the end) or steps >= 1 and <= {MANY}"
    return Rule(lambda value: value == -1 or (_is_number(value) and 1 <= value <= MANY), expected)


def text() -> Rule:
    return Rule(lambda value: isinstance(value, str) and bool(value.strip()), "a string that is not empty")


def name_pattern() -> Rule:
    """A shell pattern that can match the name of a tensor."""
    return Rule(lambda value: bool(_PATTERN.fullmatch(value)), "a shell pattern of a tensor's name, such as *.0.*")


def list_of(rule: Rule) -> Rule:
    expected = f"a list in which each entry is {rule.expected}"
    return Rule(lambda value: all(rule.holds(item) for item in value), expected, rule.names)


def nullable(rule: Rule) -> Rule:
    return Rule(lambda value: value is None or rule.holds(value), f"null or {rule.expected}", rule.names)


def rule_of_type(hint: Any) -> Rule | None:
    """The rule of a type with choices; None for any other type."""
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
    "tuning.train_layers": Rule(lambda v: _is_number(v) and v != 0 and abs(v) <= MANY, "a whole number other than 0"),
    "tuning.also_train": list_of(text()),
    "tuning.adapter.rank": between(1, 1 << 14),
    "tuning.adapter.alpha": above(0, 1 << 20),
    "tuning.adapter.targets": list_of(text()),
    "tuning.adapter.exclude": list_of(text()),
    "tuning.adapter.expert_rank": nullable(between(1, 1 << 14)),
    "tuning.adapter.dropout": fraction(),
    "tuning.adapter.path": nullable(text()),
    "data.max_prompt_length": between(1, MANY),
    "data.max_pixels": between(1, MANY),
    "data.max_images": between(1, 1024),
    "model.vision.cache_bytes": between(0, MAX_MEMORY_BYTES),
    "data.max_response_length": between(1, MANY),
    "data.train_batch_size": between(1, 1 << 18),
    "data.seed": seed(),
    "data.max_val_samples": nullable(between(1, MANY)),
    "data.mask_spans": list_of(
        Rule(lambda v: isinstance(v, list) and len(v) == 2 and all(v), "a list of two texts, as [<a>, </a>]")
    ),
    "bridge.bucket_bytes": between(1 << 16, MAX_MEMORY_BYTES),
    "optimizer.lr": between(0, 100),
    "optimizer.min_lr": between(0, 100),
    "optimizer.warmup_steps": between(0, MANY),
    "optimizer.decay_steps": nullable(between(1, MANY)),
    "optimizer.weight_decay": between(0, 100),
    "optimizer.beta1": fraction(),
    "optimizer.beta2": fraction(),
    "optimizer.eps": above(0, 1),
    "optimizer.clip_grad": at_least(0),
    "parallel.tensor": between(1, MANY),
    "parallel.pipeline": between(1, MANY),
    "parallel.virtual_pipeline": nullable(between(2, MANY)),
    "parallel.context": between(1, MANY),
    "parallel.expert": between(1, MANY),
    "parallel.expert_tensor": nullable(between(1, MANY)),
    "memory.recompute_num_layers": nullable(between(1, MANY)),
    "trainer.output_dir": text(),
    "trainer.total_steps": nullable(between(1, MANY)),
    "trainer.total_epochs": nullable(between(1, MANY)),
    "trainer.seed": seed(),
    "trainer.max_tokens_per_microbatch": nullable(between(1, MANY)),
    "trainer.collective_timeout_s": between(1, MANY),
    "trainer.stall_timeout_s": between(1, MANY),
    "trainer.max_skipped_steps": between(0, MANY),
    "trainer.profile.steps": list_of(between(1, MANY)),
    "trainer.profile.ranks": list_of(between(0, MANY)),
    "validation.test_freq": step_interval(),
    "checkpoint.save_freq": nullable(step_interval()),
    "checkpoint.keep_checkpoints": between(0, MANY),
    "checkpoint.resume": text(),
    "checkpoint.grace_s": between(0, MANY),
    "checkpoint.local": between(0, MANY),
    "trainer.logprob_chunk_tokens": between(1, MANY),
    "logging.wandb_project": nullable(text()),
    "logging.swanlab_project": nullable(text()),
    "logging.num_text_samples": between(0, MANY),
    "logging.dump_rollouts": between(-1, MANY),
    "platform.name": text(),  # the platform package knows the names
    "platform.num_threads": nullable(between(1, 4096)),
    "platform.peak_tflops": nullable(above(0, 1 << 20)),
    "rollout.num_engines": between(1, 1 << 16),
    "rollout.max_staleness": between(0, 1 << 10),
    "rollout.oversample": between(1, 1000),
    "rollout.engine_timeout_s": above(0, MANY),
    "rollout.engine_restarts": between(0, MANY),
    "rollout.engine_lease_s": between(30, MANY),
    "rollout.tensor_parallel_size": between(1, MANY),
    "rollout.n": between(1, 1 << 16),
    "rollout.temperature": between(MIN_TEMPERATURE, 1000),
    "rollout.stop": list_of(Rule(bool, "a string that is not empty")),
    "rollout.stop_token_ids": list_of(at_least(0)),
    "rollout.replay": nullable(text()),
    "rollout.kv_cache_bytes": between(1 << 20, MAX_MEMORY_BYTES),
    "algorithm.advantage": one_of_or_own(*typing.get_args(Advantage)),
    "algorithm.objective": one_of_or_own(*typing.get_args(Objective)),
    "algorithm.turn_discount": above(0, 1),
    "environment.name": nullable(text()),
    "environment.tool_parser": text(),
    "environment.max_turns": between(1, MANY),
    "environment.max_turn_tokens": nullable(between(1, MANY)),
    "environment.max_reply_tokens": between(1, MANY),
    "environment.step_timeout_s": between(0.01, 7 * 24 * 3600),
    "environment.workers": between(1, 1 << 16),
    "validation.n": between(0, 1 << 16),
    "validation.temperature": between(MIN_TEMPERATURE, 1000),
    "algorithm.clip_ratio_low": Rule(lambda v: _is_number(v) and 0 < v <= 1, "a number > 0 and <= 1"),
    "algorithm.clip_ratio_high": above(0),
    "algorithm.dual_clip": nullable(above(1)),
    "algorithm.kl_coefficient": between(0, 1000),
    "algorithm.entropy_coefficient": between(-1, 1),
    "algorithm.importance_cap": nullable(above(0)),
    "algorithm.importance_floor": at_least(0),
    "algorithm.minibatches_per_step": between(1, MANY),
    "algorithm.dynamic_sampling.oversample": between(1, 1000),
    "algorithm.dynamic_sampling.budget": between(1, MANY),
    "algorithm.dynamic_sampling.metric": nullable(text()),
    "router.aux_loss": between(0, 1000),
    "router.z_loss": between(0, 1000),
    "router.bias_update_rate": between(0, 1),
    "preference.beta": above(0, 1000),
    "preference.label_smoothing": Rule(lambda v: _is_number(v) and 0 <= v < 0.5, "a number >= 0 and < 0.5"),
    "preference.simpo_gamma": between(0, 1000),
    "preference.sft_coefficient": between(0, 1000),
    "kto.beta": above(0, 1000),
    "kto.desirable_weight": between(0, 1000),
    "kto.undesirable_weight": between(0, 1000),
    "reward_model.centre": between(0, 1000),
    "critic.path": nullable(text()),
    **dict.fromkeys(("critic.tensor", "critic.pipeline", "critic.context"), nullable(between(1, MANY))),
    "critic.lr": between(0, 100),
    "critic.gamma": between(0, 1),
    "critic.lam": between(0, 1),
    "critic.clip_value": nullable(above(0)),
    "critic.warmup_steps": between(0, MANY),
    "reward_workers.num_workers": nullable(between(1, 1024)),
    "reward_workers.timeout_s": between(0.01, 7 * 24 * 3600),
    "reward_workers.memory_bytes": between(1 << 26, MAX_MEMORY_BYTES),
    "aqn.sigma_start": above(0, 1000),
    "aqn.sigma_end": above(0, 1000),
    "aqn.seed": seed(),
    "aqn.num_stages": between(1, MANY),
    "aqn.exclude_patterns": list_of(name_pattern()),
    "trainer.gates.reference": nullable(at_least(0)),
    "trainer.gates.ppo_kl": nullable(at_least(0)),
    "trainer.gates.ratio": nullable(at_least(0)),
    "trainer.gates.engine": nullable(above(0)),
    "trainer.gates.engine_factor": between(1, 1000),
}

# Beginnings of the keys that one stage reads alone: sections, and keys of sections that other stages read otherwise.
READ_BY = {
    "rl": (
        "rollout.", "environment.", "bridge.", "algorithm.", "critic.", "aqn.", "reward_workers.", "trainer.gates.",
        "validation.n", "validation.temperature",
    ),
    "dpo": ("preference.",),
    "kto": ("kto.",),
    "rm": ("reward_model.",),
}  # fmt: skip


def rules(stage: str | None = None) -> dict[str, Rule]:
    """Dotted key -> its rule, in the order of the schema, without the keys that only other stages read; None: all."""
    of_others = tuple(start for other, starts in READ_BY.items() if stage not in (None, other) for start in starts)
    found = {name: RULES.get(name) or rule_of_type(hint) for name, hint in leaves()}
    return {name: rule for name, rule in found.items() if rule and not name.startswith(of_others)}
