"""What verl says of routers, engines, logs, and of sampling while the trainer trains."""

from __future__ import annotations

import math
from typing import Any

from mega_rl.config.reading.tables import table
from mega_rl.errors import shown
from mega_rl.importers.draft.draft import Draft
from mega_rl.importers.draft.units import as_list

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
MEGATRON = f"{ACTOR}megatron."
ASYNC = "async_training."


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
