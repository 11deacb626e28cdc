"""Stages, adapters, preferences and PPO of TRL and LLaMA-Factory."""

from __future__ import annotations

from typing import Any, cast

from mega_rl.errors import InputError, shown
from mega_rl.importers.draft.draft import Draft, Stage
from mega_rl.importers.draft.units import as_list, exact
from mega_rl.importers.rules.learned import (
    AdapterKeys,
    CriticKeys,
    add_reward_model,
    has_critic,
    module_names,
    set_adapter,
    set_critic,
    set_smoothing,
    set_stage,
)

# What stands in the name of a program of TRL; the first counts.
NO_TASKS = ("online_dpo", "onlinedpo", "nash", "xpo", "bco", "tpo", "prm", "gkd", "gold", "distillation")
TASKS: dict[str, Stage] = {
    "grpo": "rl", "rloo": "rl", "sft": "sft", "orpo": "dpo", "cpo": "dpo", "kto": "kto", "dpo": "dpo",
    "reward": "rm", "ppo": "rl",
}  # fmt: skip
KEYS_OF_TASKS = {  # where no program is named
    "grpo": ("num_generations", "max_completion_length", "reward_funcs"),
    "ppo": ("num_ppo_epochs", "sft_model_path", "vf_coef"),
    "kto": ("desirable_weight", "undesirable_weight"),
    "reward": ("center_rewards_coefficient",),
    "cpo": ("cpo_alpha",),
    "dpo": ("precompute_ref_log_probs", "label_smoothing", "loss_weights", "rpo_alpha", "ld_alpha"),
}
PAIR_LOSSES = {
    name: name for name in ("sigmoid", "hinge", "ipo", "robust", "apo_zero", "apo_down", "simpo", "orpo")
} | {"sppo_hard": "sppo"}
TRL_ADAPTER = AdapterKeys(
    switches=("use_peft",),
    rank=("lora_r",),
    alpha=("lora_alpha",),
    targets=("lora_target_modules",),
    rslora=("use_rslora",),
    also=("lora_modules_to_save",),
    dropout=("lora_dropout",),
)
PEFT = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}  # what its own class has by default
LLAMAFACTORY_ADAPTER = AdapterKeys(
    switches=("finetuning_type", "peft_config.name"),
    rank=("lora_rank", "peft_config.r"),
    alpha=("lora_alpha", "peft_config.lora_alpha"),
    targets=("lora_target", "peft_config.target_modules"),
    rslora=("use_rslora", "peft_config.use_rslora"),
    also=("additional_target", "peft_config.modules_to_save"),
    path=("adapter_name_or_path", "peft_config.adapter_name_or_path"),
    new=("create_new_adapter",),
    dropout=("lora_dropout", "peft_config.lora_dropout"),
)
CRITIC = CriticKeys(gamma=("gamma",), lam=("lam",), clip=("cliprange_value",))


def task_of_program(draft: Draft) -> str:
    """``grpo``, ``sft``, ``dpo`` ...: from the words of the command, else from the keys that are given."""
    words = " ".join(word.rpartition("/")[2] for word in draft.given.program).lower()
    found = next((task for task in (*NO_TASKS, *TASKS) if task in words), None)
    return found or next((task for task, keys in KEYS_OF_TASKS.items() if draft.has(*keys)), "sft")


def is_asynchronous(draft: Draft) -> bool:
    """Whether the program is the experimental one that samples while it trains."""
    words = (word.rpartition("/")[2].lower().replace("_", "") for word in draft.given.program)
    return draft.table.name == "trl" and any("asyncgrpo" in word for word in words)


def trl_program(draft: Draft) -> str:
    if is_asynchronous(draft):
        return "async_grpo"
    task = task_of_program(draft)
    return "sft" if task in NO_TASKS else task


def trl_stage(draft: Draft) -> None:
    task = task_of_program(draft)
    if task in NO_TASKS:
        draft.notes.append(f"trainer.stage: {task} is not converted; only what supervised training shares is set")
    set_stage(draft, TASKS.get(task, "sft"))
    if task == "rloo":
        draft.set("algorithm.advantage", "rloo")
    is_of_peft = any("LoraConfig" in word for word in draft.given.program)
    if is_of_peft:
        draft.defaults |= PEFT
    is_on = is_of_peft or bool(draft.get("use_peft", "use_lora"))
    set_adapter(draft, TRL_ADAPTER, is_on, rank=16, alpha=32, targets=("q_proj", "v_proj"))
    draft.note("use_lora", "mapped" if is_on else "same", "tuning.method = lora" if is_on else "off, as here")
    if is_on and not draft.has("lora_target_modules"):
        draft.notes.append("tuning.adapter.targets: PEFT's default depends on the model; q_proj and v_proj of most")


def begin_ppo(draft: Draft) -> None:
    """What the sizes of batches go by."""
    if task_of_program(draft) != "ppo":
        return
    draft.set("algorithm.advantage", "gae")
    draft.set("rollout.n", 1)
    draft.set("data.max_response_length", draft.count("response_length", default=53), ["response_length"])
    if draft.word("sft_model_path"):
        draft.set("model.path", str(draft.word("sft_model_path")), ["sft_model_path"])


def trl_ppo(draft: Draft) -> None:
    """Policy and critic have one optimizer there; an episode is one response."""
    is_on = has_critic(draft)
    frozen_rate = float(draft.result.get("optimizer.lr") or 3e-6)
    set_critic(draft, CRITIC, is_on, lr=frozen_rate, lam=0.95, clip=0.2, frozen=0)
    keys = ("num_mini_batches", "total_episodes", "kl_coef", "cliprange", "num_ppo_epochs", "reward_model_path")
    if not is_on:
        for key in keys:
            draft.note(key, "same", "read by PPO only")
        return
    batch = int(draft.result.get("data.train_batch_size", 1))
    draft.set("algorithm.minibatches_per_step", draft.count("num_mini_batches", default=1), ["num_mini_batches"])
    episodes = draft.count("total_episodes")
    if episodes:
        draft.set("trainer.total_steps", exact(episodes, batch, "trainer.total_steps", draft), ["total_episodes"])
    draft.set("algorithm.kl_coefficient", draft.number("kl_coef", default=0.05), ["kl_coef"])
    draft.set("algorithm.kl_in", "reward")
    draft.set("algorithm.kl_estimator", draft.word("kl_estimator", default="k1"), ["kl_estimator"])
    for ours in ("clip_ratio_low", "clip_ratio_high"):
        draft.set(f"algorithm.{ours}", draft.number("cliprange", default=0.2), ["cliprange"])
    passes = draft.number("num_ppo_epochs", default=4)
    if passes == 1:
        draft.note("num_ppo_epochs", "same", "1, as here")
    else:
        draft.lack(["num_ppo_epochs"], "several_passes", shown(passes))
    add_reward_model(draft, "reward_model_path")
    if path := draft.word("value_model_path", "reward_model_path"):
        draft.set("critic.path", str(path), ["value_model_path", "reward_model_path"])


def trl_preferences(draft: Draft) -> None:
    """The keys that the losses of several stages share, by the stage."""
    beta = draft.number("beta") if draft.has("beta") else None
    if draft.stage == "rl" and not has_critic(draft):
        weight = draft.number("beta", default=0.0)
        draft.set("algorithm.kl_coefficient", weight, ["beta"])
        if weight and task_of_program(draft) == "rloo":
            draft.set("algorithm.kl_in", "reward")
            draft.set("algorithm.kl_estimator", "k1")
            draft.lack(["beta"], "kl_before_baseline")
            draft.notes.append("algorithm.kl_in: theirs lowers rewards before the baseline, ours advantages after it")
    elif draft.stage == "kto":
        draft.set("kto.beta", 0.1 if beta is None else beta, ["beta"])
        for name in ("desirable", "undesirable"):
            draft.set(f"kto.{name}_weight", draft.number(f"{name}_weight", default=1.0), [f"{name}_weight"])
        if draft.has("loss_type") and as_list(draft.get("loss_type")) != ["kto"]:
            draft.lack(["loss_type"], "preferences", shown(draft.get("loss_type")))
    elif draft.stage == "dpo":
        draft.set("preference.beta", 0.1 if beta is None else beta, ["beta"])
        _pairs(draft, task_of_program(draft))
    elif draft.stage == "rm" and draft.number("center_rewards_coefficient") is not None:
        key = "center_rewards_coefficient"
        draft.set("reward_model.centre", draft.number(key), [key])


def _pairs(draft: Draft, task: str) -> None:
    names = [str(name) for name in as_list(draft.get("loss_type"))] if draft.has("loss_type") else ["sigmoid"]
    if task == "orpo":
        draft.set("preference.loss", "orpo")
        return
    if task == "cpo" and names != ["simpo"]:
        draft.lack(["loss_type"], "preferences", f"{', '.join(names)} without a reference")
        draft.notes.append("preference.loss: CPO without a reference is not there; sigmoid compares with one")
        return
    weights = as_list(draft.get("loss_weights")) or [1.0] * len(names)
    if len(weights) != len(names) or not all(isinstance(weight, int | float) for weight in weights):
        raise InputError(f"loss_weights is {shown(draft.get('loss_weights'))}: give one number for each loss_type")
    shares = dict(zip(names, weights, strict=True))
    supervised = shares.pop("sft", 0.0)
    main = next(iter(shares), "sigmoid")
    if len(shares) > 1 or main not in PAIR_LOSSES or not shares.get(main, 1.0):
        draft.lack(["loss_type", "loss_weights"], "preferences", ", ".join(names))
        return
    draft.set("preference.loss", PAIR_LOSSES[main], ["loss_type"])
    coefficient = supervised / shares.get(main, 1.0) or draft.number("rpo_alpha") or 0.0
    if task == "cpo":
        coefficient = draft.number("cpo_alpha", default=1.0) or 0.0
        draft.set("preference.simpo_gamma", draft.number("simpo_gamma", default=0.5), ["simpo_gamma"])
    if coefficient:
        draft.set("preference.sft_coefficient", coefficient, ["loss_weights", "rpo_alpha", "cpo_alpha"])
    set_smoothing(draft, "label_smoothing")
    if main == "sigmoid" and draft.result.get("preference.label_smoothing"):
        draft.notes.append("preference.label_smoothing: newer versions of TRL read it with the loss robust only")


def llamafactory_program(draft: Draft) -> str:
    """Version 1 has other names; of keys that both have, theirs is the version whose names stand beside them."""
    return "v1" if draft.has("model") and not draft.has("stage", "model_name_or_path") else "v0"


def llamafactory_stage(draft: Draft) -> None:
    given = str(draft.word("stage", default="dpo" if draft.has("pref_loss") else "sft"))
    if given in ("pt", "sft", "rm", "dpo", "kto"):
        set_stage(draft, cast(Stage, given), ("stage",))
    elif given == "ppo":
        set_stage(draft, "rl", ("stage",))
        _llamafactory_ppo(draft)
    else:
        set_stage(draft, "sft")
        draft.lack(["stage"], "other_word", shown(given))
    if name := draft.word("template"):
        draft.notes.append(f"data.chat_template: that of the tokenizer stands for their template {name}: check it")
    if draft.get("model_class", default="llm") != "llm":
        draft.lack(["model_class"], "vision", shown(draft.get("model_class")))
    for key in ("max_new_tokens", "temperature") if draft.stage != "rl" else ():
        if draft.get("do_predict") or draft.get("predict_with_generate"):
            draft.lack([key], "evaluation")
        else:
            draft.note(key, "same", "read by its prediction and its chat, which a training has none of")
    seen = [name for name in as_list(draft.get("dataset", "eval_dataset")) if "video" in str(name).lower()]
    for key in [key for key in draft.given.values if key.startswith("video_")]:
        if seen:
            draft.lack([key], "vision", ", ".join(map(str, seen)))
        else:
            draft.note(key, "same", "read for videos, of which the data sets have none by their names")
    _tuning(draft)


def _tuning(draft: Draft) -> None:
    """Version 0 trains adapters unless it is told otherwise, version 1 the whole model."""
    default = "full" if llamafactory_program(draft) == "v1" else "lora"
    kind = draft.word("finetuning_type", "peft_config.name", default=default)
    is_new = draft.has("peft_config.name")
    alpha = 16 if is_new else None
    set_adapter(draft, LLAMAFACTORY_ADAPTER, kind == "lora", rank=8, alpha=alpha)
    switches = LLAMAFACTORY_ADAPTER.switches
    if kind == "lora" and not draft.has(*switches):
        draft.notes.append("tuning.method: theirs is lora by default, so it is set here")
    layers, modules, extra = (
        (f"freeze_{name}", f"peft_config.freeze_{name}")
        for name in ("trainable_layers", "trainable_modules", "extra_modules")
    )
    if kind == "full":
        for key in switches:
            draft.set("tuning.method", "full")
            draft.note(key, "mapped", "tuning.method = full")
    elif kind == "freeze" and draft.stage == "rm":
        draft.lack((*switches, *layers, *modules, *extra), "whole_values")
    elif kind == "freeze":
        draft.set("tuning.method", "freeze", switches)
        number = int(draft.number(*layers, default=2) or 2)
        draft.set("tuning.train_layers", number, layers)
        chosen = as_list(draft.get(*modules, default="all"))
        if len(chosen) == 1 and chosen[0] in ("all", "mlp", "self_attn"):
            draft.set("tuning.train_modules", chosen[0], modules)
        else:
            draft.lack(modules, "other_word", f"{shown(chosen)}; there are all, mlp, self_attn")
        if also := module_names(draft, extra):
            draft.set("tuning.also_train", also, extra)
    elif kind != "lora":
        draft.lack(switches, "lora", shown(kind))
    if kind != "freeze":
        for key in (*layers, *modules, *extra):
            draft.note(key, "same", "read by freeze only")


def _llamafactory_ppo(draft: Draft) -> None:
    """Policy and critic share one body and one optimizer there, and the prompt alone is cut."""
    draft.set("data.max_prompt_length", draft.count("cutoff_len", default=2048), ["cutoff_len"])
    draft.set("rollout.n", 1)
    draft.set("data.max_response_length", draft.count("max_new_tokens", default=1024), ["max_new_tokens"])
    draft.set("rollout.temperature", draft.number("temperature", default=0.95), ["temperature"])
    passes = draft.number("ppo_epochs", default=4)
    if passes != 1:
        draft.lack(["ppo_epochs"], "several_passes", shown(passes))
    if draft.word("reward_model_type", default="lora") == "full":
        add_reward_model(draft, "reward_model")
        draft.notes.append("rewards: the reward model must be a sequence classifier; a value head of theirs is not")
    else:
        draft.lack(("reward_model", "reward_model_type"), "whole_values")
    rate = draft.number("learning_rate", default=5e-5) or 5e-5
    set_critic(draft, CriticKeys(), True, lr=rate, lam=0.95, clip=0.2, frozen=0)
    draft.set("algorithm.kl_in", "reward")
    draft.set("algorithm.kl_estimator", "k1")
    draft.notes.append("algorithm.kl_coefficient: theirs adapts it to a target; ours is fixed, so choose one")


def llamafactory_preferences(draft: Draft) -> None:
    beta = draft.number("pref_beta", default=0.1)
    if draft.stage == "kto":
        draft.set("kto.beta", beta, ["pref_beta"])
        for theirs, ours in (("kto_chosen_weight", "desirable"), ("kto_rejected_weight", "undesirable")):
            draft.set(f"kto.{ours}_weight", draft.number(theirs, default=1.0), [theirs])
    elif draft.stage == "dpo":
        loss: Any = draft.word("pref_loss", default="sigmoid")
        if loss in PAIR_LOSSES:
            draft.set("preference.loss", PAIR_LOSSES[loss], ["pref_loss"])
        else:
            draft.lack(["pref_loss"], "preferences", shown(loss))
        draft.set("preference.beta", beta, ["pref_beta"])
        if draft.has("simpo_gamma"):
            draft.set("preference.simpo_gamma", draft.number("simpo_gamma"), ["simpo_gamma"])
        if draft.has("pref_ftx"):
            draft.set("preference.sft_coefficient", draft.number("pref_ftx") or 0.0, ["pref_ftx"])
        set_smoothing(draft, "dpo_label_smoothing")


def swanlab(draft: Draft, trackers: list[str]) -> None:
    """``report_to`` names the tracker, or a switch of LLaMA-Factory does."""
    if "swanlab" in trackers or draft.get("use_swanlab"):
        default = "llamafactory" if draft.table.name == "llamafactory" else "huggingface"
        project = str(draft.word("swanlab_project", default=default))
        draft.set("logging.swanlab_project", project, ["report_to", "use_swanlab", "swanlab_project"])
