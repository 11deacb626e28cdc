"""What follows from several keys of verl together."""

from __future__ import annotations

import re
from typing import get_args

from mega_rl.config.schema.sampling import NormRole
from mega_rl.errors import InputError
from mega_rl.importers.draft.draft import Draft, Rule
from mega_rl.importers.draft.units import (
    as_list,
    exact,
    note_sharding,
    set_timeout,
    set_tokens,
    set_vision,
    set_warmup,
)
from mega_rl.importers.rules.learned import set_stage
from mega_rl.importers.rules.verl_learned import adapter, critic, reward_model, rewards, rows
from mega_rl.importers.rules.verl_running import (
    ACTOR,
    MEGATRON,
    ROLLOUT,
    asynchronous,
    keys_of,
    logging,
    router,
    running,
)

ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
ADVANTAGES = {
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "gae": "gae",
}
OBJECTIVES = {"vanilla": "ppo", "gspo": "gspo", "cispo": "cispo"}
REDUCTIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "sequence_mean_token_sum_norm",
}
SHORT = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert", "etp": "expert_tensor"}  # of torchtitan
NOISE = "trainer.noise_injection"
DEFAULT_BUDGET = 16384  # tokens per device of verl


def program(draft: Draft) -> str:
    """Its supervised trainer has keys without ``actor_rollout_ref``."""
    is_sft = draft.has("model.path", "model.partial_pretrain") or any("sft" in word for word in draft.given.program)
    return "sft" if is_sft else "rl"


def stage(draft: Draft) -> None:
    if draft.has("defaults"):
        raise InputError(
            "defaults composes other files into this one, and they are not read: give the composed configuration, "
            "which verl's trainer prints with --cfg job --resolve"
        )
    set_stage(draft, "sft" if program(draft) == "sft" else "rl")


def kl(draft: Draft) -> None:
    in_loss, in_reward = draft.get(f"{ACTOR}use_kl_loss"), draft.get("algorithm.use_kl_in_reward")
    loss = [f"{ACTOR}kl_loss_coef", f"{ACTOR}kl_loss_type"]
    reward = ["algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty"]
    switches = [f"{ACTOR}use_kl_loss", "algorithm.use_kl_in_reward"]
    if draft.get("algorithm.kl_ctrl.type") == "adaptive":
        draft.lack(["algorithm.kl_ctrl.type"], "other_word", "'adaptive'; the weight is fixed")
    if in_loss and in_reward:
        draft.lack([*reward, switches[1]], "other_word", "the KL is in the loss or in the reward, not in both")
    used, unused = (loss, reward) if in_loss or not in_reward else (reward, loss)
    where = "loss" if used is loss else "reward"
    text = f"not read, as the KL is in the {where}" if in_loss or in_reward else "not read, as there is no KL"
    for key in unused:
        draft.note(key, "same", text)
    if not (in_loss or in_reward):
        draft.set("algorithm.kl_coefficient", 0.0, switches)
        for key in used:
            draft.note(key, "same", text)
        return
    draft.set("algorithm.kl_in", where, switches)
    if where == "reward" and draft.get("algorithm.adv_estimator") != "gae":
        draft.lack([switches[1]], "kl_before_baseline")
    draft.set("algorithm.kl_coefficient", draft.number(used[0], default=0.001), [used[0]])
    estimator = str(draft.get(used[1], default="low_var_kl" if where == "loss" else "kl"))
    if estimator.removesuffix("+") not in ESTIMATORS:
        draft.lack([used[1]], "other_word", repr(estimator))
    else:
        found = ESTIMATORS[estimator.removesuffix("+")]
        if where == "loss" and estimator.endswith("+"):
            found = "k2"  # a plus takes the gradient of k2, whatever the value; of a reward only the value counts
        elif found == "k1" and where == "loss":
            draft.notes.append("algorithm.kl_estimator: k1 in the loss has no gradient in the mean; k2 is set instead")
            found = "k2"
        draft.set("algorithm.kl_estimator", found, [used[1]])


def advantage(draft: Draft) -> None:
    key, by_deviation = "algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"
    name = draft.word(key)
    if name not in ADVANTAGES:
        draft.lack([key], "other_advantage", repr(name))
        return
    if name == "gae" and draft.stage == "rl" and not draft.has(key):
        draft.notes.append("algorithm.advantage: theirs is gae by default, with a critic, so it is set here")
    found = "dr_grpo" if name == "grpo" and draft.get(by_deviation) is False else ADVANTAGES[name]
    if draft.stage == "rl" and found not in ("gae", "reinforce_pp") and draft.count(f"{ROLLOUT}n") == 1:
        draft.lack([key], "no_baseline")
        found = "reinforce_pp"
    if draft.stage == "rl":
        draft.set("algorithm.advantage", found, [key, by_deviation])


def objective(draft: Draft) -> None:
    mode_key, reduction_key = keys_of("objective")
    mode, reduction = draft.word(mode_key, default="vanilla"), draft.word(reduction_key, default="token-mean")
    if mode in OBJECTIVES:
        draft.set("algorithm.objective", OBJECTIVES[mode], [mode_key])
    else:
        draft.lack([mode_key], "other_loss", repr(mode))
    if mode == "gspo":
        draft.set("algorithm.loss_reduction", "sequence_mean", [mode_key])
        draft.note(reduction_key, "mapped", "algorithm.loss_reduction = sequence_mean, the one of gspo")
    elif reduction in REDUCTIONS:
        draft.set("algorithm.loss_reduction", REDUCTIONS[reduction], [reduction_key])
    else:
        draft.lack([reduction_key], "other_word", repr(reduction))
    low_key, high_key, dual_key = (f"{ACTOR}clip_ratio_{part}" for part in ("low", "high", "c"))
    both = draft.number(f"{ACTOR}clip_ratio", default=0.2)
    draft.note(f"{ACTOR}clip_ratio", "same", "not read there unless a side of it is null")
    low = draft.number(low_key) if draft.number(low_key) is not None else both
    high = draft.number(high_key) if draft.number(high_key) is not None else both
    draft.set("algorithm.clip_ratio_low", min(low or 0.0, 1.0) if mode == "cispo" else low, [low_key])
    draft.set("algorithm.clip_ratio_high", high, [high_key])
    if mode == "vanilla":
        draft.set("algorithm.dual_clip", draft.number(dual_key), [dual_key])
    else:
        draft.note(dual_key, "same", f"not read, as {mode} has no second bound")


def batches(draft: Draft) -> None:
    """Mini-batches are counted; a budget of tokens holds one sequence at least."""
    batch, mini = draft.count("data.train_batch_size"), draft.count(f"{ACTOR}ppo_mini_batch_size")
    if draft.has("async_training.trigger_parameter_sync_step"):
        batch = None  # its own rule
    if batch and mini and draft.stage == "rl":
        number = exact(batch, min(mini, batch), "algorithm.minibatches_per_step", draft)
        draft.set("algorithm.minibatches_per_step", number, keys_of("minibatches"))
    longest = (draft.count("data.max_prompt_length") or 0) + (draft.count("data.max_response_length") or 0)
    if draft.stage != "rl":
        longest = draft.count("data.max_length", default=1024) or 1024
        draft.set("data.max_prompt_length", longest // 2, ["data.max_length"])
        draft.set("data.max_response_length", longest - longest // 2, ["data.max_length"])
    per_device = draft.count(f"{ACTOR}ppo_max_token_len_per_gpu", "data.max_token_len_per_gpu")
    is_dynamic = draft.get(f"{ACTOR}use_dynamic_bsz", "data.use_dynamic_bsz")
    sequences = draft.count(
        f"{ACTOR}ppo_micro_batch_size_per_gpu", "data.micro_batch_size_per_gpu", "data.micro_batch_size"
    )
    ranks = draft.result.get("parallel.context", 1)
    if is_dynamic or (per_device and not sequences):
        set_tokens(draft, (per_device or DEFAULT_BUDGET) * ranks, keys_of("tokens"), longest)
    elif sequences:
        set_tokens(draft, sequences * longest, keys_of("tokens"), longest)
    filters = "data.filter_overlong_prompts"
    if draft.stage == "rl":
        # Without filtering, theirs cut or refuse an overlong prompt, by data.truncation.
        refuses = not draft.get(filters) and draft.get("data.truncation", default="error") == "error"
        draft.set(filters, not refuses, [filters])
    _truncation(draft, bool(draft.get(filters)))


def _truncation(draft: Draft, is_filtered: bool) -> None:
    key = "data.truncation"
    if draft.stage == "rl" and is_filtered:
        draft.note(key, "same", "nothing is left to be cut, as longer prompts are left out")
    elif draft.word(key, default="error") == "error":
        draft.note(key, "same", "as it is here")
    else:
        draft.lack([key], "truncation")


def layout(draft: Draft) -> None:
    keys = keys_of("layout")
    for part, ours in (
        ("tensor_model_parallel_size", "tensor"),
        ("virtual_pipeline_model_parallel_size", "virtual_pipeline"),
        ("pipeline_model_parallel_size", "pipeline"),
        ("context_parallel_size", "context"),
        ("expert_model_parallel_size", "expert"),
        ("expert_tensor_parallel_size", "expert_tensor"),
        ("ulysses_sequence_parallel_size", "context"),
        ("ulysses_parallel_size", "context"),
        ("expert_parallel_size", "expert"),  # of VeOmni
        *((short, ours) for short, ours in SHORT.items()),
    ):
        found = [key for key in keys if key.rpartition(".")[2] == part and draft.has(key)]
        size = draft.count(*found) if found else None
        for key in found:
            if size is not None and (size > 1 or f"parallel.{ours}" not in draft.result):
                draft.set(f"parallel.{ours}", size, [key])
            else:
                draft.note(key, "same", "not set, or 1")
    sequence = f"{MEGATRON}sequence_parallel" if draft.stage == "rl" else "engine.sequence_parallel"
    override = f"{MEGATRON}override_transformer_config.sequence_parallel"
    if draft.has(override):
        sequence = override
    if draft.result.get("parallel.tensor", 1) > 1:
        draft.set("parallel.sequence", draft.get(sequence, default=True), [sequence])
    else:
        draft.note(sequence, "same", "there is one tensor-parallel rank")
    fsdp = (f"{ACTOR}strategy", f"{ACTOR}fsdp_config.", "model.strategy", "model.fsdp_config.")
    note_sharding(draft, [key for key in draft.given.values if key.startswith(fsdp)])


def memory(draft: Draft) -> None:
    parts = {"param_offload": "weights", "grad_offload": "gradients", "optimizer_offload": "optimizer"}
    keys = [key for key in keys_of("offload") if draft.has(key)]
    chosen = {parts[name]: key for key in keys if (name := key.rpartition(".")[2]) in parts and draft.get(key)}
    optim = f"{ACTOR}optim." if draft.stage == "rl" else "optim."
    on_host = f"{optim}override_optimizer_config.optimizer_cpu_offload"
    if draft.get(on_host):
        draft.set(
            "memory.optimizer_on_host", True, [on_host, *(chosen[part] for part in chosen if part == "optimizer")]
        )
        chosen.pop("optimizer", None)
    if draft.result.get("rollout.placement") == "separate":
        if "optimizer" in chosen:
            draft.set("memory.optimizer_on_host", True, [chosen.pop("optimizer")])
        for key in chosen.values():
            draft.note(key, "same", "engines with devices of their own need no room on the trainer's")
        chosen = {}
    if draft.stage != "rl":  # weights and gradients are always in use there
        for part in ("weights", "gradients"):
            draft.lack([chosen.pop(part)], "always_used") if part in chosen else None
    if chosen:
        draft.set("memory.offload", [part for part in parts.values() if part in chosen], chosen.values())
    for key in keys:
        draft.note(key, "same", "off, as here") if not draft.get(key) else None
    saves = "enable_gradient_checkpointing"
    triples = [keys_of("recompute")[start : start + 3] for start in (2, 5)]
    granularity, method, layers = triples[0] if draft.stage == "rl" else triples[1]
    given = draft.word(granularity)
    if given in ("full", "selective"):
        draft.set("memory.recompute", given, [granularity, method])
        draft.note(layers, "same", "with the method uniform, the layers of a group; every layer is one here")
        if draft.get(method) == "block":
            draft.set("memory.recompute_num_layers", draft.count(layers), [layers])
        for key in (f"actor_rollout_ref.model.{saves}", f"model.{saves}"):
            draft.note(key, "same", "recompute_granularity says more")
    else:
        draft.lack([granularity], "other_word", repr(given)) if given is not None else None
        for key in (f"actor_rollout_ref.model.{saves}", f"model.{saves}"):
            if draft.has(key):
                draft.set("memory.recompute", "full" if draft.get(key) else "none", [key])


def learning_rate(draft: Draft) -> None:
    """Their schedule takes one step per rollout batch, ours per optimizer step."""
    keys = keys_of("warmup")
    per_step = draft.result.get("algorithm.minibatches_per_step", 1)
    if draft.has("async_training.trigger_parameter_sync_step"):  # there it takes one per part of a batch
        per_step = draft.count("async_training.require_batches", default=1) or 1
    steps = draft.number(f"{ACTOR}optim.lr_warmup_steps", "optim.lr_warmup_steps")
    steps = None if steps is None or steps < 0 else steps * per_step
    ratio = draft.number(*(key for key in keys if key.endswith("ratio")))
    set_warmup(draft, keys, steps=steps, ratio=ratio)
    _floor(draft)
    betas = draft.get(*keys_of("betas"))
    if isinstance(betas, list) and len(betas) == 2:
        draft.set("optimizer.beta1", betas[0], keys_of("betas"))
        draft.set("optimizer.beta2", betas[1], keys_of("betas"))


def _floor(draft: Draft) -> None:
    """As a rate, which its optimizer of Megatron reads, or as a share of the largest one."""
    share = draft.number(*keys_of("floor"))
    if draft.has("optim.min_lr", f"{ACTOR}optim.min_lr") and not share:
        for key in keys_of("floor"):
            draft.note(key, "same", "not read, as min_lr is given")
    elif share is not None:
        draft.set("optimizer.min_lr", share * draft.result.get("optimizer.lr", 1e-6), keys_of("floor"))


def dynamic_sampling(draft: Draft) -> None:
    prefix, generated = "algorithm.filter_groups.", "data.gen_batch_size"
    batch = draft.count("data.train_batch_size") or 1
    drawn = draft.count(generated) or batch
    if not draft.get(f"{prefix}enable"):
        for key in (f"{prefix}metric", f"{prefix}max_num_gen_batches", generated):
            draft.note(key, "same", "not read, as no groups are filtered")
        draft.note(f"{prefix}enable", "same", "off, as here")
        return
    draft.set("algorithm.dynamic_sampling.enabled", True, [f"{prefix}enable"])
    if drawn > batch:
        draft.set("algorithm.dynamic_sampling.oversample", drawn / batch, [generated])
    else:
        draft.note(generated, "same", "as many as a batch")
    num_batches = draft.count(f"{prefix}max_num_gen_batches")
    if num_batches:
        budget = float(max(1, num_batches * drawn // batch))
        draft.set("algorithm.dynamic_sampling.budget", budget, [f"{prefix}max_num_gen_batches"])
    else:
        draft.note(f"{prefix}max_num_gen_batches", "same", "no limit; ours is algorithm.dynamic_sampling.budget")
    metric = draft.word(f"{prefix}metric")
    if metric in ("acc", "score"):
        is_one = bool(draft.rewards) and not any("only" in reward for reward in draft.rewards)
        first = draft.rewards[0]["name"].rpartition(":")[2] if is_one else None
        draft.set("algorithm.dynamic_sampling.metric", first, [f"{prefix}metric"])
    else:
        draft.note(f"{prefix}metric", "same", "the weighted sum of all rewards")


def correction(draft: Draft) -> None:
    kind, threshold, old = keys_of("correction")
    level = draft.word(kind)
    if level in ("token", "sequence"):
        draft.set("algorithm.importance_level", level, [kind])
        given = draft.get(threshold, default=2.0)
        if isinstance(given, str) and (bounds := re.fullmatch(r"([\d.]+)_([\d.]+)", given)):
            # Of two bounds, tokens outside are left out.
            draft.set("algorithm.importance_correction", "mask", [threshold])
            draft.set("algorithm.importance_floor", float(bounds[1]), [threshold])
            draft.set("algorithm.importance_cap", float(bounds[2]), [threshold])
        else:
            draft.set("algorithm.importance_cap", draft.number(threshold, default=2.0), [threshold])
    elif draft.number(old):
        draft.set("algorithm.importance_cap", draft.number(old), [old])
    elif draft.result.get("aqn.enabled"):
        draft.note(kind, "same", "with noise the importance weights stay as they are here")
    elif draft.result.get("rollout.max_staleness"):
        draft.notes.append("algorithm.importance_cap: 2, as samples of older weights need importance weights here")
        for key in (kind, threshold, old):
            draft.note(key, "mapped", "algorithm.importance_cap = 2.0")
    elif draft.stage == "rl":
        draft.set("algorithm.importance_cap", None, [kind, threshold, old])


def rest(draft: Draft) -> None:
    """Device, precision."""
    if draft.has("trainer.device") and draft.get("trainer.device") is not None:
        draft.set("platform.name", draft.get("trainer.device"), ["trainer.device"])
    set_timeout(draft, "actor_rollout_ref.nccl_timeout")
    set_vision(draft, f"{ACTOR}freeze_vision_tower")
    dtypes = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}
    for key in keys_of("precision"):
        if draft.has(key) and draft.word(key) in dtypes:
            draft.set("rollout.dtype" if "rollout" in key else "model.dtype", dtypes[draft.word(key)], [key])
        elif draft.has(key):
            draft.lack([key], "other_word", repr(draft.get(key)))


def noise(draft: Draft) -> None:
    """Which norms get it; and a note on the schedule, of which the guide's words and the default here differ."""
    targets, excluded = keys_of("noise")
    roles = get_args(NormRole)
    if draft.has(targets):
        chosen = as_list(draft.get(targets))
        known = [role for role in chosen if role in roles]
        draft.set("aqn.target_modules", known, [targets])
        if known != chosen:
            draft.lack([targets], "noise_options", f"no norm is called {', '.join(map(str, set(chosen) - set(known)))}")
    if draft.has(excluded):
        patterns = as_list(draft.get(excluded))
        draft.set("aqn.exclude_patterns", [text for text in patterns if "norm" in str(text)], [excluded])
    if draft.get(f"{NOISE}.enabled") and not draft.has(f"{NOISE}.schedule"):
        draft.notes.append(
            "aqn.schedule: exponential with a first stage without noise, as QeRL's code has it; the guide for Ascend "
            "says in words that sigma falls linearly: set linear if that is meant"
        )


RULES: dict[str, Rule] = {
    "stage": stage,
    "layout": layout,
    "adapter": adapter,
    "kl": kl,
    "advantage": advantage,
    "critic": critic,
    "objective": objective,
    "asynchronous": asynchronous,
    "batches": batches,
    "memory": memory,
    "learning_rate": learning_rate,
    "reward_model": reward_model,
    "rewards": rewards,
    "rows": rows,
    "dynamic_sampling": dynamic_sampling,
    "correction": correction,
    "logging": logging,
    "router": router,
    "running": running,
    "rest": rest,
    "noise": noise,
}
