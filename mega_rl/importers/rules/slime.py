"""What follows from several flags of slime together, and of vime, its fork with vLLM."""

from __future__ import annotations

from mega_rl.config.reading.tables import table
from mega_rl.errors import shown
from mega_rl.importers.draft import megatron
from mega_rl.importers.draft.data_sets import add_rewards
from mega_rl.importers.draft.draft import Draft, Rule
from mega_rl.importers.draft.units import as_list, exact
from mega_rl.importers.rules.learned import AdapterKeys, CriticKeys, has_critic, set_adapter, set_critic, set_stage

ADAPTER = AdapterKeys(
    switches=(),
    rank=("lora_rank",),
    alpha=("lora_alpha",),
    targets=("lora_target_modules",),
    dropout=("lora_dropout",),
)
CRITIC = CriticKeys(gamma=("gamma",), lam=("lambd",), clip=("value_clip",), warmup=("num_critic_only_steps",))
# Their estimator -> our advantage, and the objective.
ESTIMATORS = {
    "grpo": ("grpo", "ppo"),
    "gspo": ("grpo", "gspo"),
    "cispo": ("grpo", "cispo"),
    "ppo": ("gae", "ppo"),
    "reinforce_plus_plus": ("reinforce_pp", "ppo"),
    "reinforce_plus_plus_baseline": ("reinforce_pp_baseline", "ppo"),
}
KINDS = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3"}
# Their verifier -> our reward, and how theirs differs; empty: it does not.
VERIFIERS = {
    "dapo": ("dapo_math", ""),
    "math": ("math_verify", ""),
    "deepscaler": ("math_verify", "deepscaler reads what stands behind </think>, and gives 0 where that is missing"),
}
NONZERO_STD = "check_reward_nonzero_std"
PROMPT = 2048  # tokens, where theirs have no limit


def keys_of(rule: str) -> list[str]:
    return list(table("slime").find_rule(rule))


def program(draft: Draft) -> str:
    return "all"


def stage(draft: Draft) -> None:
    kind = draft.word("loss_type")
    set_stage(draft, "sft" if kind == "sft_loss" else "rl", ("loss_type",))
    if kind not in ("sft_loss", "policy_loss"):
        draft.lack(["loss_type"], "other_loss", shown(kind))
    nodes, per_node = draft.count("actor_num_nodes", default=1) or 1, draft.count("actor_num_gpus_per_node")
    if per_node and draft.has("actor_num_gpus_per_node"):
        draft.num_devices = nodes * per_node
    for key in ("actor_num_nodes", "actor_num_gpus_per_node"):
        draft.note(key, "mapped", f"torchrun --nnodes {nodes} --nproc-per-node {per_node}")
    set_adapter(draft, ADAPTER, bool(draft.count("lora_rank")), rank=16, alpha=32)
    load, path = draft.word("load", "ref_load"), draft.word("hf_checkpoint")
    if load and path and load != path:
        draft.notes.append(f"model.path: {path} must hold the weights that theirs reads from {load}")
    for key in keys_of("weights"):
        draft.note(key, "same", "model.path stands for it, in Hugging Face's format")


def advantage(draft: Draft) -> None:
    """Whitening over the batch comes with the advantage here, and is a flag there."""
    keys = keys_of("stage")[1:]
    if draft.stage != "rl":
        for key in keys:
            draft.same([key], "only_rl")
        return
    name = draft.word("advantage_estimator")
    if name not in ESTIMATORS:
        draft.lack(["advantage_estimator"], "other_advantage", shown(name))
        return
    found, objective = ESTIMATORS[str(name)]
    if found == "grpo" and draft.get("disable_grpo_std_normalization"):
        found = "dr_grpo"
    draft.set("algorithm.advantage", found, keys[:2])
    draft.set("algorithm.objective", objective, keys[:1])
    if draft.get("disable_rewards_normalization"):
        draft.lack(["disable_rewards_normalization"], "other_advantage", "no baseline of the group")
    is_whitened = bool(draft.get("normalize_advantages"))
    if is_whitened != (found in ("gae", "reinforce_pp", "reinforce_pp_baseline")):
        if is_whitened:
            draft.lack(["normalize_advantages"], "other_advantage", "not over the batch, after the group")
        else:
            draft.notes.append(f"algorithm.advantage: {found} is whitened over the batch here, and is not there")
    for key in keys:
        draft.note(key, "same", "as it is here")


def objective(draft: Draft) -> None:
    if draft.stage != "rl":
        for rule in ("kl", "clip", "correction"):
            draft.same(keys_of(rule), "only_rl")
        if draft.get("calculate_per_token_loss"):
            draft.note("calculate_per_token_loss", "same", "the mean over all tokens, as here")
        else:
            draft.notes.append("trainer.stage: without calculate_per_token_loss theirs takes means over sequences")
        return
    low = draft.number("eps_clip", default=0.2) or 0.0
    high = draft.number("eps_clip_high", default=low) or 0.0
    draft.set("algorithm.clip_ratio_low", min(low, 1.0), ["eps_clip"])
    draft.set("algorithm.clip_ratio_high", high, ["eps_clip_high"])
    draft.note("eps_clip_high", "same", "as eps_clip")
    if draft.number("eps_clip_c") and draft.result.get("algorithm.objective") != "cispo":
        draft.set("algorithm.dual_clip", draft.number("eps_clip_c"), ["eps_clip_c"])
    draft.note("eps_clip_c", "same", "off, as here")
    is_by_token = bool(draft.get("calculate_per_token_loss"))
    if draft.result.get("algorithm.objective") == "gspo" and is_by_token:
        draft.lack(["calculate_per_token_loss"], "other_loss", "gspo has a mean over sequences")
        is_by_token = False
    draft.set(
        "algorithm.loss_reduction", "token_mean" if is_by_token else "sequence_mean", ["calculate_per_token_loss"]
    )
    _kl(draft)
    _correction(draft)
    is_on = has_critic(draft)
    rate = float(draft.number("lr", default=1e-6) or 1e-6)
    frozen = int(draft.number("num_critic_only_steps") or 0)
    set_critic(draft, CRITIC, is_on, lr=rate, lam=1.0, clip=0.2, frozen=frozen)


def _kl(draft: Draft) -> None:
    """``kl_coef`` lowers the rewards of tokens, which the estimators of groups do not read."""
    keys, kind = keys_of("kl"), str(draft.word("kl_loss_type"))
    in_loss = (draft.number("kl_loss_coef") or 0.0) if draft.get("use_kl_loss") else 0.0
    found = draft.result.get("algorithm.advantage")
    in_reward = (draft.number("kl_coef") or 0.0) if found not in ("grpo", "dr_grpo") else 0.0
    if in_reward and found != "gae":
        draft.lack(["kl_coef"], "kl_before_baseline")
        in_reward = 0.0
    draft.set("algorithm.kl_coefficient", in_loss or in_reward, ["kl_loss_coef" if in_loss else "kl_coef"])
    if not (in_loss or in_reward):
        for key in keys:
            draft.note(key, "same", "not read, as there is no KL")
        return
    estimator = KINDS.get(kind)
    if estimator is None:
        draft.lack(["kl_loss_type"], "other_word", shown(kind))
    elif in_loss and estimator == "k1":
        draft.notes.append("algorithm.kl_estimator: k1 in the loss has no gradient in the mean; k2 is set instead")
        estimator = "k2"
    draft.set("algorithm.kl_in", "loss" if in_loss else "reward", ["use_kl_loss"])
    draft.set("algorithm.kl_estimator", estimator or "k3", ["kl_loss_type"] if estimator else [])
    for key in keys:
        draft.note(key, "same", "read with another kind of KL only")


def _correction(draft: Draft) -> None:
    keys = keys_of("correction")
    if not draft.get("use_tis"):
        draft.set("algorithm.importance_cap", None)
        for key in keys:
            draft.note(key, "same", "off")
        return
    draft.set("algorithm.importance_cap", draft.number("tis_clip", default=2.0), ["use_tis", "tis_clip"])
    if draft.number("tis_clip_low"):
        draft.lack(["tis_clip_low"], "other_word", f"{draft.number('tis_clip_low')}; weights have no lower bound")
    draft.note("tis_clip_low", "same", "0, as here")


def batches(draft: Draft) -> None:
    """``global_batch_size`` counts samples of one optimizer step."""
    prompts = draft.count("rollout_batch_size", default=1) or 1
    n = draft.count("n_samples_per_prompt", default=1) or 1
    keys = keys_of("batch")
    updates = draft.count("num_steps_per_rollout")
    whole = draft.count("global_batch_size")
    if updates is None:
        whole = min(whole or prompts * n, prompts * n)
        updates = exact(prompts * n, whole, "algorithm.minibatches_per_step", draft)
    steps, epochs = draft.count("num_rollout"), draft.count("num_epoch")
    if draft.stage == "rl":
        draft.set("algorithm.minibatches_per_step", updates, keys)
    else:
        draft.set("data.train_batch_size", max(1, prompts // updates), ["rollout_batch_size", *keys])
        steps = steps and steps * updates
    if steps:
        draft.set("trainer.total_steps", steps, ["num_rollout"])
        draft.note("num_epoch", "same", "not read, as num_rollout is given")
    elif epochs:
        draft.set("trainer.total_epochs", epochs, ["num_epoch"])
    _lengths(draft)


def _lengths(draft: Draft) -> None:
    """Prompts have no limit unless one is given; that of prompt and response together is the context's."""
    budget = draft.count("max_tokens_per_gpu") if draft.get("use_dynamic_batch_size") else None
    if draft.stage != "rl":
        longest = (budget or draft.count("seq_length", default=4096) or 4096) * draft.result.get("parallel.context", 1)
        draft.set("data.max_prompt_length", longest // 2, ["seq_length"])
        draft.set("data.max_response_length", longest - longest // 2, ["seq_length"])
        if not draft.has("seq_length"):
            draft.notes.append(f"data.max_prompt_length: {longest} with the response, the budget: theirs have no limit")
    else:
        draft.note("seq_length", "same", "prompt and response have lengths of their own")
        response = draft.count("rollout_max_response_len", default=1024) or 1024
        context = draft.count("rollout_max_context_len")
        if context and not draft.has("rollout_max_response_len"):
            response = max(1, context - (draft.count("rollout_max_prompt_len") or context // 2))
        draft.set("data.max_response_length", response, ["rollout_max_context_len"])
        if draft.count("rollout_max_prompt_len") is None:
            prompt = max(1, context - response) if context else PROMPT
            draft.set("data.max_prompt_length", prompt, ["rollout_max_context_len"])
            if not context:
                draft.notes.append(f"data.max_prompt_length: theirs have no limit; {PROMPT} leaves out longer ones")
        longest = int(draft.result.get("data.max_prompt_length", PROMPT)) + response
    sequences = draft.count("micro_batch_size", default=1) or 1
    megatron.tokens(draft, keys_of("tokens"), budget, sequences, longest)


def sampling(draft: Draft) -> None:
    keys = keys_of("sampling_groups")
    path, ours = str(draft.word("dynamic_sampling_filter_path", default="")), "algorithm.dynamic_sampling."
    prompts = draft.count("rollout_batch_size", default=1) or 1
    drawn = draft.count("over_sampling_batch_size", default=prompts) or prompts
    if draft.stage == "rl" and path and NONZERO_STD in path:
        draft.set(f"{ours}enabled", True, keys[:1])
        if drawn > prompts:
            draft.set(f"{ours}oversample", drawn / prompts, ["over_sampling_batch_size"])
    elif draft.stage == "rl" and path:
        draft.lack(keys[:1], "filtering", shown(path))
    elif draft.stage == "rl" and drawn > prompts:
        draft.set("rollout.oversample", drawn / prompts, ["over_sampling_batch_size"])
        if not draft.get("partial_rollout"):
            draft.notes.append("rollout.oversample: responses that have not ended go on here, and are dropped there")
    for key in keys:
        draft.note(key, "same", "as it is here")
    if draft.stage == "rl":
        replay = "rollout" if draft.get("use_rollout_routing_replay") else "off"
        replay = "recompute" if replay == "off" and draft.get("use_routing_replay") else replay
        draft.set("rollout.routing_replay", replay, keys_of("routing"))
        _validation(draft)
    for rule in ("routing", "validation"):
        draft.same([key for key in keys_of(rule) if key not in draft.outcomes], "only_rl")


def _validation(draft: Draft) -> None:
    """A temperature of 0, or the likeliest token alone, is the greedy response, which is always looked at here."""
    n, temperature, top_k, top_p, response, prompt, skips = keys_of("validation")
    heat = draft.number(temperature, "rollout_temperature", default=1.0)
    if not heat or draft.number(top_k) == 1:
        draft.set("validation.n", 0, [n, temperature, top_k])
    else:
        draft.set("validation.n", draft.count(n, default=1), [n])
        draft.set("validation.temperature", heat, [temperature])
    for key, off in ((top_k, (None, -1, 1)), (top_p, (None, 1, 0.0))):
        if draft.number(key) in off:
            draft.note(key, "same", "as it is here")
        else:
            draft.lack([key], "validation_sampling", shown(draft.number(key)))
    for key, ours in ((response, "data.max_response_length"), (prompt, "data.max_prompt_length")):
        if draft.number(key) in (None, draft.result.get(ours)):
            draft.note(key, "same", f"as {ours}")
        else:
            draft.lack([key], "validation_length", f"{draft.number(key)}, where {ours} is {draft.result.get(ours)}")
    if draft.has(skips):
        draft.set("validation.val_before_train", not draft.get(skips), [skips])


def engines(draft: Draft) -> None:
    keys = keys_of("engines")
    if draft.stage != "rl":
        for rule in ("engines", "staleness"):
            draft.same(keys_of(rule), "only_rl")
        return
    ranks = draft.count("rollout_num_gpus_per_engine", default=1) or 1
    copies = draft.count("sglang_dp_size", "vllm_data_parallel_size", default=1) or 1
    stages = draft.count("vllm_pipeline_parallel_size", default=1) or 1
    if stages > 1:
        draft.lack(["vllm_pipeline_parallel_size"], "engine_layout", str(stages))
    if copies > 1:
        draft.lack(["sglang_dp_size", "vllm_data_parallel_size"], "engine_layout", f"{copies} copies of {ranks} ranks")
    each = exact(ranks, copies * stages, "rollout.tensor_parallel_size", draft)
    draft.set("rollout.tensor_parallel_size", each, ["rollout_num_gpus_per_engine"])
    if draft.get("colocate"):
        draft.set("rollout.placement", "colocated", ["colocate"])
        draft.note("rollout_num_gpus", "same", "colocated engines are as many as the ranks allow")
    else:
        draft.set("rollout.placement", "separate", ["colocate"])
        number = max(1, (draft.count("rollout_num_gpus", default=ranks) or ranks) // each)
        draft.set("rollout.num_engines", number, ["rollout_num_gpus"])
    _staleness(draft)
    for key in keys:
        draft.note(key, "same", "1, as here")


def _staleness(draft: Draft) -> None:
    """``train_async.py`` samples the next step's responses while it trains, with the weights of the step before."""
    path, key = str(draft.word("rollout_function_path", default="")), "rollout_function_path"
    between = draft.count("update_weights_interval", default=1) or 1
    if any("train_async" in word for word in draft.given.program):
        fully = "fully_async" in path
        draft.set("rollout.mode", "in_flight" if fully else "pinned", [key] if fully else [])
        draft.set("rollout.max_staleness", between, ["update_weights_interval"])
        if fully:
            draft.notes.append("rollout.max_staleness: theirs has no limit; choose how many steps weights may be older")
        if draft.result.get("algorithm.importance_cap", 2.0) is None:
            draft.result["algorithm.importance_cap"] = 2.0
            draft.notes.append("algorithm.importance_cap: 2, as samples of older weights need importance weights here")
    elif between > 1:
        draft.lack(["update_weights_interval"], "asynchronous", str(between))
    if path and "fully_async" not in path and not path.endswith("_rollout.generate_rollout"):
        draft.lack([key], "own_code", shown(path))
    for name in keys_of("staleness"):
        draft.note(name, "same", "as it is here")


def rest(draft: Draft) -> None:
    for rule in (megatron.schedule, megatron.saving, megatron.recompute, megatron.router, megatron.optimizer_on_host):
        rule(draft)
    if draft.get("fp16"):
        draft.lack(["fp16"], "other_word", "float16; bfloat16 is set instead")
    draft.note("bf16", "same", "as here")
    is_shared = bool(draft.get("colocate")) and draft.stage == "rl"
    moves = draft.get("offload_train", default=is_shared) or draft.get("offload")
    parts = [part for part in ("weights", "gradients", "optimizer") if part != "optimizer" or not _on_host(draft)]
    if moves and draft.stage == "rl":
        draft.set("memory.offload", parts, ["offload_train", "offload"])
    for key in ("offload", "offload_train"):
        draft.note(key, "same", "off, as here")
    draft.set("data.shuffle", bool(draft.get("rollout_shuffle")), ["rollout_shuffle"])
    draft.set("logging.tensorboard", bool(draft.get("use_tensorboard")), ["use_tensorboard"])
    if draft.get("use_wandb"):
        project = str(draft.word("wandb_project", default="slime"))
        draft.set("logging.wandb_project", project, ["use_wandb", "wandb_project"])
    for key in ("use_wandb", "wandb_project"):
        draft.note(key, "same", "off, as here")
    first, last = draft.count("profile_step_start", default=10) or 10, draft.count("profile_step_end", default=12) or 12
    if draft.get("use_pytorch_profiler", "profile") and 0 < last - first < 1000:
        draft.set("trainer.profile.steps", list(range(first, last)), keys_of("profile"))
    for key in keys_of("profile"):
        draft.note(key, "same", "off, as here")


def _on_host(draft: Draft) -> bool:
    return bool(draft.result.get("memory.optimizer_on_host"))


def files(draft: Draft) -> None:
    """Data for validation are pairs of a name and a path."""
    listed = [str(part) for part in as_list(draft.get("prompt_data"))]
    if listed:
        draft.set("data.train_files", listed, ["prompt_data"])
    pairs = [str(part) for part in as_list(draft.get("eval_prompt_data"))]
    if pairs:
        draft.set("data.val_files", pairs[1::2] or pairs, ["eval_prompt_data"])
    if draft.stage != "rl":
        draft.same(["rm_type", "custom_rm_path"], "only_rl")
        return
    own, kind = draft.word("custom_rm_path"), str(draft.word("rm_type", default=""))
    if own:
        module, _, function = str(own).rpartition(".")
        draft.rewards.append({"name": f"{module}:{function}"})
        draft.note("custom_rm_path", "mapped", f"rewards: {module}:{function}")
        draft.notes.append(f"rewards: {function}(args, sample) takes other arguments; docs/rewards.md has ours")
    elif kind.removeprefix("boxed_") in VERIFIERS:
        name, differs = VERIFIERS[kind.removeprefix("boxed_")]
        draft.rewards.append({"name": name})
        if differs:
            draft.lack(["rm_type"], "verifier", differs)
        draft.note("rm_type", "mapped", f"rewards: {name}")
    elif kind:
        draft.lack(["rm_type"], "verifier", f"{shown(kind)} has none")
    else:
        add_rewards(draft, listed, pairs[1::2] or pairs)


RULES: dict[str, Rule] = {
    "stage": stage,
    "layout": megatron.layout,
    "advantage": advantage,
    "objective": objective,
    "batches": batches,
    "sampling": sampling,
    "engines": engines,
    "rest": rest,
    "files": files,
}
