"""What follows from several keys of TRL or LLaMA-Factory together: both take those of transformers' trainer."""

from __future__ import annotations

import re
from typing import Any

from mega_rl.config.schema.data_file import bounded
from mega_rl.errors import InputError, shown
from mega_rl.importers.draft.data_sets import HELD_OUT, TRAIN, add_rewards, limit_rows
from mega_rl.importers.draft.defaults import default_of
from mega_rl.importers.draft.draft import Draft, Rule
from mega_rl.importers.draft.units import (
    as_list,
    exact,
    note_sharding,
    set_global_batch,
    set_timeout,
    set_tokens,
    set_warmup,
)
from mega_rl.importers.rules.hf_learned import (
    begin_ppo,
    is_asynchronous,
    llamafactory_preferences,
    llamafactory_program,
    llamafactory_stage,
    swanlab,
    trl_ppo,
    trl_preferences,
    trl_stage,
)
from mega_rl.importers.rules.learned import add_reward_model, has_critic, sequences_per_row

BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size", "steps_per_generation")
REDUCTIONS = {
    "grpo": "sequence_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "dr_grpo": "sequence_mean_token_sum_norm",
}
TRL_REWARDS: dict[str, dict[str, Any]] = {
    "accuracy_reward": {"name": "math_verify"},
    "reasoning_accuracy_reward": {"name": "math_verify"},
    "think_format_reward": {
        "name": "format_regex",
        "options": {"pattern": r"^<think>(?!.*<think>)(.*?)</think>.*$"},
    },
    "get_soft_overlong_punishment": {"name": "overlong", "options": {"max_length": 1280, "buffer": 256}},
}
MEGATRON = tuple(f"{axis}_model_parallel_size" for axis in ("tensor", "pipeline", "expert")) + (
    "use_distributed_optimizer",
)  # of LLaMA-Factory, whose models are Megatron's with any of these
TRACKERS = ("none", "tensorboard", "wandb", "swanlab", "all")


def devices(draft: Draft) -> None:
    """Devices as the launcher is told them."""
    launched = [key for key in ("num_processes", "ray_num_workers", "nproc_per_node") if draft.has(key)]
    given = draft.count(*launched) if launched else None
    draft.num_devices = draft.num_devices or given
    machines = draft.count("num_machines", default=1) or 1
    per_node = (draft.num_devices or 0) // machines
    for key in ("num_processes", "num_machines", "ray_num_workers", "nproc_per_node"):
        draft.note(key, "mapped", f"torchrun --nnodes {machines} --nproc-per-node {per_node}")


def lengths(draft: Draft) -> None:
    keys = ("max_length", "max_seq_length", "cutoff_len")
    longest = draft.count(*keys, default=1024) or 1024
    if draft.stage != "rl":
        prompt = min(draft.count("max_prompt_length", default=longest // 2) or 1, longest - 1) or 1
        draft.set("data.max_prompt_length", prompt, keys)
        draft.set("data.max_response_length", max(1, longest - prompt), keys)
        if any(draft.has(key) and draft.given.values[key] is None for key in keys):
            draft.notes.append(f"data.max_prompt_length: theirs has no limit; prompt and answer have {longest} tokens")
    else:
        if draft.table.name == "trl" and draft.count("max_prompt_length") is None:
            limit = default_of("data.max_prompt_length")
            draft.notes.append(f"data.max_prompt_length: theirs has no limit; {limit} leaves out longer ones")
        for key in keys:
            draft.note(key, "same", "read in supervised training only")


def batches(draft: Draft) -> None:
    """One optimizer step's sequences over all devices; in RL, divided by the samples of a prompt."""
    per_device = draft.count("per_device_train_batch_size", "micro_batch_size", default=1) or 1
    accumulation = draft.count("gradient_accumulation_steps", default=1) or 1
    longest = draft.result.get("data.max_prompt_length", 512) + draft.result.get("data.max_response_length", 1024)
    keys = [key for key in (*BATCH, "micro_batch_size", "global_batch_size") if draft.has(key)]
    whole = draft.count("global_batch_size")
    if draft.stage != "rl":
        draft.set("data.train_batch_size", whole or set_global_batch(draft, keys, per_device, accumulation), keys)
    else:
        samples = set_global_batch(draft, keys, per_device, accumulation)
        rounds = draft.count("steps_per_generation", default=accumulation) or accumulation
        generated = draft.count("generation_batch_size") or samples * rounds // accumulation
        generated = max(generated, samples)  # an optimizer step may take several rounds of sampling
        per_prompt = 1 if has_critic(draft) else draft.count("num_generations", default=8) or 8
        draft.set("data.train_batch_size", exact(generated, per_prompt, "data.train_batch_size", draft), keys)
        draft.set("algorithm.minibatches_per_step", exact(generated, samples, "minibatches_per_step", draft), keys)
    longest *= sequences_per_row(draft)
    set_tokens(draft, per_device * longest, keys[:1], longest)


def steps(draft: Draft) -> None:
    per_step = draft.result.get("algorithm.minibatches_per_step", 1)
    number = draft.number("max_steps")
    if number is not None and number > 0:
        draft.set("trainer.total_steps", exact(number, per_step, "trainer.total_steps", draft), ["max_steps"])
        draft.note("num_train_epochs", "same", "not read, as max_steps is given")
    else:
        epochs = draft.number("num_train_epochs", default=3) or 1
        draft.set("trainer.total_epochs", exact(epochs, 1, "trainer.total_epochs", draft), ["num_train_epochs"])
    warm, share = draft.number("warmup_steps") or 0.0, draft.number("warmup_ratio")
    if 0 < warm < 1:  # a share of the run, in newer versions
        warm, share = 0.0, warm
    set_warmup(draft, ("warmup_steps", "warmup_ratio"), steps=warm, ratio=share)
    options = draft.get("lr_scheduler_kwargs")
    if isinstance(options, dict):
        lr = float(draft.result.get("optimizer.lr") or 0.0)
        floor = float(options.get("min_lr", float(options.get("min_lr_rate") or 0.0) * lr) or 0.0)
        draft.set("optimizer.min_lr", floor, ["lr_scheduler_kwargs"])
    intervals(draft, per_step)


def intervals(draft: Draft, per_step: int) -> None:
    draft.set("validation.val_before_train", bool(draft.get("eval_on_start")), ["eval_on_start"])
    for name, ours in (("save", "checkpoint.save_freq"), ("eval", "validation.test_freq")):
        steps_key = f"{name}_steps"
        strategies = (f"{name}_strategy", "evaluation_strategy") if name == "eval" else (f"{name}_strategy",)
        given = [key for key in strategies if draft.has(key)]
        is_v1 = draft.table.name == "llamafactory" and "save_strategy" not in draft.defaults
        default = "steps" if draft.has(steps_key) or (name == "save" and not is_v1) else "no"
        strategy = draft.word(*given, default=default) if given else default
        number = draft.number(steps_key, default=500) or 500
        total = draft.result.get("trainer.total_steps")
        if strategy == "no":
            draft.set(ours, None if name == "save" else -1, [*strategies, steps_key])
        elif strategy == "epoch":
            draft.lack(strategies, "time_based", shown(strategy))
        elif number >= 1:
            draft.set(ours, max(1, round(number / per_step)), [steps_key, *strategies])
        elif total is None:
            draft.lack([steps_key], "time_based", f"a share of {number}")
        else:
            draft.set(ours, max(1, round(number * total)), [steps_key, *strategies])


def loss(draft: Draft) -> None:
    if draft.stage != "rl":
        if draft.stage == "sft" and draft.get("loss_type") not in (None, "nll", "dapo", "sft"):
            draft.lack(["loss_type"], "other_loss", shown(draft.get("loss_type")))
        return
    if has_critic(draft):
        return
    for key, ours in (("num_generations", "n"), ("temperature", "temperature")):
        draft.set(f"validation.{ours}", draft.number(f"{key}_eval", key, default=1), [f"{key}_eval"])
    kind = draft.word("loss_type", default="dapo" if is_asynchronous(draft) else None)
    if kind in REDUCTIONS:
        draft.set("algorithm.loss_reduction", REDUCTIONS[str(kind)], ["loss_type"])
    elif kind == "cispo":
        draft.set("algorithm.objective", "cispo", ["loss_type"])
        draft.set("algorithm.clip_ratio_low", 1.0, ["loss_type"])
    else:
        draft.lack(["loss_type"], "other_loss", shown(kind))
    if draft.result.get("algorithm.objective") == "gspo":
        draft.set("algorithm.loss_reduction", "sequence_mean", ["importance_sampling_level"])
    high = draft.number("epsilon_high", "epsilon", default=0.2) or 0.0
    if kind == "cispo":  # an absolute bound there, a distance from 1 here
        if high <= 1:
            draft.lack(["epsilon_high"], "other_word", f"{high}, a bound of at most 1 on the importance weight")
            return
        high -= 1
    draft.set("algorithm.clip_ratio_high", high, ["epsilon_high"])
    scale = draft.word("scale_rewards", default="group")
    if scale in (False, "none", None):
        draft.set("algorithm.advantage", "dr_grpo", ["scale_rewards"])
    elif scale in (True, "group"):
        draft.set("algorithm.advantage", "grpo", ["scale_rewards"])
    else:
        draft.lack(["scale_rewards"], "other_advantage", shown(scale))


def correction(draft: Draft) -> None:
    prefix = "vllm_importance_sampling_"
    keys = [key for key in draft.given.values if key.startswith(prefix)]
    if draft.stage != "rl":
        return
    if is_asynchronous(draft):
        return
    if not draft.get(f"{prefix}correction"):
        draft.set("algorithm.importance_cap", None, keys)
        return
    mode = str(draft.get(f"{prefix}mode", default="sequence_mask"))
    draft.set("algorithm.importance_level", mode.partition("_")[0], [f"{prefix}correction", f"{prefix}mode"])
    masks = mode.endswith("mask")
    draft.set("algorithm.importance_correction", "mask" if masks else "truncate", [f"{prefix}mode"])
    cap = draft.number(f"{prefix}cap", f"{prefix}clip_max", default=3.0)
    draft.set("algorithm.importance_cap", cap, [f"{prefix}cap", f"{prefix}clip_max"])
    floor = draft.number(f"{prefix}clip_min")
    if floor and masks:
        draft.set("algorithm.importance_floor", floor, [f"{prefix}clip_min"])


def order(draft: Draft) -> None:
    """Rows are drawn at random; the key that GRPO and RLOO read shuffles them once more, elsewhere."""
    if draft.stage == "rl" and not has_critic(draft):
        draft.set("data.shuffle", bool(draft.get("shuffle_dataset", default=True)), ["shuffle_dataset"])
        draft.note("train_sampling_strategy", "same", "not read by GRPO and RLOO")
        return
    key = "train_sampling_strategy"
    draft.set("data.shuffle", draft.word(key, default="random") != "sequential", [key, "shuffle_dataset"])


def asynchronous(draft: Draft) -> None:
    """A trainer of its own: a server samples all the time, and its samples may be so many versions old."""
    keys = ("max_staleness", "weight_sync_steps")
    if not is_asynchronous(draft):
        for key in keys:
            draft.note(key, "same", "read by the asynchronous trainer only")
        return
    draft.set("rollout.placement", "separate")
    draft.set("rollout.mode", "in_flight")
    draft.set("rollout.max_staleness", draft.count(keys[0], default=4), keys[:1])
    draft.notes.append("algorithm.importance_cap: 2, as samples of older weights need importance weights here")
    draft.notes.append("algorithm: their old log-probabilities are the engine's; ours are the trainer's")
    if (steps := draft.count(keys[1], default=1)) == 1:
        draft.note(keys[1], "same", "1, as here")
    else:
        draft.lack(keys[1:], "other_word", f"{steps}; engines get new weights after every step")


def rewards(draft: Draft) -> None:
    if draft.stage != "rl":
        return
    names, weights = as_list(draft.get("reward_funcs")), as_list(draft.get("reward_weights"))
    if weights and len(weights) != len(names):
        raise InputError(f"reward_weights has {len(weights)} entries for {len(names)} reward_funcs: give one each")
    for place, name in enumerate(names):
        if "/" in str(name) and ".py" not in str(name):
            draft.rewards.append({"name": "model", "options": {"path": str(name)}})
            draft.note("reward_funcs", "mapped", f"rewards: model, of {name}")
            continue
        module, _, function = str(name).rpartition(".")
        entry = dict(TRL_REWARDS.get(str(name), {"name": f"{module}:{function}"}))
        if not module and str(name) not in TRL_REWARDS:
            draft.lack(["reward_funcs"], "reward_model", shown(name))
            continue
        draft.rewards.append(entry | ({"weight": float(weights[place])} if weights else {}))
        draft.note("reward_funcs", "mapped", f"rewards: {entry['name']}")
        draft.note("reward_weights", "mapped", "rewards: weight")
    add_reward_model(draft, "reward_model_name_or_path")
    if not names and not draft.rewards:
        add_rewards(draft, [draft.get("dataset_name")])


def files(draft: Draft) -> None:
    """Data sets by name become files to be made."""
    names = as_list(draft.get("dataset", "dataset_name", "train_dataset"))
    folder = draft.get("dataset_dir", default="data")
    listed = [
        name if str(name).endswith((".json", ".jsonl", ".parquet")) else f"{folder}/{name}.json" for name in names
    ]
    if draft.has("dataset_name") or str(draft.get("train_dataset")).endswith((".yaml", ")")):
        listed = [f"data/{str(name).rpartition('/')[2].partition('.')[0]}/train.parquet" for name in names]
    keys = ("dataset", "dataset_name", "dataset_dir", "dataset_config", "dataset_train_split", "train_dataset")
    if listed:
        draft.set("data.train_files", listed, keys)
        draft.notes.append("data.train_files: nothing is downloaded; put the data there, or name your files")
    held_out = as_list(draft.get("eval_dataset"))
    if held_out:
        draft.set("data.val_files", [f"{folder}/{name}.json" for name in held_out], ["eval_dataset"])
    draft.note("dataset_test_split", "mapped", "data.val_files, to be filled in")
    limit_rows(draft, "max_samples", (TRAIN, HELD_OUT))
    split = str(draft.get("dataset_train_split", default=""))
    if first := re.fullmatch(r"\w+\[:(\d+)\]", split):
        draft.set(TRAIN, [bounded(str(file), int(first[1])) for file in listed], ["dataset_train_split"])
    elif "[" in split:
        draft.lack(["dataset_train_split"], "other_word", f"{shown(split)}; there are the first rows, as train[:1000]")


def rest(draft: Draft) -> None:
    trackers = [str(name) for name in as_list(draft.get("report_to"))]
    if trackers:
        draft.set(
            "logging.tensorboard", "none" not in trackers and bool({"tensorboard", "all"} & {*trackers}), ["report_to"]
        )
        if "wandb" in trackers and "logging.wandb_project" not in draft.result:
            draft.set("logging.wandb_project", "huggingface", ["report_to"])
        if others := [name for name in trackers if name not in TRACKERS]:
            draft.lack(["report_to"], "other_tracker", ", ".join(others))
    swanlab(draft, trackers)
    resume = draft.word("resume_from_checkpoint")
    is_new = bool(draft.get("overwrite_output_dir")) and draft.table.name == "llamafactory"
    found = {True: "auto", "true": "auto", None: "never" if is_new else "auto", False: "never"}.get(resume, resume)
    draft.set("checkpoint.resume", found, ["resume_from_checkpoint", "overwrite_output_dir"])
    recompute(draft)
    precision(draft)
    set_timeout(draft, "ddp_timeout")
    note_sharding(draft, ("deepspeed", "fsdp", "fsdp_config", "accelerate_config", "config_file", "zero_stage"))
    mode = draft.word("vllm_mode", default="colocate" if draft.get("use_vllm") else None)
    if draft.stage == "rl" and mode in ("colocate", "server"):
        draft.set("rollout.placement", {"colocate": "colocated", "server": "separate"}[mode], ["vllm_mode"])
    draft.note("use_vllm", "mapped", "the engine is vLLM")
    if draft.has("use_cpu"):
        draft.set("platform.name", "cpu" if draft.get("use_cpu") else "auto", ["use_cpu"])
    if "model.path" not in draft.result and isinstance(draft.get("model"), str):
        draft.set("model.path", draft.get("model"), ["model"])
    betas = draft.get("optim_config.adamw_betas")
    if isinstance(betas, list) and len(betas) == 2:
        draft.set("optimizer.beta1", betas[0], ["optim_config.adamw_betas"])
        draft.set("optimizer.beta2", betas[1], ["optim_config.adamw_betas"])
    elif draft.table.name == "llamafactory" and llamafactory_program(draft) == "v1":
        draft.set("optimizer.beta2", 0.999)  # that of torch, as version 1 names none


def recompute(draft: Draft) -> None:
    """LLaMA-Factory computes activations again unless it is told not to; its models of Megatron do if they are told."""
    off, own = "disable_gradient_checkpointing", "recompute_granularity"
    keys = ("gradient_checkpointing", off, own, "enable_activation_checkpointing")
    saves, kind = bool(draft.get(keys[0], keys[3], default=True)), "full"
    if draft.table.name == "llamafactory" and llamafactory_program(draft) == "v0":
        if draft.has(own, *MEGATRON):
            kind = str(draft.word(own, default="none"))
            saves = kind != "none"
        else:
            saves = bool(draft.get(keys[0])) or not draft.get(off)
    draft.set("memory.recompute", kind if saves else "none", keys)


def precision(draft: Draft) -> None:
    """What is computed in; master weights are float32 whatever dtype they are loaded in."""
    named = str(draft.get("mixed_precision", default="")).lower()
    keys = ("bf16", "fp16", "dtype", "torch_dtype", "pure_bf16", "mixed_precision", "infer_dtype")
    weights = str(draft.get("dtype", "torch_dtype", default="")).lower()
    if draft.get("fp16") or weights == "float16" or named == "fp16":
        draft.lack(
            ("fp16", "dtype", "torch_dtype", "mixed_precision"), "other_word", "float16; bfloat16 is set instead"
        )
    is_bfloat16 = draft.get("pure_bf16") or draft.get("fp16") or named in ("bf16", "fp16")
    is_bfloat16 = is_bfloat16 or draft.get("bf16", default=draft.table.name == "trl")
    draft.set("model.dtype", "bfloat16" if is_bfloat16 else "float32", keys)


def layout(draft: Draft) -> None:
    for theirs, ours in (
        ("tensor_model_parallel_size", "tensor"),
        ("pipeline_model_parallel_size", "pipeline"),
        ("expert_model_parallel_size", "expert"),
        ("context_parallel_size", "context"),
        ("cp_size", "context"),
        ("dist_config.cp_size", "context"),
        ("dist_config.ep_size", "expert"),
    ):
        if draft.has(theirs):
            draft.set(f"parallel.{ours}", draft.count(theirs, default=1), [theirs])
    if draft.has("sequence_parallel"):
        is_split = draft.result.get("parallel.tensor", 1) > 1
        draft.set("parallel.sequence", bool(draft.get("sequence_parallel")) and is_split, ["sequence_parallel"])


SHARED: dict[str, Rule] = {
    "devices": devices,
    "lengths": lengths,
    "batches": batches,
    "steps": steps,
    "files": files,
    "rest": rest,
}
TRL_RULES: dict[str, Rule] = (
    {"stage": trl_stage, "begin": begin_ppo, "devices": devices, "lengths": lengths, "batches": batches, "ppo": trl_ppo}
    | SHARED
    | {"loss": loss, "correction": correction, "preferences": trl_preferences, "rewards": rewards}
    | {"order": order, "asynchronous": asynchronous}
)
LLAMAFACTORY_RULES: dict[str, Rule] = (
    {"stage": llamafactory_stage, "layout": layout} | SHARED | {"preferences": llamafactory_preferences}
)
