"""Adapters, critic, rewards and data sets of verl."""

from __future__ import annotations

from typing import Any

from mega_rl.importers.draft.data_sets import CODE, DAPO, GEOMETRY, GSM8K, KnownData, add_rewards, limit_rows
from mega_rl.importers.draft.draft import Draft
from mega_rl.importers.rules.learned import (
    AdapterKeys,
    CriticKeys,
    add_reward_model,
    has_critic,
    set_adapter,
    set_critic as shared_critic,
)

MODEL, RM = "actor_rollout_ref.model.", "reward_model."
FLAT = AdapterKeys(
    switches=(),
    rank=(f"{MODEL}lora_rank", "model.lora_rank"),
    alpha=(f"{MODEL}lora_alpha", "model.lora_alpha"),
    targets=(f"{MODEL}target_modules", "model.target_modules"),
    exclude=(f"{MODEL}exclude_modules",),
    path=(f"{MODEL}lora_adapter_path",),
)
MEGATRON = AdapterKeys(
    switches=(f"{MODEL}lora.type",),
    rank=(f"{MODEL}lora.rank",),
    alpha=(f"{MODEL}lora.alpha",),
    targets=(f"{MODEL}lora.target_modules",),
    exclude=(f"{MODEL}lora.exclude_modules",),
    path=(f"{MODEL}lora.adapter_path",),
)
MERGE = f"{MODEL}lora.merge"
CRITIC = CriticKeys(
    path=("critic.model.path",),
    lr=("critic.optim.lr",),
    gamma=("algorithm.gamma",),
    lam=("algorithm.lam",),
    clip=("critic.cliprange_value",),
    warmup=("trainer.critic_warmup",),
)
# As the function that chooses verl's reward by data_source has it. Of geometry a tenth is for the form.
_THOUGHT = r"\A<think>.*</think>.*\\boxed\{.*\}"
_GEOMETRY = (
    {"name": "boxed", "weight": 0.9},
    {"name": "format_regex", "weight": 0.1, "options": {"pattern": _THOUGHT}},
)
_MATH = ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "hendrycks_math")
KNOWN = (
    KnownData("gsm8k", GSM8K, ({"name": "gsm8k"},)),
    KnownData("geo3k", GEOMETRY, _GEOMETRY),
    KnownData("geometry3k", GEOMETRY, _GEOMETRY),
    KnownData("dapo", DAPO, ({"name": "dapo_math"},)),
    KnownData("aime", DAPO, ({"name": "dapo_math"},)),
    KnownData("math", _MATH, ({"name": "boxed"},)),
    KnownData("code", CODE, ({"name": "code_tests"},)),
)


def adapter(draft: Draft) -> None:
    """Megatron's keys count before the flat ones, which FSDP reads; either is on from rank 1."""
    is_megatron, kind = bool(draft.count(*MEGATRON.rank)), draft.word(f"{MODEL}lora.type", default="lora")
    if is_megatron and kind not in ("lora", "canonical_lora"):
        draft.lack([f"{MODEL}lora.type"], "lora", repr(kind))
    is_flat = not is_megatron and bool(draft.count(*FLAT.rank) or draft.get(*FLAT.path))
    set_adapter(draft, FLAT, is_flat, rank=8, alpha=16)
    set_adapter(draft, MEGATRON, is_megatron, rank=8, alpha=32)
    if is_megatron and draft.stage == "rl" and draft.get(MERGE):
        draft.set("rollout.adapter", "merged", [MERGE])
    else:
        draft.note(MERGE, "same", "rollout.adapter = auto")


def critic(draft: Draft) -> None:
    """Their critic learns from step 1 on, the policy from step ``critic_warmup``."""
    frozen = int(draft.number(*CRITIC.warmup, default=0) or 0) - 1
    is_on = has_critic(draft)
    shared_critic(draft, CRITIC, is_on, lr=1e-5, lam=1.0, clip=0.5, frozen=frozen)
    policy_batch = draft.count("actor_rollout_ref.actor.ppo_mini_batch_size")
    neutral = {
        "critic.ppo_epochs": (1,),
        "critic.ppo_mini_batch_size": (policy_batch,),
        "critic.model.lora_rank": (0,),
        "critic.enable": (True, None),
        "critic.loss_agg_mode": ("token-mean",),
        "critic.optim.lr_warmup_steps_ratio": (0, 0.0),
        "critic.optim.lr_warmup_steps": (0, -1),
    }
    for key in draft.given.values:
        entry = draft.table.find(key)
        if not key.startswith("critic.") or key in CRITIC.names() or entry is None or entry.reason != "critic":
            continue
        if not is_on or draft.get(key) in neutral.get(key, ()):
            draft.note(key, "same", "as it is here" if is_on else "not read, as there is no critic")
        else:
            draft.lack([key], "whole_values" if "lora" in key else "critic")


def reward_model(draft: Draft) -> None:
    """A discriminative one: with a function of their own beside it, it generates, and the function asks it."""
    switch, path = f"{RM}enable", f"{RM}model.path"
    if not draft.get(switch):
        for key in (switch, path):
            draft.note(key, "same", "there is no reward model")
    elif draft.get("custom_reward_function.path", "reward.custom_reward_function.path"):
        draft.lack([switch, path], "reward_model", "a function asks it for words")
    else:
        add_reward_model(draft, path)
        draft.note(switch, "mapped", "rewards: model")


def rows(draft: Draft) -> None:
    """Theirs counts the rows of all files together, and draws them at random if it shuffles."""
    key = "data.train_max_samples"
    limit_rows(draft, key, is_each=False)
    if (
        draft.has(key)
        and draft.outcomes[key].became == "mapped"
        and draft.get("data.shuffle", default=draft.stage == "rl")
    ):
        draft.notes.append("data.train_files: the first rows here, as many as theirs, which are drawn at random")


def rewards(draft: Draft) -> None:
    keys = [key for key in draft.given.values if (entry := draft.table.find(key)) and entry.reason == "reward"]
    if draft.stage != "rl":
        return
    values: dict[str, Any] = {key.removeprefix("reward."): draft.get(key) for key in keys}
    custom = "custom_reward_function."
    path, name = values.get(f"{custom}path"), values.get(f"{custom}name") or "compute_score"
    options = {
        key.rpartition(".")[2]: value for key, value in values.items() if ".reward_kwargs." in key and custom in key
    }
    if path:
        draft.rewards.append({"name": f"{path}:{name}"} | ({"options": options} if options else {}))
    elif not draft.rewards:
        add_rewards(draft, [draft.get("data.train_files")], [draft.get("data.val_files")], KNOWN)
        if not draft.rewards and draft.get("reward_model.reward_manager") == "dapo":
            add_rewards(draft, ["dapo"], known=KNOWN)
    buffer = {key.rpartition(".")[2]: value for key, value in values.items() if "overlong_buffer" in key}
    if buffer.get("enable"):
        longest = values.get("reward_model.reward_kwargs.max_resp_len") or draft.count("data.max_response_length")
        found = {
            "max_length": longest,
            "buffer": buffer.get("len"),
            "factor": float(buffer.get("penalty_factor") or 1.0),
        }
        draft.rewards.append({"name": "overlong", "options": found})
    text = f"rewards: {', '.join(entry['name'] for entry in draft.rewards)}" if draft.rewards else "rewards: none found"
    for key in keys:
        is_used = draft.rewards and (buffer.get("enable") or "overlong" not in key)
        draft.note(key, "mapped" if is_used else "same", text if is_used else "off, as here")
