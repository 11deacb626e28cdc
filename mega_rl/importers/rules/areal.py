"""What follows from several keys of AReaL together."""

from __future__ import annotations

import re
from typing import Any

from mega_rl.errors import InputError, shown
from mega_rl.importers.draft.draft import Draft, Rule, Stage
from mega_rl.importers.draft.units import guess_reward, set_warmup
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
AXES = {"t": "tensor", "p": "pipeline", "c": "context", "e": "expert"}


def axes(draft: Draft, key: str) -> tuple[str, dict[str, int]]:
    """``fsdp:d4p1t1`` as its name and its axes; experts' axes count where they differ.

    Raises:
        InputError: another form.
    """
    text = str(draft.get(key, default=""))
    name, _, rest = text.rpartition(":") if "|" not in text else text.partition(":")
    parts = {part: sizes for part, sizes in re.findall(r"(attn|ffn):((?:[a-z]\d+)+)", rest)} or {"attn": rest}
    sizes: dict[str, int] = {}
    for part in ("ffn", "attn"):
        found = re.findall(r"([a-z])(\d+)", parts.get(part, ""))
        if "".join(letter + digits for letter, digits in found) != parts.get(part, ""):
            raise InputError(f"{key} is {shown(text)}: give a layout such as fsdp:d4p1t1")
        sizes |= {letter: int(digits) for letter, digits in found}
    return name, sizes


def stage(draft: Draft) -> None:
    kind = draft.word("train_dataset.type", default="rl")
    stages: dict[Any, Stage] = {"rl": "rl", "sft": "sft", "dpo": "dpo", "rw": "rm"}
    set_stage(draft, stages.get(kind, "sft"), ("train_dataset.type",))
    if kind not in stages:
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
    num = sizes.get("d", 1) * sizes.get("p", 1) * sizes.get("t", 1) * sizes.get("c", 1)
    draft.num_devices = num
    draft.note("actor.backend", "mapped", f"{num} trainer processes")
    if name not in ("", "megatron"):
        draft.notes.append(
            f"parallel: their {name} divides weights over all ranks; see with tools/plan.py what fits here"
        )
    nodes = draft.count("cluster.n_nodes", default=1)
    for key in ("cluster.n_nodes", "cluster.n_gpus_per_node"):
        draft.note(key, "mapped", f"torchrun --nnodes {nodes} --nproc-per-node {max(1, num // (nodes or 1))}")
    if draft.stage != "rl" or not draft.has("rollout.backend"):
        return
    engine, sizes = axes(draft, "rollout.backend")
    draft.set("rollout.placement", "separate", ["rollout.backend"])
    draft.set("rollout.num_engines", sizes.get("d", 1), ["rollout.backend"])
    draft.set("rollout.tensor_parallel_size", sizes.get("t", 1), ["rollout.backend"])
    if engine not in ("vllm", ""):
        draft.lack(
            ["rollout.backend"], "other_engine", f"{engine}; the rest is rollout.num_engines and tensor_parallel_size"
        )


def algorithm(draft: Draft) -> None:
    if draft.stage != "rl":
        return
    weight = draft.number("actor.kl_ctl", default=0.1)
    draft.set("algorithm.kl_coefficient", weight, ["actor.kl_ctl"])
    if weight:
        draft.set("algorithm.kl_in", "reward", ["actor.kl_ctl"])
        draft.result.setdefault("algorithm.kl_estimator", "k1")
    both = draft.number("actor.eps_clip", default=0.2)
    if draft.result.get("algorithm.clip_ratio_low") == 0.0:
        draft.lack(["actor.eps_clip"], "other_word", "0.0; set algorithm.clip_ratio_low to a number > 0")
        del draft.result["algorithm.clip_ratio_low"]
        both = None
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
        chosen = "reinforce_pp" if mean in (None, "batch") and "mean_level" not in str(keys) else None
    if has_critic(draft):
        if mean or deviation:
            draft.lack(keys, "other_advantage", "rewards as they are, with a critic")
        chosen = "gae"
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
    upper = draft.number("actor.rejection_sampling.upper", "actor.behave_imp_weight_cap")
    keys = ["actor.use_decoupled_loss", "actor.recompute_logprob"]
    prefix = "actor.rejection_sampling."
    if draft.get("actor.use_decoupled_loss", default=True):
        draft.set("algorithm.importance_cap", upper, [*keys, f"{prefix}upper", "actor.behave_imp_weight_cap"])
        if upper is not None:
            draft.set("algorithm.importance_correction", "mask", [f"{prefix}metric", f"{prefix}upper"])
        lower = draft.number(f"{prefix}lower")
        if lower:
            draft.set("algorithm.importance_floor", lower, [f"{prefix}lower"])
    else:
        draft.set("algorithm.importance_cap", None, [*keys, f"{prefix}upper", f"{prefix}metric"])
    metric = draft.word(f"{prefix}metric")
    if metric not in (None, "ratio"):
        draft.lack([f"{prefix}metric"], "other_word", shown(metric))


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
        whole = longest + int(draft.result.get("data.max_response_length", 1024))
        budget = int(draft.result.get("trainer.max_tokens_per_microbatch", whole))
        draft.result["trainer.max_tokens_per_microbatch"] = max(budget, whole)
    for theirs, ours, name in (("train_dataset", "train_files", "train"), ("valid_dataset", "val_files", "test")):
        path = draft.get(f"{theirs}.path")
        if path:
            folder = str(path).rstrip("/").rpartition("/")[2]
            draft.set(f"data.{ours}", [f"data/{folder}/{name}.parquet"], [f"{theirs}.path"])
    draft.notes.append("data.train_files: nothing is downloaded; put the data there, or name your files")
    if draft.stage == "rl":
        _rewards(draft)


def _rewards(draft: Draft) -> None:
    if guessed := guess_reward(draft, [draft.get("train_dataset.path"), draft.get("experiment_name")]):
        draft.rewards.append({"name": guessed})
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


def schedule(draft: Draft) -> None:
    per_step = int(draft.result.get("algorithm.minibatches_per_step", 1))
    ratio = draft.number("actor.optimizer.warmup_steps_proportion")
    set_warmup(draft, ["actor.optimizer.warmup_steps_proportion"], steps=None, ratio=ratio, per_step=per_step)
    floor = draft.number("actor.optimizer.min_lr_ratio")
    if floor is not None:
        lr = float(draft.result.get("optimizer.lr") or 1e-6)
        draft.set("optimizer.min_lr", floor * lr, ["actor.optimizer.min_lr_ratio"])
    saves = bool(draft.get("actor.gradient_checkpointing", default=False))
    draft.set("memory.recompute", "full" if saves else "none", ["actor.gradient_checkpointing"])
    for key, ours in (("saver.freq_steps", "checkpoint.save_freq"), ("evaluator.freq_steps", "validation.test_freq")):
        if draft.count(key):
            draft.set(ours, draft.count(key), [key])
        else:
            draft.note(key, "same", "not set; ours writes at the end")
    mode = draft.word("recover.mode")
    resumes = {"disabled": "never", "off": "never", False: "never"}.get(mode, "auto")
    draft.set("checkpoint.resume", resumes, ["recover.mode"])
    if draft.count("recover.freq_steps") and "checkpoint.save_freq" not in draft.result:
        draft.set("checkpoint.save_freq", draft.count("recover.freq_steps"), ["recover.freq_steps"])
    names = [str(draft.get(key)) for key in ("experiment_name", "trial_name") if draft.get(key)]
    if names:
        keys = ("experiment_name", "trial_name", "cluster.fileroot")
        draft.set("trainer.output_dir", "/".join(["runs", *names]), keys)
    if draft.get("stats_logger.wandb.mode") in ("online", "offline", "shared"):
        draft.set("logging.wandb_project", names[0] if names else "areal", ["stats_logger.wandb.mode"])
    else:
        draft.note("stats_logger.wandb.mode", "same", "off, as here")
    if draft.get("stats_logger.swanlab.mode") in ("cloud", "local", "offline"):
        project = str(draft.word("stats_logger.swanlab.project", default=names[0] if names else "areal"))
        draft.set("logging.swanlab_project", project, ["stats_logger.swanlab.mode", "stats_logger.swanlab.project"])
    else:
        draft.note("stats_logger.swanlab.mode", "same", "off, as here")


RULES: dict[str, Rule] = {"stage": stage, "layout": layout, "algorithm": algorithm, "data": data, "schedule": schedule}
