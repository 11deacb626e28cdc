"""What follows from several arguments of ms-swift together, with Megatron and without."""

from __future__ import annotations

import math
from typing import Any

from mega_rl.config.reading.tables import table
from mega_rl.errors import shown
from mega_rl.importers.draft.draft import Draft, Rule, Stage
from mega_rl.importers.draft.units import as_list, exact, set_global_batch
from mega_rl.importers.rules import hf, megatron
from mega_rl.importers.rules.hf_learned import PAIR_LOSSES
from mega_rl.importers.rules.learned import (
    AdapterKeys,
    add_reward_model,
    sequences_per_row,
    set_adapter,
    set_smoothing,
    set_stage,
)

ADAPTER = AdapterKeys(
    switches=("tuner_type",),
    rank=("lora_rank",),
    alpha=("lora_alpha",),
    targets=("target_modules",),
    rslora=("use_rslora",),
    also=("modules_to_save",),
    path=("adapters",),
    dropout=("lora_dropout",),
)
# Their rlhf_type -> our stage; simpo, cpo and orpo are losses on pairs.
STAGES: dict[str, Stage] = {
    "grpo": "rl", "dpo": "dpo", "orpo": "dpo", "simpo": "dpo", "cpo": "dpo", "kto": "kto", "rm": "rm",
}  # fmt: skip
WORDS = ("megatron", "swift", "rlhf", "sft", "pt")
TARGET_BATCH = 16  # sequences that swift accumulates to, where nothing is said
REWARDS: dict[str, dict[str, Any]] = {
    "accuracy": {"name": "math_verify"},
    "format": {"name": "format_regex", "options": {"pattern": r"^<think>.*?</think>\s*<answer>.*?</answer>(?![\s\S])"}},
}
GENERATED = 2048  # tokens of prompt or conversation, where theirs go up to what the model takes


def keys_of(rule: str) -> list[str]:
    return list(table("swift").find_rule(rule))


def _words(draft: Draft) -> list[str]:
    return [word for word in draft.given.program if word in WORDS]


def is_megatron(draft: Draft) -> bool:
    """By the command, else by names that only the arguments of Megatron have."""
    words = _words(draft)
    if "megatron" in words or "swift" in words:
        return "megatron" in words
    return draft.has("global_batch_size", "micro_batch_size", "lr", "train_iters")


def program(draft: Draft) -> str:
    if is_megatron(draft):
        return "megatron"
    return "rlhf" if "rlhf" in _words(draft) or draft.has("rlhf_type") else "sft"


def stage(draft: Draft) -> None:
    kind = draft.word("rlhf_type") if "rlhf" in _words(draft) or draft.has("rlhf_type") else None
    if kind == "grpo" and draft.defaults.get("loss_type") is None:
        draft.defaults["loss_type"] = "grpo"
    if kind is None:
        set_stage(draft, "pt" if "pt" in _words(draft) else "sft")
    elif kind in STAGES:
        set_stage(draft, STAGES[str(kind)], ("rlhf_type",))
    else:
        set_stage(draft, "sft")
        if kind == "gkd":
            draft.lack(["rlhf_type"], "distillation")
        else:
            draft.lack(["rlhf_type"], "other_word", f"{shown(kind)} is not converted; docs/ppo.md has ours")
    task = draft.word("task_type")
    if task not in (None, "causal_lm"):
        draft.lack(["task_type"], "other_task", shown(task))
    draft.note("task_type", "same", "as here")
    _devices(draft)
    tuner = draft.word("tuner_type")
    is_on = tuner == "lora" or bool(as_list(draft.get("adapters")))
    set_adapter(draft, ADAPTER, is_on, rank=8, alpha=32)
    if not is_on:
        draft.outcomes.pop("tuner_type", None)
        if tuner == "full":
            draft.set("tuning.method", "full", ["tuner_type"])
        else:
            draft.lack(["tuner_type"], "lora", shown(tuner))
    rate = draft.number("lr" if is_megatron(draft) else "learning_rate")
    if rate is None:
        rate = 1e-5 if tuner == "full" else 1e-4
    draft.set("optimizer.lr", rate, ["lr"] if is_megatron(draft) else [])
    draft.note("lr", "same", "read with Megatron only")


def _devices(draft: Draft) -> None:
    """As torchrun is told them, by its flags or by variables."""
    told = [
        draft.count(flag, default=int(text) if text.isdigit() else None)
        for flag, text in (
            (name.lower(), draft.given.environment.get(name, "")) for name in ("NPROC_PER_NODE", "NNODES")
        )
    ]
    per_node, nodes = told[0], told[1] or 1
    if per_node:
        draft.num_devices = per_node * nodes
    for key in ("nproc_per_node", "nnodes"):
        draft.note(key, "mapped", f"torchrun --nnodes {nodes} --nproc-per-node {per_node}")


def layout(draft: Draft) -> None:
    """Without Megatron sequences alone are divided."""
    if is_megatron(draft):
        megatron.layout(draft)
    ranks = draft.count("sequence_parallel_size", default=1) or 1
    if ranks > 1:
        draft.set("parallel.context", ranks, ["sequence_parallel_size"])
    for key in keys_of("layout"):
        draft.note(key, "same", "1, as here")
    megatron.router(draft)
    weight = draft.number("router_aux_loss_coef")
    if not is_megatron(draft) and weight and megatron.has_experts(draft):
        draft.set("router.aux_loss", weight, ["router_aux_loss_coef"])
    draft.note("router_aux_loss_coef", "same", "off, or the model has no experts")


def lengths(draft: Draft) -> None:
    """``max_length`` is of the prompt where responses are sampled, else of the conversation."""
    longest = draft.count("max_length", default=GENERATED) or GENERATED
    if not draft.has("max_length"):
        draft.notes.append(f"data.max_prompt_length: theirs is what the model takes; {longest} is set: check it")
    if draft.stage == "rl":
        draft.set("data.max_prompt_length", longest, ["max_length"])
    else:
        draft.set("data.max_prompt_length", max(1, longest // 2), ["max_length"])
        draft.set("data.max_response_length", max(1, longest - longest // 2), ["max_length"])


def batches(draft: Draft) -> None:
    """Both batches count completions where they are sampled; several optimizer steps may share what was sampled."""
    sequences, keys = _sequences(draft)
    micro = draft.count("micro_batch_size" if is_megatron(draft) else "per_device_train_batch_size", default=1) or 1
    longest = int(draft.result.get("data.max_prompt_length", GENERATED))
    longest += int(
        draft.result.get("data.max_response_length", draft.number("max_completion_length", default=512) or 1)
    )
    if draft.stage != "rl":
        draft.set("data.train_batch_size", sequences, keys)
    else:
        spans = 1 if is_megatron(draft) else draft.count("gradient_accumulation_steps", default=1) or 1
        rounds = draft.count("steps_per_generation", default=spans) or spans
        generated = draft.count("generation_batch_size", default=sequences * rounds // spans) or sequences
        generated = max(generated, sequences)  # an optimizer step may take several rounds of sampling
        per_prompt = draft.count("num_generations", default=8) or 8
        keys += ["steps_per_generation", "generation_batch_size"]
        draft.set("data.train_batch_size", exact(generated, per_prompt, "data.train_batch_size", draft), keys)
        updates = exact(generated, sequences, "algorithm.minibatches_per_step", draft)
        draft.set("algorithm.minibatches_per_step", updates, keys)
    megatron.tokens(draft, ["micro_batch_size"], None, micro * sequences_per_row(draft), longest)
    _steps(draft)


def _sequences(draft: Draft) -> tuple[int, list[str]]:
    """Of one optimizer step, and the keys that say it."""
    if is_megatron(draft):
        return draft.count("global_batch_size", default=TARGET_BATCH) or TARGET_BATCH, ["global_batch_size"]
    keys = ["per_device_train_batch_size", "gradient_accumulation_steps"]
    per_device = draft.count(keys[0], default=1) or 1
    spans = draft.count(keys[1])
    if spans is None and draft.stage == "rl":
        spans = 1
    elif spans is None:
        spans = max(1, math.ceil(TARGET_BATCH / per_device / (draft.num_devices or 1)))
    return set_global_batch(draft, keys, per_device, spans), keys


def _steps(draft: Draft) -> None:
    """Iterations of Megatron are optimizer steps."""
    if not is_megatron(draft):
        hf.steps(draft)
        return
    per_step = draft.result.get("algorithm.minibatches_per_step", 1)
    number, epochs = draft.count("train_iters"), draft.number("num_train_epochs")
    if number:
        draft.set("trainer.total_steps", exact(number, per_step, "trainer.total_steps", draft), ["train_iters"])
        draft.note("num_train_epochs", "same", "not read, as train_iters is given")
    elif epochs:
        draft.set("trainer.total_epochs", exact(epochs, 1, "trainer.total_epochs", draft), ["num_train_epochs"])
    megatron.schedule(draft)
    hf.intervals(draft, per_step)


def loss(draft: Draft) -> None:
    weight = draft.number("beta") if draft.has("beta") else None
    if draft.stage == "rl":
        hf.loss(draft)
        _advantage(draft, 0.04 if weight is None else weight)
        _correction(draft)
        return
    for rule in ("advantage", "correction", "clip", "sampling_groups"):
        draft.same(keys_of(rule), "only_rl")
    kind, task = draft.word("loss_type"), draft.word("rlhf_type")
    if draft.stage == "dpo":
        found = "orpo" if task == "orpo" else "simpo" if task == "simpo" and kind is None else kind or "sigmoid"
        if found not in PAIR_LOSSES or (task == "cpo" and found != "simpo"):
            draft.lack(["loss_type"], "preferences", f"{shown(found)} of {task}")
        else:
            draft.set("preference.loss", PAIR_LOSSES[str(found)], ["loss_type"])
        default = 2.0 if task == "simpo" else 0.1
        draft.set("preference.beta", default if weight is None else weight, ["beta"])
        share = draft.number("cpo_alpha", default=1.0) if task in ("cpo", "simpo") else draft.number("rpo_alpha")
        if share:
            draft.set("preference.sft_coefficient", share, ["cpo_alpha", "rpo_alpha"])
        if task in ("cpo", "simpo"):
            draft.set("preference.simpo_gamma", draft.number("simpo_gamma", default=1.0), ["simpo_gamma"])
        set_smoothing(draft, "label_smoothing")
    elif draft.stage == "kto":
        draft.set("kto.beta", 0.1 if weight is None else weight, ["beta"])
        for side in ("desirable", "undesirable"):
            draft.set(f"kto.{side}_weight", draft.number(f"{side}_weight", default=1.0), [f"{side}_weight"])
        if kind not in (None, "kto"):
            draft.lack(["loss_type"], "preferences", shown(kind))
    elif draft.stage == "rm" and draft.number("center_rewards_coefficient"):
        draft.set("reward_model.centre", draft.number("center_rewards_coefficient"), ["center_rewards_coefficient"])
    elif draft.stage == "sft" and kind is not None:
        draft.lack(["loss_type"], "other_loss", shown(kind))


def _advantage(draft: Draft, weight: float) -> None:
    """RLOO has no deviation, and its KL in the reward, unless told otherwise."""
    name, keys = draft.word("advantage_estimator", default="grpo"), ["advantage_estimator"]
    if name == "rloo":
        draft.set("algorithm.advantage", "rloo", keys)
        if draft.word("scale_rewards", default="none") != "none":
            draft.lack(["scale_rewards"], "other_advantage", f"rloo by {shown(draft.get('scale_rewards'))}")
    elif name == "grpo":
        draft.note("advantage_estimator", "mapped", f"algorithm.advantage = {draft.result['algorithm.advantage']}")
    else:
        draft.lack(keys, "other_advantage", shown(name))
    draft.set("algorithm.kl_coefficient", weight, ["beta"])
    given = draft.get("kl_in_reward", default=name != "grpo")
    if given and weight:
        draft.set("algorithm.kl_in", "reward")
        draft.lack(["kl_in_reward"], "kl_before_baseline")
        if not draft.has("kl_in_reward"):
            draft.notes.append("algorithm.kl_in: theirs lowers rewards before the baseline, another objective")
    draft.note("kl_in_reward", "same", "in the loss, as here, or there is no KL")
    draft.set("rollout.temperature", draft.number("temperature", default=0.9), ["temperature"])
    if draft.get("dynamic_sample"):
        draft.set("algorithm.dynamic_sampling.enabled", True, ["dynamic_sample"])
        times = draft.count("max_resample_times", default=3) or 3
        draft.set("algorithm.dynamic_sampling.budget", float(1 + times), ["max_resample_times"])
    for key in keys_of("sampling_groups"):
        draft.note(key, "same", "off, as here")


def _correction(draft: Draft) -> None:
    mode_key, cap_key = keys_of("correction")
    level, _, how = str(draft.word(mode_key, default="")).partition("_")
    if how not in ("truncate", "mask") or level not in ("token", "sequence"):
        draft.set("algorithm.importance_cap", None, [mode_key] if draft.get(mode_key) is None else [])
        if draft.get(mode_key) is not None:
            draft.lack([mode_key], "other_word", shown(draft.get(mode_key)))
        draft.note(cap_key, "same", "not read without a mode")
        return
    draft.set("algorithm.importance_level", level, [mode_key])
    draft.set("algorithm.importance_correction", how, [mode_key])
    draft.set("algorithm.importance_cap", draft.number(cap_key, default=2.0), [cap_key])


def rewards(draft: Draft) -> None:
    if draft.stage != "rl":
        for rule in ("reward", "reward_model"):
            draft.same(keys_of(rule), "only_rl")
        return
    names, shares = as_list(draft.get("reward_funcs")), as_list(draft.get("reward_weights"))
    for place, name in enumerate(str(part) for part in names):
        entry = dict(REWARDS.get(name, {}))
        if name == "soft_overlong" and (buffer := draft.count("soft_cache_length")):
            longest = draft.count("soft_max_length") or draft.count("max_completion_length", default=512)
            entry = {"name": "overlong", "options": {"max_length": longest, "buffer": buffer}}
            for key in ("soft_cache_length", "soft_max_length"):
                draft.note(key, "mapped", "rewards: overlong")
        if not entry:
            draft.lack(["reward_funcs"], "verifier", f"{shown(name)} has none; a function of a plugin can be named")
            continue
        if place < len(shares) and isinstance(shares[place], int | float):
            entry["weight"] = float(shares[place])
        draft.rewards.append(entry)
        draft.note("reward_funcs", "mapped", f"rewards: {entry['name']}")
    draft.note("reward_weights", "mapped", "rewards: weight")
    for key in ("soft_cache_length", "soft_max_length"):
        draft.note(key, "same", "read by soft_overlong only")
    models = as_list(draft.get("reward_model"))
    if len(models) == 1:
        add_reward_model(draft, "reward_model")
    elif models:
        draft.lack(["reward_model"], "reward_model", "there is one reward model")


def rest(draft: Draft) -> None:
    hf.rest(draft)
    if is_megatron(draft):
        megatron.recompute(draft)
        megatron.optimizer_on_host(draft)
    for rule in ("recompute", "offload"):
        for key in keys_of(rule):
            draft.note(key, "same", "off, as here") if not draft.get(key) else None
    _engines(draft)
    parts = {"offload_model": ["weights", "gradients"], "offload_optimizer": ["optimizer"]}
    on_host = bool(draft.result.get("memory.optimizer_on_host"))
    chosen = [part for key, names in parts.items() if draft.get(key) for part in names]
    chosen = [part for part in chosen if part != "optimizer" or not on_host]
    if chosen and draft.stage == "rl":
        draft.set("memory.offload", chosen, [key for key in parts if draft.get(key)])
    dtype = str(draft.word("torch_dtype", default="")).removeprefix("torch.")
    is_float32 = dtype == "float32" or (draft.has("bf16") and draft.get("bf16") is False)
    draft.set("model.dtype", "float32" if is_float32 else "bfloat16", ["bf16", "torch_dtype"])
    if not is_megatron(draft):
        return
    trackers = [str(name) for name in as_list(draft.get("report_to"))]
    if "wandb" in trackers:
        draft.set("logging.wandb_project", str(draft.word("wandb_project")), ["report_to", "wandb_project"])


def prompts(draft: Draft) -> None:
    """The system message, which may be a file there, and the answers that are learnt from."""
    text, scale = draft.word("system"), draft.word("loss_scale")
    told = draft.given.environment.get("MAX_PIXELS", "")
    pixels = draft.count("max_pixels", "ENV.MAX_PIXELS", default=int(told) if told.isdigit() else None)
    if pixels:
        draft.set("data.max_pixels", pixels, keys_of("pictures"))
    for key in keys_of("pictures"):
        draft.note(key, "same", "no limit of its own")
    if isinstance(text, str) and text.endswith(".txt"):
        draft.lack(["system"], "other_word", "a file; give its text as data.system_prompt")
    elif text is not None:
        draft.set("data.system_prompt", str(text), ["system"])
    if draft.stage == "sft" and scale not in (None, "default"):
        draft.lack(["loss_scale"], "loss_mask", shown(scale))
    draft.note("loss_scale", "same", "as it is here")


def _engines(draft: Draft) -> None:
    """Through Ray, engines have devices of their own unless a group shares them."""
    devices, groups = draft.count("rollout_gpus"), draft.get("colocate_groups", default=[])
    is_shared = any("train" in as_list(group) and "rollout" in as_list(group) for group in as_list(groups))
    if not draft.has("use_vllm", "vllm_mode", "rollout_gpus"):
        draft.result.pop("rollout.placement", None)
    elif devices and not is_shared:
        draft.set("rollout.placement", "separate", ["rollout_gpus"])
        number = max(1, devices // (draft.count("vllm_tensor_parallel_size", default=1) or 1))
        draft.set("rollout.num_engines", number, ["rollout_gpus"])
    elif devices:
        draft.set("rollout.placement", "colocated", ["rollout_gpus", "colocate_groups"])
    for key in ("rollout_gpus", "colocate_groups"):
        draft.note(key, "same", "engines and trainer share nothing else")


def files(draft: Draft) -> None:
    """Names of data sets, with how many rows of each are read behind ``#``."""
    for key, ours, name in (("dataset", "train_files", "train"), ("val_dataset", "val_files", "test")):
        made, limits = [], []
        for part in (str(part) for part in as_list(draft.get(key))):
            plain, _, limit = part.partition("#")
            plain = plain.partition(":")[0]
            is_file = plain.endswith((".json", ".jsonl", ".parquet"))
            made.append(plain if is_file else f"data/{plain.rstrip('/').rpartition('/')[2]}/{name}.jsonl")
            limits += [part] if limit else []
        if made:
            draft.set(f"data.{ours}", made, [key])
            draft.notes.append(f"data.{ours}: nothing is downloaded; put the data there, or name your files")
        if limits:
            draft.lack([key], "row_limit", ", ".join(limits))


RULES: dict[str, Rule] = {
    "stage": stage,
    "layout": layout,
    "lengths": lengths,
    "batches": batches,
    "loss": loss,
    "rewards": rewards,
    "prompts": prompts,
    "files": files,
    "rest": rest,
}
