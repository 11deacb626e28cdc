"""What follows from several keys of AReaL together."""

from __future__ import annotations

import re
from typing import Any

from mega_rl.errors import InputError, shown
from mega_rl.importers.draft.data_sets import GSM8K, KNOWN, KnownData, add_rewards
from mega_rl.importers.draft.draft import Draft, Rule, Stage
from mega_rl.importers.draft.units import note_sharding, set_vision, set_warmup
from mega_rl.importers.rules.learned import (
    AdapterKeys,
    CriticKeys,
    has_critic,
    sequences_per_row,
    set_adapter,
    set_critic,
    set_stage,
)

ADAPTER = AdapterKeys(
    switches=("actor.use_lora",),
    rank=("actor.lora_rank",),
    alpha=("actor.lora_alpha",),
    targets=("actor.target_modules",),
)
CRITIC = CriticKeys(
    path=("critic.path",),
    lr=("critic.optimizer.lr",),
    gamma=("actor.discount",),
    lam=("actor.gae_lambda",),
    clip=("critic.eps_clip",),
)
DATA = (KnownData("gsm8k", GSM8K, ({"name": "math_verify"},)), *KNOWN)  # their prompts ask for a box, not for ####
MAX_VERSIONS = 1 << 10  # of rollout.max_staleness
AXES = {"t": "tensor", "p": "pipeline", "c": "context", "e": "expert"}


def axes(draft: Draft, key: str) -> tuple[str, dict[str, int]]:
    """``fsdp:d4p1t1`` as its name and its axes; the tensor-parallel ranks of experts are the axis ``x``.

    Raises:
        InputError: another form.
    """
    text = str(draft.get(key, default="") or allocated(draft).get(key, ""))
    name, _, rest = text.rpartition(":") if "|" not in text else text.partition(":")
    parts = dict(re.findall(r"(attn|ffn):((?:[a-z]\d+)+)", rest)) or {"attn": rest}
    sizes: dict[str, int] = {}
    for part in ("ffn", "attn"):
        found = re.findall(r"([a-z])(\d+)", parts.get(part, ""))
        if "".join(letter + digits for letter, digits in found) != parts.get(part, ""):
            raise InputError(f"{key} is {shown(text)}: give a layout such as fsdp:d4p1t1")
        sizes |= {letter: int(digits) for letter, digits in found}
        if part == "ffn" and found:
            sizes["x"] = sizes.pop("t", 1)
    return name, sizes


def allocated(draft: Draft) -> dict[str, str]:
    """Both layouts of their earlier key: ``ENGINE:d4t2+d8``, or the trainer's alone."""
    text = str(draft.get("allocation_mode", default="") or "")
    if not text:
        return {}
    engine, plus, trainer = text.rpartition("+")
    if not plus and trainer.startswith(("sglang", "vllm")):
        return {"rollout.backend": trainer}
    return {"rollout.backend": engine, "actor.backend": trainer} if plus else {"actor.backend": trainer}


STAGES: dict[Any, Stage] = {"rl": "rl", "sft": "sft", "dpo": "dpo", "rw": "rm"}


def program(draft: Draft) -> str:
    return STAGES.get(draft.word("train_dataset.type", default="rl"), "sft")


def stage(draft: Draft) -> None:
    kind = draft.word("train_dataset.type", default="rl")
    set_stage(draft, STAGES.get(kind, "sft"), ("train_dataset.type",))
    if kind not in STAGES:
        draft.lack(["train_dataset.type"], "other_word", shown(kind))
    draft.note("actor.is_critic", "same", "trainer.stage says so")
    set_adapter(draft, ADAPTER, bool(draft.get("actor.use_lora", default=False)), rank=32, alpha=16)
    if draft.stage == "dpo":
        draft.set("preference.beta", draft.number("actor.beta", default=0.1), ["actor.beta"])
        loss = draft.word("actor.loss_type", default="sigmoid")
        if loss in ("sigmoid", "ipo"):
            draft.set("preference.loss", loss, ["actor.loss_type"])
        else:
            draft.lack(["actor.loss_type"], "preferences", shown(loss))


def layout(draft: Draft) -> None:
    name, sizes = axes(draft, "actor.backend")
    for letter, ours in AXES.items():
        if sizes.get(letter, 1) > 1:
            draft.set(f"parallel.{ours}", sizes[letter], ["actor.backend"])
    if sizes.get("t", 1) > 1:
        draft.set("parallel.sequence", True, ["actor.backend"])
    if "x" in sizes and sizes["x"] != sizes.get("t", 1):
        draft.set("parallel.expert_tensor", sizes["x"], ["actor.backend"])
    for part in ("overlap_grad_reduce", "overlap_param_gather"):
        if draft.has(f"actor.megatron.ddp.{part}"):
            draft.set(f"parallel.{part}", bool(draft.get(f"actor.megatron.ddp.{part}")), [f"actor.megatron.ddp.{part}"])
    num = sizes.get("d", 1) * sizes.get("p", 1) * sizes.get("t", 1) * sizes.get("c", 1)
    draft.num_devices = num
    for key in ("actor.backend", "allocation_mode"):
        draft.note(key, "mapped", f"{num} trainer processes")
    if name not in ("", "megatron"):
        note_sharding(draft, ("actor.backend", "allocation_mode"))
    nodes = draft.count("cluster.n_nodes", default=1) if draft.has("cluster.n_nodes") else 1
    for key in ("cluster.n_nodes", "cluster.n_gpus_per_node"):
        draft.note(key, "mapped", f"torchrun --nnodes {nodes} --nproc-per-node {max(1, num // (nodes or 1))}")
    if draft.stage != "rl" or not (draft.has("rollout.backend") or "rollout.backend" in allocated(draft)):
        return
    engine, sizes = axes(draft, "rollout.backend")
    draft.set("rollout.placement", "separate", ["rollout.backend"])
    draft.set("rollout.num_engines", sizes.get("d", 1), ["rollout.backend"])
    draft.set("rollout.tensor_parallel_size", sizes.get("t", 1), ["rollout.backend"])
    if engine not in ("vllm", ""):
        draft.notes.append(f"rollout: the engine is vLLM in the place of {engine}, whose arguments are not taken over")


def algorithm(draft: Draft) -> None:
    if draft.stage != "rl":
        return
    weight = draft.number("actor.kl_ctl", default=0.1)
    if weight and not any(key.startswith("ref.") for key in draft.given.values):
        draft.lack(["actor.kl_ctl"], "kl_without_reference")
        draft.notes.append("algorithm.kl_coefficient: 0, as there is no section ref, which is their reference model")
        weight = 0.0
    else:
        draft.set("algorithm.kl_coefficient", weight, ["actor.kl_ctl"])
    draft.result["algorithm.kl_coefficient"] = weight
    if weight:
        draft.set("algorithm.kl_in", "reward", ["actor.kl_ctl"])
        draft.result.setdefault("algorithm.kl_estimator", "k1")
    both = draft.number("actor.eps_clip", default=0.2)
    high = draft.number("actor.eps_clip_higher", default=both)
    if high:
        draft.set("algorithm.clip_ratio_high", high, ["actor.eps_clip_higher"])
    if draft.result.get("algorithm.objective") == "gspo":
        draft.set("algorithm.loss_reduction", "sequence_mean", ["actor.importance_sampling_level"])
    else:
        draft.set("algorithm.loss_reduction", "token_mean")
    _critic(draft)
    _advantage(draft)
    _correction(draft)


def _critic(draft: Draft) -> None:
    """There is a critic if the file has its section."""
    is_on = any(key.startswith("critic.") for key in draft.given.values)
    set_critic(draft, CRITIC, is_on, lr=1e-3, lam=1.0, clip=0.5, frozen=0)
    if not is_on and draft.number("actor.gae_lambda", default=1.0) != 1.0:
        draft.lack(["actor.gae_lambda"], "other_advantage", "without a critic")
    for key in [key for key in draft.given.values if key.startswith("critic.optimizer.") and key not in CRITIC.lr]:
        if draft.get(key) in (draft.get(f"actor.{key.removeprefix('critic.')}"), "adam", "constant"):
            draft.note(key, "same", "that of the policy")
        else:
            draft.lack([key], "critic", "it is that of the policy; the learning rate is constant")
    policy = int(draft.number("actor.ppo_n_minibatches", default=4) or 4)
    if draft.count("critic.ppo_n_minibatches", default=4) == policy:
        draft.note("critic.ppo_n_minibatches", "same", "as many as the policy's")
    else:
        draft.lack(["critic.ppo_n_minibatches"], "critic", "as many as the policy's")


def _advantage(draft: Draft) -> None:
    prefix = "actor.reward_norm."
    mean, deviation = draft.word(f"{prefix}mean_level"), draft.word(f"{prefix}std_level")
    keys = [key for key in draft.given.values if key.startswith(prefix)]
    if draft.get(f"{prefix}mean_leave1out"):
        chosen: str | None = "rloo"
    elif mean == "group":
        chosen = {"group": "grpo", "batch": "reinforce_pp_baseline"}.get(str(deviation), "dr_grpo")
    else:
        chosen = "reinforce_pp" if mean in (None, "batch") and deviation in (None, "batch") else None
        if mean is None and draft.get("actor.adv_norm.mean_level") is None and not has_critic(draft):
            draft.notes.append("algorithm.advantage: theirs has no baseline here; reinforce_pp, which has one, is set")
    if has_critic(draft):
        if mean or deviation:
            draft.lack(keys, "other_advantage", "rewards as they are, with a critic")
        chosen = "gae"
    elif chosen in ("rloo", "grpo", "dr_grpo", "reinforce_pp_baseline") and draft.result.get("rollout.n", 1) == 1:
        draft.lack(keys, "no_baseline")
        chosen = "reinforce_pp"
        draft.set("algorithm.advantage", chosen)
    elif chosen is None:
        draft.lack(keys, "other_advantage", f"mean {mean}, deviation {deviation}")
    else:
        draft.set("algorithm.advantage", chosen, keys)
    for key in ("actor.adv_norm.mean_level", "actor.adv_norm.std_level", "actor.adv_norm.group_size"):
        if draft.get(key) not in (None, 1):
            if chosen in ("reinforce_pp", "reinforce_pp_baseline", "gae"):
                draft.note(key, "mapped", f"algorithm.advantage = {chosen}, which normalises over the batch")
            else:
                draft.lack([key], "other_advantage", "over the batch, after the group's")
    for key, neutral in (("actor.reward_scaling", 1.0), ("actor.reward_bias", 0.0)):
        if chosen in ("grpo", "reinforce_pp", "reinforce_pp_baseline") or draft.number(key) == neutral:
            draft.note(key, "same", "an advantage that is normalised does not depend on it")
        else:
            draft.lack([key], "reward_shaping")


def _correction(draft: Draft) -> None:
    """Weights between engine and trainer are there with ``rejection_sampling`` only, whatever else is set."""
    prefix, old = "actor.rejection_sampling.", "actor.behave_imp_weight_cap"
    keys = ["actor.use_decoupled_loss", "actor.recompute_logprob"]
    upper = draft.number(f"{prefix}upper", old)
    is_decoupled = bool(draft.get("actor.use_decoupled_loss"))
    if not is_decoupled and not draft.get("actor.recompute_logprob"):
        draft.notes.append("algorithm: their old log-probabilities are the engine's; ours are the trainer's")
    if upper is None or not is_decoupled:
        if not draft.result.get("rollout.max_staleness"):
            draft.set("algorithm.importance_cap", None, [*keys, f"{prefix}upper", old])
        else:
            draft.notes.append("algorithm.importance_cap: 2, as samples of older weights need importance weights here")
            for key in (*keys, f"{prefix}upper", old):
                draft.note(key, "mapped", "algorithm.importance_cap = 2.0")
    else:
        draft.set("algorithm.importance_cap", upper, [*keys, f"{prefix}upper", old])
        action = {"clamp": "truncate"}.get(str(draft.word(f"{prefix}action", default="mask")), "mask")
        draft.set("algorithm.importance_correction", action, [f"{prefix}action", f"{prefix}metric"])
        level = draft.word(f"{prefix}level", default="token")
        draft.set("algorithm.importance_level", level, [f"{prefix}level"])
        if (lower := draft.number(f"{prefix}lower")) and action == "mask":
            draft.set("algorithm.importance_floor", lower, [f"{prefix}lower"])
    metric = draft.word(f"{prefix}metric")
    if metric not in (None, "ratio"):
        draft.lack([f"{prefix}metric"], "other_word", shown(metric))


def staleness(draft: Draft) -> None:
    """Their engines take new weights while they sample, and samples may be so many versions old."""
    key = "rollout.max_head_offpolicyness"
    versions = draft.count(key) or 0
    if versions > MAX_VERSIONS:
        draft.lack([key], "other_word", f"{versions}, which is no limit")
    elif draft.stage == "rl" and versions:
        draft.set("rollout.placement", "separate", [key])
        draft.set("rollout.mode", "in_flight", [key])
        draft.set("rollout.max_staleness", versions, [key])
    else:
        draft.note(key, "same", "0: no sample is older than a step")


def _whole_length(draft: Draft, prompt: int) -> None:
    """Their limit of prompt and response together, which counts where it is the smaller one."""
    key, response = "gconfig.max_tokens", int(draft.result.get("data.max_response_length", 1024))
    limit = draft.count(key, default=32768) or 32768
    if limit >= prompt + response:
        draft.note(key, "same", "prompt and response are shorter")
    else:
        draft.lack([key], "sampling_limits", f"prompt and response have {prompt + response} tokens at most")


def data(draft: Draft) -> None:
    longest = draft.count("train_dataset.max_length", default=512 if draft.stage == "rl" else 1024) or 512
    if draft.stage != "rl":
        draft.set("data.max_prompt_length", longest // 2, ["train_dataset.max_length"])
        draft.set("data.max_response_length", longest - longest // 2, ["train_dataset.max_length"])
        least = longest * sequences_per_row(draft)
        budget = int(draft.result.get("trainer.max_tokens_per_microbatch", 4096))
        draft.result["trainer.max_tokens_per_microbatch"] = max(budget, least)
    else:
        draft.set("data.max_prompt_length", longest, ["train_dataset.max_length"])
        _whole_length(draft, longest)
        whole = longest + int(draft.result.get("data.max_response_length", 1024))
        budget = int(draft.result.get("trainer.max_tokens_per_microbatch", whole))
        draft.result["trainer.max_tokens_per_microbatch"] = max(budget, whole)
    for theirs, ours, name in (("train_dataset", "train_files", "train"), ("valid_dataset", "val_files", "test")):
        path = draft.get(f"{theirs}.path")
        if path:
            folder = str(path).rstrip("/").rpartition("/")[2]
            draft.set(f"data.{ours}", [f"data/{folder}/{name}.parquet"], [f"{theirs}.path"])
    draft.notes.append("data.train_files: nothing is downloaded; put the data there, or name your files")
    if draft.count("train_dataset.max_length") is None:
        draft.notes.append(f"data.max_prompt_length: {longest}, as theirs has no limit: check it")
    set_vision(draft, "actor.freeze_vision_tower")
    if draft.stage == "rl":
        _rewards(draft)


def _rewards(draft: Draft) -> None:
    add_rewards(draft, [draft.get("train_dataset.path")], [draft.get("valid_dataset.path")], DATA)
    if not draft.rewards:
        add_rewards(draft, [draft.get("experiment_name")], known=DATA)
    keys = [f"actor.overlong_{part}" for part in ("reward_penalty", "tokens", "penalty_factor")]
    if draft.get(keys[0]):
        options: dict[str, Any] = {
            "max_length": draft.result.get("data.max_response_length"),
            "buffer": draft.count(keys[1]),
            "factor": float(draft.number(keys[2], default=1.0) or 1.0),
        }
        draft.rewards.append({"name": "overlong", "options": options})
    for key in keys:
        draft.note(key, "mapped" if draft.get(keys[0]) else "same", "rewards: overlong")


def _recompute(draft: Draft) -> None:
    """Megatron's own keys count where activations are computed again at all."""
    saves, prefix = bool(draft.get("actor.gradient_checkpointing")), "actor.megatron.recompute_"
    keys = [f"{prefix}{part}" for part in ("granularity", "method", "num_layers")]
    keys.append("actor.archon.ac_mode")
    kind = next((draft.word(key) for key in (keys[0], keys[3]) if draft.has(key)), None)
    chosen = ("selective" if kind == "selective" else "full") if saves else "none"
    draft.set("memory.recompute", chosen, ["actor.gradient_checkpointing", *keys])
    if chosen == "full" and draft.has(keys[1]) and draft.word(keys[1]) == "block":
        draft.set("memory.recompute_num_layers", draft.count(keys[2]), [keys[2]])


def _intervals(draft: Draft) -> None:
    """By steps; every epoch is at the end where there is one epoch, and is refused where there are more."""
    for section, ours in (("saver", "checkpoint.save_freq"), ("evaluator", "validation.test_freq")):
        steps, epochs = draft.count(f"{section}.freq_steps"), draft.count(f"{section}.freq_epochs")
        never = None if ours == "checkpoint.save_freq" else -1
        draft.set(ours, steps or (-1 if epochs else never), [f"{section}.freq_steps"])
        if epochs is None:
            draft.note(f"{section}.freq_epochs", "same", "not set")
        elif epochs >= int(draft.result.get("trainer.total_epochs") or 1) and not steps:
            draft.note(f"{section}.freq_epochs", "mapped", f"{ours} = -1, at the end of the only epoch")
        else:
            draft.lack([f"{section}.freq_epochs"], "time_based")


def _validation(draft: Draft) -> None:
    """With a section of its own, or as in training; nothing is removed, and nothing evaluated before training."""
    draft.set("validation.val_before_train", False)
    draft.set("checkpoint.keep_checkpoints", 0)
    theirs, training = "eval_gconfig.", "gconfig."
    if draft.stage == "rl":
        prefix = theirs if any(key.startswith(theirs) for key in draft.given.values) else training
        for key, ours in (("n_samples", "n"), ("temperature", "temperature")):
            value = draft.number(f"{prefix}{key}", default=1)
            draft.set(f"validation.{ours}", 0 if ours == "n" and draft.get(f"{prefix}greedy") else value)
            draft.note(f"{theirs}{key}", "mapped", f"validation.{ours} = {value}")
        if draft.has("valid_dataset.path"):
            draft.notes.append("validation.temperature: that of the file; a program of theirs may set another one")
    for key in [key for key in draft.given.values if key.startswith(theirs) and key not in draft.outcomes]:
        if draft.get(key) == draft.get(f"{training}{key.removeprefix(theirs)}") or key == f"{theirs}greedy":
            draft.note(key, "same", "as in training")
        else:
            draft.lack([key], "validation_sampling")


def schedule(draft: Draft) -> None:
    per_step = int(draft.result.get("algorithm.minibatches_per_step", 1))
    keys = ["actor.optimizer.warmup_steps", "actor.optimizer.warmup_steps_proportion"]
    steps, ratio = draft.number(keys[0]), draft.number(keys[1])
    set_warmup(draft, keys, steps=None if steps is None else steps * per_step, ratio=ratio)
    floor = draft.number("actor.optimizer.min_lr_ratio")
    if floor is not None:
        lr = float(draft.result.get("optimizer.lr") or 1e-6)
        draft.set("optimizer.min_lr", floor * lr, ["actor.optimizer.min_lr_ratio"])
    _recompute(draft)
    _intervals(draft)
    _validation(draft)
    parts: list[Any] = ["weights", "gradients", "optimizer"]
    if draft.get("enable_offload") and draft.result.get("rollout.placement") != "separate" and draft.stage == "rl":
        draft.set("memory.offload", parts, ["enable_offload"])
    else:
        draft.note("enable_offload", "same", "engines with devices of their own need no room on the trainer's")
    mode = draft.word("recover.mode")
    resumes = {"disabled": "never", "off": "never", False: "never"}.get(mode, "auto")
    draft.set("checkpoint.resume", resumes, ["recover.mode"])
    if draft.count("recover.freq_steps") and draft.result.get("checkpoint.save_freq") is None and resumes == "auto":
        draft.set("checkpoint.save_freq", draft.count("recover.freq_steps"), ["recover.freq_steps"])
    names = [str(draft.get(key)) for key in ("experiment_name", "trial_name") if draft.get(key)]
    if names:
        named = ("experiment_name", "trial_name", "cluster.fileroot")
        draft.set("trainer.output_dir", "/".join(["runs", *names]), named)
    if draft.get("stats_logger.wandb.mode") in ("online", "offline", "shared"):
        draft.set("logging.wandb_project", names[0] if names else "areal", ["stats_logger.wandb.mode"])
    else:
        draft.note("stats_logger.wandb.mode", "same", "off, as here")
    if draft.get("stats_logger.swanlab.mode") in ("cloud", "local", "offline"):
        project = str(draft.word("stats_logger.swanlab.project", default=names[0] if names else "areal"))
        draft.set("logging.swanlab_project", project, ["stats_logger.swanlab.mode", "stats_logger.swanlab.project"])
    else:
        draft.note("stats_logger.swanlab.mode", "same", "off, as here")


RULES: dict[str, Rule] = {
    "stage": stage,
    "layout": layout,
    "staleness": staleness,
    "algorithm": algorithm,
    "data": data,
    "schedule": schedule,
}
