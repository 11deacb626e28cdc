"""What verl says of adapters, critic, routers, data, engines, logs, and of sampling while the trainer trains."""

from __future__ import annotations

import math
from typing import Any

from mega_rl.config.reading.tables import table
from mega_rl.errors import shown
from mega_rl.importers.draft.data_sets import CODE, DAPO, GEOMETRY, GSM8K, KnownData, add_rewards, limit_rows
from mega_rl.importers.draft.draft import Draft
from mega_rl.importers.draft.units import as_list
from mega_rl.importers.rules.learned import (
    AdapterKeys,
    CriticKeys,
    add_reward_model,
    has_critic,
    set_adapter,
    set_critic as shared_critic,
)

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
MEGATRON = f"{ACTOR}megatron."
ASYNC = "async_training."
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


def keys_of(rule: str) -> list[str]:
    return list(table("verl").find_rule(rule))


def asynchronous(draft: Draft) -> None:
    """Their batch is what is learnt from between two syncs of weights: parts of some mini-batches each.

    Engines may be ahead by a share of a batch, so that samples are that many steps old at most, rounded up. With
    partial_rollout responses go on with new weights, without it each has the weights of its start.
    """
    keys = [key for key in keys_of("staleness") if draft.has(key)]
    if not draft.has(f"{ASYNC}trigger_parameter_sync_step", f"{ASYNC}staleness_threshold"):
        for key in keys:
            draft.note(key, "same", "not read, as sampling and training take turns")
        return
    parts, per_part = (
        draft.count(f"{ASYNC}trigger_parameter_sync_step", default=4) or 4,
        draft.count(f"{ASYNC}require_batches", default=1) or 1,
    )
    mini = draft.count(f"{ACTOR}ppo_mini_batch_size", default=256) or 256
    batch = mini * per_part * parts
    draft.outcomes.pop("data.train_batch_size", None)  # 0 there, as the batch is that of the keys here
    draft.set("algorithm.minibatches_per_step", per_part * parts, [f"{ASYNC}require_batches"])
    draft.set(
        "data.train_batch_size",
        batch,
        [f"{ASYNC}trigger_parameter_sync_step", f"{ASYNC}require_batches", "data.train_batch_size"],
    )
    for key in ("data.train_batch_size", "data.gen_batch_size"):
        draft.note(key, "mapped", f"data.train_batch_size = {batch}")
    whole = draft.count("rollout.total_rollout_steps")
    if whole:
        draft.set("trainer.total_steps", max(1, whole // batch), ["rollout.total_rollout_steps"])
    share = draft.number(f"{ASYNC}staleness_threshold", default=0.1) or 0.0
    mode = "in_flight" if draft.get(f"{ASYNC}partial_rollout", default=True) else "pinned"
    named = [f"{ASYNC}staleness_threshold", f"{ASYNC}partial_rollout"]
    draft.set("rollout.mode", mode if share > 0 else "synchronous", named)
    draft.set("rollout.max_staleness", math.ceil(share), named[:1])
    draft.set("rollout.placement", "separate", ["rollout.nnodes", "rollout.n_gpus_per_node"])
    per_node = draft.count("rollout.n_gpus_per_node", "trainer.n_rollout_gpus_per_node", default=8) or 8
    devices = (draft.count("rollout.nnodes", default=1) or 1) * per_node
    size = draft.count(f"{ROLLOUT}tensor_model_parallel_size", default=2) or 2
    keys = ["rollout.nnodes", "rollout.n_gpus_per_node", "trainer.n_rollout_gpus_per_node"]
    draft.set("rollout.num_engines", max(1, devices // size), keys)
    draft.notes.append("algorithm: their old log-probabilities are the engine's; ours are the trainer's")


def logging(draft: Draft) -> None:
    trackers = [str(name) for name in as_list(draft.get("trainer.logger", default=["console"]))]
    project = str(draft.get("trainer.project_name", default="verl"))
    if draft.has("trainer.logger"):
        draft.set("logging.progress", "console" in trackers, ["trainer.logger"])
        draft.set("logging.tensorboard", "tensorboard" in trackers, ["trainer.logger"])
        for name in ("wandb", "swanlab"):
            if name in trackers:
                draft.set(f"logging.{name}_project", project, ["trainer.logger", "trainer.project_name"])
        others = [name for name in trackers if name not in ("console", "tensorboard", "wandb", "swanlab", "file")]
        if others:
            draft.lack(["trainer.logger"], "other_tracker", ", ".join(others))
    directory = draft.get("trainer.default_local_dir")
    parts = [str(draft.get(f"trainer.{part}_name") or "") for part in ("project", "experiment")]
    if directory or any(parts):
        chosen = str(directory) if directory else "/".join(["runs", *(part for part in parts if part)])
        draft.set(
            "trainer.output_dir", chosen, keys_of("directory") if not directory else ["trainer.default_local_dir"]
        )
    draft.same(["trainer.project_name", "trainer.experiment_name"], "names")
    mode = draft.word("trainer.resume_mode")
    if mode in ("auto", "disable"):
        draft.set("checkpoint.resume", {"auto": "auto", "disable": "never"}[mode], ["trainer.resume_mode"])
        draft.note("trainer.resume_from_path", "same", f"not read, as resume_mode is {mode}")
    elif mode == "resume_path":
        draft.set("checkpoint.resume", draft.get("trainer.resume_from_path"), keys_of("resume"))


def running(draft: Draft) -> None:
    """Validation, devices, engines, profiles, checkpoints."""
    _validation(draft)
    _launch(draft)
    _profile(draft)
    _starting_weights(draft)
    key, experts = f"{ROLLOUT}expert_parallel_size", draft.count(f"{ROLLOUT}expert_parallel_size", default=1) or 1
    size = draft.count(f"{ROLLOUT}tensor_model_parallel_size", default=2)
    if experts == 1:
        draft.note(key, "same", "as it is here")
    elif experts == size:
        draft.set("rollout.vllm.enable_expert_parallel", True, [key])
    else:
        draft.lack([key], "engine_layout")
    for key in keys_of("saving"):
        parts = {str(part) for part in as_list(draft.get(key))}
        if parts == {"model", "optimizer", "extra"} or not parts:
            draft.note(key, "same", "as it is here")
        else:
            draft.lack([key], "checkpoint_parts")


def _launch(draft: Draft) -> None:
    """The numbers of the configuration; of their supervised trainer those of torchrun."""
    pairs = (("trainer.nnodes", "trainer.n_gpus_per_node"), ("nnodes", "nproc_per_node"))
    for nodes_key, per_node_key in pairs:
        per_node = draft.count(per_node_key) if draft.has(per_node_key) else None
        is_alone = draft.stage != "rl" or nodes_key != "nnodes"
        if per_node and is_alone:
            nodes = (draft.count(nodes_key, default=1) if draft.has(nodes_key) else 1) or 1
            draft.num_devices = nodes * per_node
            for key in (nodes_key, per_node_key):
                draft.note(key, "mapped", f"torchrun --nnodes {nodes} --nproc-per-node {per_node}")
    for key in keys_of("launch"):
        draft.note(key, "same", "torchrun is told instead")


def _profile(draft: Draft) -> None:
    """Nothing of a profiler is read where no step is recorded; the tool is that of the platform."""
    steps_key, ranks_key, *_ = keys_of("profile")
    for key, ours in ((steps_key, "steps"), (ranks_key, "ranks")):
        numbers: list[Any] = as_list(draft.get(key))
        if numbers and all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
            draft.set(f"trainer.profile.{ours}", numbers, [key])
        elif numbers:
            draft.lack([key], "profiler", shown(numbers))
        else:
            draft.note(key, "same", "none, as here")
    is_recorded = bool(as_list(draft.get(steps_key)))
    for key in draft.given.values:
        entry = draft.table.find(key)
        if entry is None or entry.reason != "profile" or key in (steps_key, ranks_key):
            continue
        if not is_recorded:
            draft.same([key], "not_recorded")
        elif key.endswith((".enable", ".ranks", ".tool")) and draft.get(key) != "torch_memory":
            draft.note(key, "mapped", "trainer.profile")
        elif key == "global_profiler.save_path":
            draft.note(key, "same", "traces are in trainer.output_dir")
        elif draft.get(key) in (False, None, "", []):
            draft.note(key, "same", "off, as here")
        else:
            draft.lack([key], "profiler")


def _starting_weights(draft: Draft) -> None:
    """A Megatron checkpoint in the place of the model's files, from which their converter has made it."""
    switch, path = keys_of("starting_weights")
    is_on = bool(draft.get(switch))
    for key in (switch, path):
        draft.note(key, "same", "the weights of model.path are read" if is_on else "off, as here")
    if is_on:
        draft.notes.append(
            f"model.path: its weights are read, not those of {path}, which theirs makes of them; if they are others, "
            "convert them with tools/convert.py and name the directory"
        )


def _validation(draft: Draft) -> None:
    """Samples at temperature 0 are all the greedy response, which is always looked at here."""
    n, sampled, temperature, top_p, top_k = keys_of("validation")
    is_sampled = bool(draft.get(sampled)) and bool(draft.number(temperature, default=0.0))
    for key, whole in ((top_p, 1), (top_k, -1)):
        if not is_sampled:
            draft.note(key, "same", "not read, as validation is greedy")
        elif draft.number(key, default=whole) in (whole, 0):
            draft.note(key, "same", "as it is here")
        else:
            draft.lack([key], "validation_sampling")
    if draft.stage == "rl" and is_sampled:
        draft.set("validation.n", draft.count(n, default=1), [n, sampled])
        draft.set("validation.temperature", draft.number(temperature), [temperature])
    elif draft.stage == "rl":
        draft.set("validation.n", 0, [n, sampled, temperature])
    saves = draft.number("trainer.save_freq", default=-1) or 0
    if draft.stage == "rl" and saves <= 0:
        draft.set("checkpoint.save_freq", None, ["trainer.save_freq"])


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


MODEL, RM = "actor_rollout_ref.model.", "reward_model."
FLAT = AdapterKeys(
    switches=(),
    rank=(f"{MODEL}lora_rank", "model.lora_rank"),
    alpha=(f"{MODEL}lora_alpha", "model.lora_alpha"),
    targets=(f"{MODEL}target_modules", "model.target_modules"),
    exclude=(f"{MODEL}exclude_modules",),
    path=(f"{MODEL}lora_adapter_path",),
)
FUSED = AdapterKeys(
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
    is_megatron, kind = bool(draft.count(*FUSED.rank)), draft.word(f"{MODEL}lora.type", default="lora")
    if is_megatron and kind not in ("lora", "canonical_lora"):
        draft.lack([f"{MODEL}lora.type"], "lora", repr(kind))
    is_flat = not is_megatron and bool(draft.count(*FLAT.rank) or draft.get(*FLAT.path))
    set_adapter(draft, FLAT, is_flat, rank=8, alpha=16)
    set_adapter(draft, FUSED, is_megatron, rank=8, alpha=32)
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
