"""Stages, adapters, critics and reward models: conversions that the rules of several neighbours share."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

from mega_rl.importers.draft.draft import Draft, Stage
from mega_rl.importers.draft.units import as_list

SMOOTHED = ("sigmoid", "robust", "simpo")  # values of preference.loss that read label_smoothing
EVERY_LAYER = ("all", "all-linear")
# Megatron's names of linear layers, fused and single, as Hugging Face's.
MEGATRON_NAMES = {
    "linear_qkv": ["q_proj", "k_proj", "v_proj"],
    "linear_q": ["q_proj"],
    "linear_k": ["k_proj"],
    "linear_v": ["v_proj"],
    "linear_proj": ["o_proj"],
    "linear_fc1": ["gate_proj", "up_proj"],
    "linear_fc1_gate": ["gate_proj"],
    "linear_fc1_up": ["up_proj"],
    "linear_fc2": ["down_proj"],
    "linear_q_proj": ["q_proj"],
    "linear_q_down_proj": ["q_a_proj"],
    "linear_q_up_proj": ["q_b_proj"],
    "linear_kv_down_proj": ["kv_a_proj_with_mqa"],
    "linear_kv_up_proj": ["kv_b_proj"],
}


def set_stage(draft: Draft, stage: Stage, keys: tuple[str, ...] = ()) -> None:
    """What is run; a stage that learns from files has no keys of sampling."""
    draft.stage = stage
    draft.set("trainer.stage", stage, keys)


def sequences_per_row(draft: Draft) -> int:
    """2 where a row is a pair of answers, which share a micro-batch."""
    return 2 if draft.stage in ("dpo", "rm") else 1


@dataclass(frozen=True)
class AdapterKeys:
    """Their keys of every part; the first that is given counts."""

    switches: tuple[str, ...]
    rank: tuple[str, ...]
    alpha: tuple[str, ...]
    targets: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    rslora: tuple[str, ...] = ()
    also: tuple[str, ...] = ()  # whole modules that are trained besides
    path: tuple[str, ...] = ()
    new: tuple[str, ...] = ()
    dropout: tuple[str, ...] = ()

    def names(self) -> list[str]:
        return [key for part in fields(self) for key in getattr(self, part.name)]


def set_adapter(
    draft: Draft,
    keys: AdapterKeys,
    is_on: bool,
    rank: int,
    alpha: float | None,
    targets: tuple[str, ...] = ("all-linear",),
) -> None:
    """The section ``tuning`` for LoRA.

    Args:
        rank: their default.
        alpha: their default; None: twice the rank.
        targets: their default.
    """
    if not is_on:
        for key in keys.names():
            draft.note(key, "same", "not read, as there are no adapters")
        return
    if draft.stage == "rm":
        draft.lack(keys.names(), "whole_values")
        draft.notes.append("optimizer.lr: theirs is that of adapters; the whole model learns at about a tenth of it")
        return
    draft.set("tuning.method", "lora", keys.switches)
    chosen = draft.count(*keys.rank, default=rank) or rank
    draft.set("tuning.adapter.rank", chosen, keys.rank)
    draft.set("tuning.adapter.alpha", float(draft.number(*keys.alpha) or alpha or 2 * chosen), keys.alpha)
    found = module_names(draft, keys.targets)
    is_every = any(name in EVERY_LAYER for name in found)
    draft.set("tuning.adapter.targets", ["all-linear"] if is_every else found or list(targets), keys.targets)
    if draft.has(*keys.exclude) and re.fullmatch(r"[\W\d]*(?:visual|vision\w*)[\W\d]*", str(draft.get(*keys.exclude))):
        for key in keys.exclude:
            draft.note(key, "same", "adapters are in the language model only")
    elif excluded := module_names(draft, keys.exclude):
        draft.set("tuning.adapter.exclude", excluded, keys.exclude)
    if draft.get(*keys.rslora):
        draft.set("tuning.adapter.rslora", True, keys.rslora)
    share = draft.number(*keys.dropout) or 0.0
    if share and draft.stage == "rl":
        draft.lack(keys.dropout, "adapter_dropout")
        if not draft.has(*keys.dropout):
            draft.notes.append(f"tuning.adapter.dropout: theirs is {share} by default; stage rl has none")
    else:
        draft.set("tuning.adapter.dropout", share, keys.dropout)
    _set_origin(draft, keys)


def _set_origin(draft: Draft, keys: AdapterKeys) -> None:
    """The adapter that training goes on from, and what is trained besides."""
    paths = as_list(draft.get(*keys.path))
    if len(paths) == 1:
        draft.set("tuning.adapter.path", str(paths[0]), keys.path)
        draft.notes.append("tuning.adapter: rank, alpha and targets must be those of the adapter in path")
        if draft.get(*keys.new):
            draft.set("tuning.adapter.new", True, keys.new)
    elif paths:
        draft.lack(keys.path, "other_word", "several adapters; merge all but the last with tools/merge_lora.py")
    also = module_names(draft, keys.also)
    if also and paths:
        draft.lack(keys.also, "other_word", "an adapter of a file goes on alone")
    elif also:
        draft.set("tuning.also_train", also, keys.also)


def module_names(draft: Draft, keys: tuple[str, ...]) -> list[str]:
    """Ends of Hugging Face names of modules; what is none of them is reported."""
    found: list[str] = []
    for name in as_list(draft.get(*keys)):
        plain = name.strip(" ,") if isinstance(name, str) else ""
        if plain in MEGATRON_NAMES:
            found += MEGATRON_NAMES[plain]
        elif re.fullmatch(r"[\w.*?-]+", plain) and "linear_" not in plain:
            found.append(plain)
        else:
            draft.lack(keys, "other_word", f"{name!r}; give ends of Hugging Face names of modules")
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class CriticKeys:
    """Their keys of every part of the critic."""

    path: tuple[str, ...] = ()
    lr: tuple[str, ...] = ()
    gamma: tuple[str, ...] = ()
    lam: tuple[str, ...] = ()
    clip: tuple[str, ...] = ()
    warmup: tuple[str, ...] = ()

    def names(self) -> list[str]:
        return [key for part in fields(self) for key in getattr(self, part.name)]


def set_critic(draft: Draft, keys: CriticKeys, is_on: bool, *, lr: float, lam: float, clip: float, frozen: int) -> None:
    """The section ``critic``.

    Args:
        lr, lam, clip: their defaults.
        frozen: steps in which the policy does not learn yet.
    """
    if not is_on:
        for key in keys.names():
            draft.note(key, "same", "not read, as there is no critic")
        if draft.number(*keys.gamma, default=1.0) != 1.0:
            draft.lack(keys.gamma, "other_advantage", "a discount without a critic")
        return
    draft.set("algorithm.advantage", "gae")
    if draft.word(*keys.path):
        draft.set("critic.path", str(draft.word(*keys.path)), keys.path)
    draft.set("critic.lr", draft.number(*keys.lr, default=lr), keys.lr)
    draft.set("critic.gamma", draft.number(*keys.gamma, default=1.0), keys.gamma)
    draft.set("critic.lam", draft.number(*keys.lam, default=lam), keys.lam)
    draft.set("critic.clip_value", draft.number(*keys.clip, default=clip) or None, keys.clip)
    draft.set("critic.warmup_steps", max(0, frozen), keys.warmup)


def has_critic(draft: Draft) -> bool:
    return draft.result.get("algorithm.advantage") == "gae"


def add_reward_model(draft: Draft, key: str) -> None:
    """The reward ``model``, of which there is one."""
    path: Any = draft.word(key)
    if not path:
        return
    entry = {"name": "model", "options": {"path": str(path)}}
    if all(reward["name"] != "model" for reward in draft.rewards):
        draft.rewards.append(entry)
    if entry in draft.rewards:
        draft.note(key, "mapped", f"rewards: model, of {path}")
    else:
        draft.lack([key], "reward_model", "there is one reward model")


def set_smoothing(draft: Draft, key: str) -> None:
    """``preference.label_smoothing``, which only some losses read."""
    share, loss = draft.number(key), draft.result.get("preference.loss", "sigmoid")
    if share and (loss not in SMOOTHED or not 0 < share < 0.5):
        draft.lack([key], "preferences", f"{share} with {loss}; less than 0.5, and {', '.join(SMOOTHED)} only")
    elif share is not None:
        draft.set("preference.label_smoothing", share, [key])
