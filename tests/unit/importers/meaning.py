"""What a neighbour's keys mean, written from its own semantics and not by our tables, and what ours mean.

An interpreter takes the keys that a file gives over the defaults of the neighbour's source, and answers as a
``Meaning``; ``ours`` answers for what became of them here. A test compares the two. ``STEPS`` is the length of the run
that shares count of.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import pytest

from mega_rl.importers.draft.defaults import default_of, read
from mega_rl.importers.draft.draft import Draft
from mega_rl.importers.rules.learned import has_critic

STEPS = 400  # optimizer steps of the run


@dataclass(frozen=True)
class Meaning:
    """In units that every trainer has; None where the stage has no such thing."""

    rows: int  # of data for one step: prompts, conversations
    samples: int  # sequences that one step learns from
    updates: int  # optimizer steps of one batch
    length: int | None  # longest sequence
    rate: tuple[float, float, str]  # largest, last, schedule
    warm_up: int  # optimizer steps of STEPS
    adam: tuple[float, float, float]
    decay: float
    sizes: tuple[int, ...]  # tensor, pipeline, context, expert
    kl: tuple[str, float, str] | None  # place, coefficient, estimator whose gradient (loss) or value (reward) counts
    bounds: tuple[float, float, float | None] | None  # smallest and largest ratio, dual clip
    reduction: str | None
    sampling: tuple[int, float] | None  # samples of a prompt, temperature
    validation: tuple[int, float | None] | None  # samples besides the greedy response, their temperature
    is_tower_trained: bool
    saves: int | None  # steps between checkpoints; None: never


PARTS = {  # keys of ours -> the part of a meaning that a refused key of theirs leaves open
    "data.train_batch_size": "rows samples", "rollout.n": "samples sampling",
    "algorithm.minibatches_per_step": "updates",
    "data.max_prompt_length": "length", "data.max_response_length": "length", "optimizer.lr": "rate",
    "optimizer.schedule": "rate", "optimizer.min_lr": "rate", "optimizer.warmup_steps": "warm_up",
    "optimizer.beta1": "adam", "optimizer.beta2": "adam", "optimizer.weight_decay": "decay", "algorithm.kl_in": "kl",
    "algorithm.kl_coefficient": "kl", "algorithm.clip_ratio_low": "bounds", "algorithm.clip_ratio_high": "bounds",
    "algorithm.dual_clip": "bounds", "algorithm.objective": "bounds reduction", "algorithm.loss_reduction": "reduction",
    "rollout.temperature": "sampling", "validation.n": "validation", "checkpoint.save_freq": "saves",
}  # fmt: skip


def refused_parts(draft: Draft) -> set[str]:
    """Names in ``Meaning`` of what the import says that it has no counterpart for."""
    entries = (draft.table.find(key) for key, outcome in draft.outcomes.items() if outcome.became == "none")
    keys = (ours for entry in entries if entry is not None for ours in entry.to)
    return {part for key in keys for part in PARTS.get(key, "").split()}


def is_told(neighbour: str, draft: Draft) -> bool:
    """Whether the interpreters have words for the stage of a file."""
    if neighbour == "trl":
        return not has_critic(draft)
    wanted = ("sft", "pt", "dpo", "kto", "rm") if neighbour == "llamafactory" else ("rl",)
    return draft.stage in wanted and draft.result.get("model.path") is not None


def differing(found: Meaning, wanted: Meaning) -> dict[str, tuple[Any, Any]]:
    """What differs: theirs, and what became of it."""
    pairs = {name: (value, getattr(found, name)) for name, value in vars(wanted).items()}
    return {name: pair for name, pair in pairs.items() if pair[1] != pytest.approx(pair[0])}


class Theirs:
    """Keys over defaults; a key that is given as null is null."""

    def __init__(self, neighbour: str, program: str, given: Mapping[str, Any]) -> None:
        self.values = {**read(neighbour)[program], **given}

    def __call__(self, key: str) -> Any:
        return self.values.get(key)


def ours(result: Mapping[str, Any]) -> Meaning:
    def get(key: str) -> Any:
        return result.get(key, default_of(key))

    is_rl = get("trainer.stage") == "rl"
    n, updates = (get("rollout.n"), get("algorithm.minibatches_per_step")) if is_rl else (1, 1)
    warm = get("optimizer.warmup_steps")
    coefficient = get("algorithm.kl_coefficient")
    return Meaning(
        rows=get("data.train_batch_size"),
        samples=get("data.train_batch_size") * n,
        updates=updates,
        length=get("data.max_prompt_length") + get("data.max_response_length"),
        rate=(get("optimizer.lr"), get("optimizer.min_lr"), get("optimizer.schedule")),
        warm_up=ceil(warm * STEPS) if warm < 1 else int(warm),
        adam=(get("optimizer.beta1"), get("optimizer.beta2"), get("optimizer.eps")),
        decay=get("optimizer.weight_decay"),
        sizes=tuple(get(f"parallel.{axis}") for axis in ("tensor", "pipeline", "context", "expert")),
        kl=(get("algorithm.kl_in"), coefficient, get("algorithm.kl_estimator")) if is_rl and coefficient else None,
        bounds=(
            round(1 - get("algorithm.clip_ratio_low"), 9),
            round(1 + get("algorithm.clip_ratio_high"), 9),
            get("algorithm.dual_clip"),
        )
        if is_rl
        else None,
        reduction=get("algorithm.loss_reduction") if is_rl else None,
        sampling=(n, get("rollout.temperature")) if is_rl else None,
        validation=(get("validation.n"), get("validation.temperature") if get("validation.n") else None)
        if is_rl
        else None,
        is_tower_trained=not get("model.vision.freeze"),
        saves=get("checkpoint.save_freq"),
    )


def _sees(given: Mapping[str, Any], path: str, frozen: str) -> bool:
    """A tower is trained where there is one and nothing freezes it; who names the key has one."""
    sees = any(name in str(given.get(path)) for name in ("VL", "Qwen3.5"))
    return (sees or frozen in given) and not given.get(frozen)


ULYSSES = (
    "ulysses_sequence_parallel_size",
    "fsdp_config.ulysses_sequence_parallel_size",
    "veomni.ulysses_parallel_size",
    "engine.cp",
)


def verl(given: Mapping[str, Any], devices: int) -> Meaning:
    get = Theirs("verl", "rl", given)
    actor, rollout, megatron = (
        "actor_rollout_ref.actor.",
        "actor_rollout_ref.rollout.",
        "actor_rollout_ref.actor.megatron.",
    )
    batch, mini = get("data.train_batch_size"), get(f"{actor}ppo_mini_batch_size")
    per_schedule = None
    if get("async_training.trigger_parameter_sync_step"):
        # The trainer takes this many mini-batches at once, with a step of the schedule, and so often between syncs.
        per_schedule = get("async_training.require_batches") or 1
        batch = mini * per_schedule * get("async_training.trigger_parameter_sync_step")
    assert batch and mini, given
    updates = batch // min(mini, batch)
    # The scheduler goes on once a batch, so that its steps count batches.
    steps = get(f"{actor}optim.lr_warmup_steps")
    warm = steps * (per_schedule or updates) if steps > 0 else ceil(get(f"{actor}optim.lr_warmup_steps_ratio") * STEPS)
    kind = get(f"{actor}kl_loss_type")
    kl = None
    if get(f"{actor}use_kl_loss") and get(f"{actor}kl_loss_coef"):
        base = {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"}[kind.rstrip("+")]
        # The value of k1 has no gradient in the mean: what is learnt from is k2, as with a plus.
        kl = ("loss", get(f"{actor}kl_loss_coef"), "k2" if kind.endswith("+") or base == "k1" else base)
    modes = {"gspo": "sequence_mean"}.get(get(f"{actor}policy_loss.loss_mode"))  # it has a mean of its own
    is_vanilla = get(f"{actor}policy_loss.loss_mode") == "vanilla"  # others have one bound on each side
    is_megatron = any(key.startswith(f"{actor}megatron.") for key in given)
    sides = [get(f"{actor}clip_ratio") if get(key) is None else get(key) for key in
             (f"{actor}clip_ratio_low", f"{actor}clip_ratio_high")]  # fmt: skip
    samples = get(f"{rollout}val_kwargs.do_sample") and get(f"{rollout}val_kwargs.temperature") > 0
    saves = get("trainer.save_freq")
    return Meaning(
        rows=batch,
        samples=batch * get(f"{rollout}n"),
        updates=updates,
        length=get("data.max_prompt_length") + get("data.max_response_length"),
        rate=(get(f"{actor}optim.lr"), get(f"{actor}optim.lr") * get(f"{actor}optim.min_lr_ratio")
              or get(f"{actor}optim.min_lr"),  # Megatron's optimizer has the rate itself
              get(f"{actor}optim.lr_decay_style" if is_megatron and f"{actor}optim.lr_decay_style" in given
                  else f"{actor}optim.lr_scheduler_type")),
        warm_up=warm,
        adam=(*get(f"{actor}optim.betas"), 1e-8),
        decay=get(f"{actor}optim.weight_decay"),
        sizes=(get(f"{megatron}tensor_model_parallel_size"), get(f"{megatron}pipeline_model_parallel_size"),
               max(get(f"{megatron}context_parallel_size"), *(get(f"{actor}{part}") or 1 for part in ULYSSES)),
               get(f"{actor}veomni.expert_parallel_size") or get(f"{actor}engine.ep")
               or get(f"{megatron}expert_model_parallel_size")),
        kl=kl,
        bounds=(max(0.0, round(1 - sides[0], 9)), round(1 + sides[1], 9),
                get(f"{actor}clip_ratio_c") if is_vanilla else None),
        reduction=modes or {
            "token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean",
            "seq-mean-token-sum-norm": "sequence_mean_token_sum_norm",
        }[get(f"{actor}loss_agg_mode")],
        sampling=(get(f"{rollout}n"), get(f"{rollout}temperature")),
        validation=(get(f"{rollout}val_kwargs.n"), get(f"{rollout}val_kwargs.temperature")) if samples else (0, None),
        is_tower_trained=_sees(given, "actor_rollout_ref.model.path", f"{actor}freeze_vision_tower"),
        saves=saves if saves > 0 else None,
    )  # fmt: skip


def areal(given: Mapping[str, Any], devices: int) -> Meaning:
    get = Theirs("areal", "rl", given)
    batch, n, updates = get("train_dataset.batch_size"), get("gconfig.n_samples"), get("actor.ppo_n_minibatches")
    steps = get("actor.optimizer.warmup_steps")
    share = get("actor.optimizer.warmup_steps_proportion")
    high = get("actor.eps_clip") if get("actor.eps_clip_higher") is None else get("actor.eps_clip_higher")
    has_reference = any(key.startswith("ref.") for key in given)
    weight = get("actor.kl_ctl")
    has_own = any(key.startswith("eval_gconfig.") for key in given)
    return Meaning(
        rows=batch,
        samples=batch * n,
        updates=updates,
        length=(get("train_dataset.max_length") or 512) + get("gconfig.max_new_tokens"),  # without a limit: noted
        rate=(get("actor.optimizer.lr"), get("actor.optimizer.lr") * get("actor.optimizer.min_lr_ratio"),
              get("actor.optimizer.lr_scheduler_type")),
        warm_up=steps * updates if steps is not None else ceil(share * STEPS),
        adam=(get("actor.optimizer.beta1"), get("actor.optimizer.beta2"), get("actor.optimizer.eps")),
        decay=get("actor.optimizer.weight_decay"),
        sizes=_areal_sizes(str(given.get("actor.backend") or str(given.get("allocation_mode", "")).rpartition("+")[2])),
        kl=("reward", weight, get("actor.kl_estimator")) if has_reference and weight else None,
        bounds=(round(1 - get("actor.eps_clip"), 9), round(1 + high, 9), get("actor.c_clip")),
        reduction="sequence_mean" if get("actor.importance_sampling_level") == "sequence" else "token_mean",
        sampling=(n, get("gconfig.temperature")),
        validation=(0, None) if given.get("eval_gconfig.greedy") else (
            given.get("eval_gconfig.n_samples") or (1 if has_own else n),
            given.get("eval_gconfig.temperature") or (1.0 if has_own else get("gconfig.temperature"))),
        is_tower_trained=_sees(given, "actor.path", "actor.freeze_vision_tower"),
        saves=-1 if given.get("saver.freq_epochs") == get("total_train_epochs") else get("saver.freq_steps"),
    )  # fmt: skip


def _areal_sizes(backend: str) -> tuple[int, ...]:
    """Degrees of ``engine:d4t2p1``; of a hybrid one attention's, and the expert ranks of the other part."""
    if "|" not in backend:
        one = dict(re.findall(r"([a-z])(\d+)", backend.rpartition(":")[2]))
        return tuple(int(one.get(axis, 1)) for axis in "tpce")
    attention, experts = (dict(re.findall(r"([a-z])(\d+)", part)) for part in backend.split("|"))
    return (*(int(attention.get(axis, 1)) for axis in "tpc"), int(experts.get("e", 1)))


def openrlhf(given: Mapping[str, Any], devices: int) -> Meaning:
    get = Theirs("openrlhf", "rl", given)
    prompts, n = get("rollout.batch_size"), get("rollout.n_samples_per_prompt")
    rate, weight = get("actor.adam.lr"), get("algo.kl.init_coef")
    bounds = get("actor.eps_clip_low_high") or [get("actor.eps_clip")] * 2
    estimator = get("algo.kl.estimator")
    in_loss = get("algo.kl.use_loss")
    schedule = get("actor.lr_scheduler")
    saves = get("ckpt.save_steps")
    return Meaning(
        rows=prompts,
        samples=prompts * n,
        updates=prompts * n // min(get("train.batch_size"), prompts * n),
        length=get("data.max_len"),
        rate=(rate, rate * get("actor.min_lr_ratio"), schedule.removesuffix("_with_min_lr")),
        warm_up=ceil(get("actor.lr_warmup_ratio") * STEPS),
        adam=(*get("actor.adam.betas"), get("actor.adam.eps")),
        decay=get("actor.adam.weight_decay"),
        sizes=(get("ds.tensor_parallel_size"), 1, get("ds.ring_attn_size"), 1),
        kl=("loss" if in_loss else "reward", weight, "k2" if in_loss and estimator == "k1" else estimator)
        if weight
        else None,
        bounds=(round(1 - bounds[0], 9), round(1 + bounds[1], 9), get("actor.dual_clip")),
        reduction="token_mean",
        sampling=(n, get("rollout.temperature")),
        validation=(get("eval.n_samples_per_prompt"), get("eval.temperature")),
        is_tower_trained=_sees(given, "actor.model_name_or_path", "actor.freeze_visual_encoder"),
        saves=saves if saves > 0 else None,
    )


def trl(given: Mapping[str, Any], devices: int, program: str = "grpo") -> Meaning:
    if program not in ("grpo", "rloo"):
        return _trl_supervised(given, devices, program)
    get = Theirs("trl", program, given)
    place, estimator = ("reward", "k1") if program == "rloo" else ("loss", "k3")
    samples = get("per_device_train_batch_size") * get("gradient_accumulation_steps") * devices
    rounds = get("steps_per_generation") or get("gradient_accumulation_steps")
    generated = get("generation_batch_size") or get("per_device_train_batch_size") * devices * rounds
    generated = max(generated, samples)  # accumulated over several rounds of sampling, with the same weights
    warm = given.get("warmup_ratio", 0.0) if not get("warmup_steps") else get("warmup_steps")
    high = get("epsilon") if get("epsilon_high") is None else get("epsilon_high")
    # CISPO's bound is the largest weight itself, and it has no lower one.
    bounds = (0.0, high) if get("loss_type") == "cispo" else (1 - get("epsilon"), 1 + high)
    reductions = {"grpo": "sequence_mean", "dr_grpo": "sequence_mean_token_sum_norm"}
    strategy = get("save_strategy")
    return Meaning(
        rows=generated // get("num_generations"),
        samples=generated,
        updates=max(1, generated // samples),
        length=512 + get("max_completion_length"),  # their prompts have no limit
        rate=(get("learning_rate"), 0.0, get("lr_scheduler_type")),
        warm_up=ceil(warm * STEPS) if warm < 1 else warm,
        adam=(get("adam_beta1"), get("adam_beta2"), get("adam_epsilon")),
        decay=get("weight_decay"),
        sizes=(1, 1, 1, 1),
        kl=(place, get("beta"), estimator) if get("beta") else None,
        bounds=(round(bounds[0], 9), round(bounds[1], 9), get("delta")),
        reduction=reductions.get(get("loss_type"), "token_mean"),
        sampling=(get("num_generations"), get("temperature")),
        validation=(get("num_generations_eval") or get("num_generations"), get("temperature")),
        is_tower_trained=False,
        saves=max(1, round(get("save_steps") / max(1, generated // samples))) if strategy == "steps" else None,
    )


def _trl_supervised(given: Mapping[str, Any], devices: int, program: str) -> Meaning:
    """What all programs that learn from files have from the trainer of transformers."""
    get = Theirs("trl", program, given)
    batch = get("per_device_train_batch_size") * get("gradient_accumulation_steps") * devices
    warm = given.get("warmup_ratio", 0.0) if not get("warmup_steps") else get("warmup_steps")
    return Meaning(
        rows=batch, samples=batch, updates=1, length=get("max_length"),
        rate=(get("learning_rate"), 0.0, get("lr_scheduler_type")), warm_up=ceil(warm * STEPS) if warm < 1 else warm,
        adam=(get("adam_beta1"), get("adam_beta2"), get("adam_epsilon")), decay=get("weight_decay"), sizes=(1, 1, 1, 1),
        kl=None, bounds=None, reduction=None, sampling=None, validation=None, is_tower_trained=False,
        saves=get("save_steps") if get("save_strategy") == "steps" else None,
    )  # fmt: skip


def llamafactory(given: Mapping[str, Any], devices: int) -> Meaning:
    if "model" in given and "model_name_or_path" not in given:
        return _llamafactory_1(given, devices)
    get = Theirs("llamafactory", "v0", given)
    tensor, pipeline = get("tensor_model_parallel_size") or 1, get("pipeline_model_parallel_size") or 1
    ranks = devices // (tensor * pipeline)
    batch = get("per_device_train_batch_size") * get("gradient_accumulation_steps") * ranks
    warm = given.get("warmup_ratio", 0.0) if not get("warmup_steps") else get("warmup_steps")
    return Meaning(
        rows=batch,
        samples=batch,
        updates=1,
        length=get("cutoff_len"),
        rate=(get("learning_rate"), 0.0, get("lr_scheduler_type")),
        warm_up=ceil(warm * STEPS) if warm < 1 else warm,
        adam=(get("adam_beta1"), get("adam_beta2"), get("adam_epsilon")),
        decay=get("weight_decay"),
        sizes=(tensor, pipeline, 1, get("expert_model_parallel_size") or 1),
        kl=None,
        bounds=None,
        reduction=None,
        sampling=None,
        validation=None,
        is_tower_trained=not get("freeze_vision_tower"),
        saves=get("save_steps") if get("save_strategy") == "steps" else None,
    )


def mindspeed_rl(given: Mapping[str, Any], devices: int) -> Meaning:
    merged = {key.partition(".")[2]: value for key, value in given.items() if key.startswith("megatron_training.")}
    merged |= {key.partition(".")[2]: value for key, value in given.items() if key.startswith("actor_config.")}
    rest = {key: value for key, value in given.items() if not key.startswith(("megatron_training.", "actor_config."))}
    get = Theirs("mindspeed_rl", "rl", rest | {f"actor_config.{key}": value for key, value in merged.items()})
    # Their class takes a section of sampling as it is, so that vLLM's own defaults hold for what it leaves out.
    sampling = "generate_config.sampling_config."
    is_given = any(key.startswith(sampling) for key in given)
    response, temperature = (
        given.get(f"{sampling}{name}", of_vllm) if is_given else get(f"{sampling}{name}")
        for name, of_vllm in (("max_tokens", 16), ("temperature", 1.0))
    )
    kind = merged.get("stage", "ray_grpo")
    is_filtered = get("rl_config.filter_groups_enable")
    prompts = get("rl_config.filter_groups_train_batch_size" if is_filtered else "actor_config.global_batch_size")
    n, tensor = get("rl_config.n_samples_per_prompt"), get("actor_config.tensor_model_parallel_size")
    weight = get("rl_config.init_kl_coef")
    estimator = {"kl": "k2", "low_var_kl": "k3"}[get("rl_config.kl_penalty")]
    is_split = kind == "ray_dapo" and get("rl_config.clip_higher_enable")
    low, high = (get(f"rl_config.clip_ratio{end}") for end in (("_low", "_high") if is_split else ("", "")))
    # A mean over the tokens of a micro-batch is one over a sequence where that is all of it.
    is_whole = get("actor_config.micro_batch_size") == 1 and not get("rl_config.use_dynamic_bsz")
    by_sequence = is_whole or (kind == "ray_dapo" and not get("rl_config.token_level_loss"))
    expert = get("actor_config.expert_model_parallel_size")
    if get("actor_config.moe_tp_extend_ep") and expert > 1:
        expert *= tensor
    return Meaning(
        rows=prompts,
        samples=prompts * n,
        updates=prompts * n // min(get("rl_config.mini_batch_size") * n, prompts * n),
        length=get("rl_config.max_prompt_length") + response,
        rate=(get("actor_config.lr"), get("actor_config.min_lr"), get("actor_config.lr_decay_style")),
        warm_up=ceil((get("actor_config.lr_warmup_fraction") or 0) * STEPS),
        adam=(get("actor_config.adam_beta1"), get("actor_config.adam_beta2"), 1e-8),
        decay=get("actor_config.weight_decay"),
        sizes=(tensor, get("actor_config.pipeline_model_parallel_size"), get("actor_config.context_parallel_size"),
               expert),
        kl=("loss", weight, estimator) if kind == "ray_grpo" and weight else None,
        bounds=(round(1 - low, 9), round(1 + high, 9), None),
        reduction="sequence_mean" if by_sequence else "token_mean",
        sampling=(n, temperature),
        validation=(1, 1.0),  # there is none
        is_tower_trained=False,
        saves=get("actor_config.save_interval"),
    )  # fmt: skip


def _llamafactory_1(given: Mapping[str, Any], devices: int) -> Meaning:
    """Version 1: AdamW of torch unless a section says otherwise, a constant rate, and a batch of all ranks."""
    get = Theirs("llamafactory", "v1", given)
    context = get("dist_config.cp_size") or get("cp_size") or 1
    batch = get("global_batch_size") or get("micro_batch_size") * (devices // context)
    betas = get("optim_config.adamw_betas") or (0.9, 0.999)
    return Meaning(
        rows=batch, samples=batch, updates=1, length=get("cutoff_len"), rate=(get("learning_rate"), 0.0, "constant"),
        warm_up=0, adam=(*betas, 1e-8), decay=get("optim_config.wd") or 0.01,
        sizes=(1, 1, context, get("dist_config.ep_size") or 1), kl=None, bounds=None, reduction=None, sampling=None,
        validation=None, is_tower_trained=False, saves=get("save_steps"),
    )  # fmt: skip


def slime(given: Mapping[str, Any], devices: int) -> Meaning:
    get = Theirs("slime", "all", given)
    prompts, n = get("rollout_batch_size"), get("n_samples_per_prompt")
    updates = get("num_steps_per_rollout") or prompts * n // (get("global_batch_size") or prompts * n)
    context, response = get("rollout_max_context_len"), get("rollout_max_response_len")
    # Without a limit of their own, prompts get what the context leaves; without a context, any length.
    prompt = get("rollout_max_prompt_len") or (context - response if context else 2048)
    kind, weight = get("kl_loss_type"), get("kl_loss_coef") if get("use_kl_loss") else 0
    estimator = {"k1": "k2", "k2": "k2", "k3": "k3", "low_var_kl": "k3"}[kind]
    high = get("eps_clip") if get("eps_clip_high") is None else get("eps_clip_high")
    heat = get("rollout_temperature") if get("eval_temperature") is None else get("eval_temperature")
    is_greedy = not heat or get("eval_top_k") == 1
    estimates = get("advantage_estimator")
    iterations = get("lr_warmup_iters")
    share = get("lr_warmup_fraction")
    return Meaning(
        rows=prompts,
        samples=prompts * n,
        updates=updates,
        length=prompt + response,
        rate=(get("lr"), get("min_lr"), get("lr_decay_style")),
        warm_up=iterations if share is None else ceil(share * STEPS),
        adam=(get("adam_beta1"), get("adam_beta2"), get("adam_eps")),
        decay=get("weight_decay"),
        sizes=tuple(get(f"{axis}_model_parallel_size") for axis in ("tensor", "pipeline")) + (
            get("context_parallel_size"), get("expert_model_parallel_size")),
        kl=("loss", weight, estimator) if weight else None,  # an estimator of groups does not read kl_coef
        bounds=(round(1 - min(get("eps_clip"), 1.0), 9), round(1 + high, 9),
                None if estimates == "cispo" else get("eps_clip_c")),
        reduction="token_mean" if get("calculate_per_token_loss") and estimates != "gspo" else "sequence_mean",
        sampling=(n, get("rollout_temperature")),
        validation=(0, None) if is_greedy else (get("n_samples_per_eval_prompt"), heat),
        is_tower_trained=False,
        saves=get("save_interval"),
    )  # fmt: skip


def swift(given: Mapping[str, Any], devices: int) -> Meaning:
    """GRPO, with Megatron where the batch is a whole one, and without where it counts per device."""
    is_megatron = "global_batch_size" in given
    get = Theirs("swift", "megatron" if is_megatron else "rlhf", given)
    n, beta = get("num_generations"), get("beta")
    if is_megatron:
        sequences, rounds = get("global_batch_size"), get("steps_per_generation") or 1
        rate = (get("lr") or (1e-5 if get("tuner_type") == "full" else 1e-4), get("min_lr"), get("lr_decay_style"))
        share, iterations = get("lr_warmup_fraction"), get("lr_warmup_iters")
        sizes = tuple(get(f"{axis}_model_parallel_size") for axis in ("tensor", "pipeline"))
        sizes += (get("context_parallel_size"), get("expert_model_parallel_size"))
        epsilon = get("adam_eps")
    else:
        spans = get("gradient_accumulation_steps") or 1
        context = get("sequence_parallel_size")
        sequences = get("per_device_train_batch_size") * spans * devices // context
        rounds = max(1, (get("steps_per_generation") or spans) / spans)  # several rounds may be accumulated
        rate = (get("learning_rate") or (1e-5 if get("tuner_type") == "full" else 1e-4), 0.0, get("lr_scheduler_type"))
        share, iterations, sizes = get("warmup_ratio") or None, get("warmup_steps"), (1, 1, context, 1)
        epsilon = get("adam_epsilon")
    generated = max(get("generation_batch_size") or int(sequences * rounds), sequences)
    high = get("epsilon") if get("epsilon_high") is None else get("epsilon_high")
    kind, by_sequence = get("loss_type") or "grpo", get("importance_sampling_level") == "sequence"
    reductions = {"grpo": "sequence_mean", "dr_grpo": "sequence_mean_token_sum_norm"}
    beta = 0.04 if beta is None else beta
    return Meaning(
        rows=generated // n,
        samples=generated // n * n,
        updates=generated // sequences,
        length=(get("max_length") or 2048) + get("max_completion_length"),
        rate=rate,
        warm_up=iterations if share is None else ceil(share * STEPS),
        adam=(get("adam_beta1"), get("adam_beta2"), epsilon),
        decay=get("weight_decay"),
        sizes=sizes,
        kl=("loss", beta, "k3") if beta else None,
        bounds=(round(1 - get("epsilon"), 9), round(1 + high, 9), get("delta")),
        reduction="sequence_mean" if by_sequence else reductions.get(kind, "token_mean"),
        sampling=(n, get("temperature")),
        validation=(get("num_generations_eval") or n, get("temperature")),
        is_tower_trained=not get("freeze_vit"),
        saves=max(1, round(get("save_steps") * sequences / generated)) if get("save_strategy") == "steps" else None,
    )


INTERPRETERS: dict[str, Callable[..., Meaning]] = {
    "verl": verl, "areal": areal, "openrlhf": openrlhf, "trl": trl, "llamafactory": llamafactory,
    "mindspeed_rl": mindspeed_rl, "slime": slime, "swift": swift,
}  # fmt: skip
