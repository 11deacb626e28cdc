"""Adapters, critic, reward model and routers of verl."""

from __future__ import annotations

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


def router(draft: Draft) -> None:
    """Their bridges turn the balancing loss off, whatever its weight, unless its kind is given; the z-loss counts."""
    prefix = "actor_rollout_ref.actor.megatron.override_transformer_config.moe_"
    kind_key, balance_key = f"{prefix}router_load_balancing_type", f"{prefix}aux_loss_coeff"
    kind = draft.word(kind_key, default="none")
    kinds = {"aux_loss": "microbatch", "seq_aux_loss": "sequence"}
    if kind in kinds:
        draft.set("router.aux_loss", draft.number(balance_key, default=0.0), [balance_key])
        draft.set("router.aux_loss_over", kinds[str(kind)], [kind_key])
    elif kind == "none":
        draft.note(kind_key, "same", "off, as here")
        draft.same([balance_key], "no_balancing")
        if draft.get("actor_rollout_ref.actor.megatron.vanilla_mbridge") and draft.number(balance_key):
            draft.notes.append("router.aux_loss: 0; mbridge, which is outside of verl, may balance some families")
    else:
        draft.lack([kind_key, balance_key], "router", repr(kind))
    for part, ours in (("z_loss_coeff", "z_loss"), ("router_bias_update_rate", "bias_update_rate")):
        if weight := draft.number(f"{prefix}{part}"):
            draft.set(f"router.{ours}", weight, [f"{prefix}{part}"])
        else:
            draft.note(f"{prefix}{part}", "same", "off, as here")
