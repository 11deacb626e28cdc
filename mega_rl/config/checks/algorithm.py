"""What ``algorithm.name`` stands for, and which of the section's keys do not go together."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from mega_rl.config.schema.sections import CRITIC_ADVANTAGE, GroupBaseline, RunConfig
from mega_rl.config.schema.stage import critic_parallel
from mega_rl.errors import shown
from mega_rl.own_code import is_own, name_problem

# What a name sets if the user does not: differences from the schema's defaults, which are GRPO's.
PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {},  # DeepSeekMath, arXiv 2402.03300
    "dr_grpo": {  # arXiv 2503.20783: no division by the deviation or by a length
        "advantage": "dr_grpo",
        "loss_reduction": "sequence_mean_token_sum_norm",
        "kl_coefficient": 0.0,
    },
    "rloo": {"advantage": "rloo", "kl_in": "reward", "kl_estimator": "k1"},  # arXiv 2402.14740
    "reinforce_pp": {  # arXiv 2501.03262
        "advantage": "reinforce_pp",
        "kl_in": "reward",
        "kl_estimator": "k1",
    },
    "reinforce_pp_baseline": {  # the same paper: the group's mean as baseline, KL in the loss
        "advantage": "reinforce_pp_baseline",
        "kl_estimator": "k2",
    },
    "dapo": {  # arXiv 2503.14476; its overlong shaping is the reward `overlong`
        "clip_ratio_high": 0.28,
        "kl_coefficient": 0.0,
        "dynamic_sampling": {"enabled": True},
    },
    "gspo": {  # arXiv 2507.18071
        "objective": "gspo",
        "clip_ratio_low": 3e-4,
        "clip_ratio_high": 4e-4,
        "loss_reduction": "sequence_mean",
        "kl_coefficient": 0.0,
    },
    "cispo": {  # MiniMax-M1, arXiv 2506.13585, which has no lower bound and leaves the upper one open: here DAPO's
        "objective": "cispo",
        "clip_ratio_low": 1.0,
        "clip_ratio_high": 0.28,
        "kl_coefficient": 0.0,
    },
    "ppo": {"advantage": "gae", "kl_in": "reward", "kl_estimator": "k1"},  # arXiv 1707.06347, with InstructGPT's KL
}


def apply_preset(tree: MutableMapping[Any, Any]) -> None:
    """Sets, in place, the keys of ``algorithm`` that its name stands for and that the user did not give."""
    section = tree.get("algorithm")
    if isinstance(section, dict) and isinstance(section.get("name"), str):
        tree["algorithm"] = _merged(PRESETS.get(section["name"], {}), section)


def _merged(preset: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The preset under what the user gave, key by key also in sections of it."""
    both = {key: _merged(preset[key], given[key]) for key in preset if _is_section(preset, key, given)}
    return preset | given | both


def _is_section(preset: dict[str, Any], key: str, given: dict[str, Any]) -> bool:
    return isinstance(preset[key], dict) and isinstance(given.get(key), dict)


def _sharing_problems(config: RunConfig) -> Iterator[str]:
    """Sentences on a critic that is to train on the policy's frozen weights."""
    tuning, path = config.tuning, config.critic.path
    if config.algorithm.advantage != CRITIC_ADVANTAGE:
        yield (
            f"critic.shares_base is true, but algorithm.advantage {config.algorithm.advantage!r} has no critic: set "
            "algorithm.name to ppo, or critic.shares_base to false"
        )
    elif tuning.method != "lora":
        yield (
            f"critic.shares_base is true, but with tuning.method {tuning.method!r} the policy trains weights that the "
            "critic would have: set tuning.method to lora, or critic.shares_base to false"
        )
    elif tuning.also_train:
        yield (
            "critic.shares_base is true, but tuning.also_train trains weights of the policy that the critic would "
            "have: set it to [], or critic.shares_base to false"
        )
    elif path is not None:
        yield (
            f"critic.shares_base is true, which is a critic on the weights of model.path, but critic.path is "
            f"{shown(path)}: remove it, or set critic.shares_base to false"
        )
    elif critic_parallel(config) is not config.parallel:
        yield (
            "critic.shares_base is true, which is a critic on the policy's own weights, but critic.tensor, "
            "critic.pipeline or critic.context cuts them otherwise: set these to null, or critic.shares_base to false"
        )


def algorithm_problems(config: RunConfig, is_good: Callable[..., bool]) -> Iterator[str]:
    """Sentences on keys of ``algorithm`` that do not go together; ``is_good(*fields)``: each is valid by itself."""
    algorithm, rollout = config.algorithm, config.rollout
    for field, name in (("algorithm.advantage", algorithm.advantage), ("algorithm.objective", algorithm.objective)):
        if is_good(field) and is_own(name) and (problem := name_problem(name)) is not None:
            yield f"{field} is {shown(name)}{problem}"
    if is_good("rollout.n") and algorithm.advantage in typing.get_args(GroupBaseline) and rollout.n < 2:
        yield (
            f"rollout.n is {rollout.n}: set it to at least 2, since algorithm.advantage {algorithm.advantage!r} "
            "compares the samples of one prompt, or set algorithm.advantage to reinforce_pp"
        )
    critic = config.critic
    if critic.path is not None and algorithm.advantage != CRITIC_ADVANTAGE:
        yield (
            f"critic.path is {shown(critic.path)}, but algorithm.advantage {algorithm.advantage!r} has no critic: set "
            "algorithm.name to ppo, or remove it"
        )
    if critic.shares_base:
        yield from _sharing_problems(config)
    total = config.trainer.total_steps if is_good("critic.warmup_steps", "trainer.total_steps") else None
    if algorithm.advantage == CRITIC_ADVANTAGE and total is not None and critic.warmup_steps >= total:
        yield (
            f"critic.warmup_steps is {critic.warmup_steps}, in which the policy does not learn: set it to less than "
            f"trainer.total_steps, {total}"
        )
    if algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1" and algorithm.kl_coefficient != 0:
        yield (
            "algorithm.kl_estimator is 'k1', which with algorithm.kl_in 'loss' regularises nothing, as its gradient is "
            "0 in the mean: set it to k2, whose gradient is that of the KL, or algorithm.kl_in to reward"
        )
    if not is_good("algorithm.objective", "algorithm.clip_ratio_low", "algorithm.loss_reduction"):
        return
    objective, has_own = algorithm.objective, is_own(algorithm.objective)
    if objective != "cispo" and not has_own and algorithm.clip_ratio_low == 1.0:
        yield (
            "algorithm.clip_ratio_low is 1.0, which is no lower bound: set it to less than 1, or "
            "algorithm.objective to cispo"
        )
    if objective != "ppo" and not has_own and algorithm.dual_clip is not None:
        yield (
            f"algorithm.dual_clip is {algorithm.dual_clip}, but algorithm.objective {objective!r} has none: set it to "
            "null, or algorithm.objective to ppo"
        )
    if objective == "gspo" and algorithm.loss_reduction != "sequence_mean":
        yield (
            f"algorithm.loss_reduction is {algorithm.loss_reduction!r}, but algorithm.objective 'gspo' is a mean over "
            "sequences: set it to sequence_mean"
        )
    yield from _importance_problems(config, is_good)


def _importance_problems(config: RunConfig, is_good: Callable[..., bool]) -> Iterator[str]:
    algorithm = config.algorithm
    if not is_good("algorithm.importance_cap", "algorithm.importance_floor", "algorithm.importance_correction"):
        return
    floor, cap, correction = algorithm.importance_floor, algorithm.importance_cap, algorithm.importance_correction
    if floor > 0 and correction != "mask":
        yield (
            f"algorithm.importance_floor is {floor}, but algorithm.importance_correction {correction!r} has no lower "
            "bound: set it to 0, or algorithm.importance_correction to mask"
        )
    if correction == "mask" and cap is None:
        yield (
            "algorithm.importance_cap is null, but algorithm.importance_correction 'mask' needs an upper bound: set it "
            "to a number such as 2.0, or algorithm.importance_correction to truncate"
        )
    if correction == "mask" and cap is not None and not floor < 1.0 < cap:
        yield (
            f"algorithm.importance_floor {floor} and algorithm.importance_cap {cap} mask tokens on which trainer and "
            "engine agree: set them to bounds with 1 between them"
        )
