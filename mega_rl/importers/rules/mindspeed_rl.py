"""What follows from several keys of MindSpeed-RL together."""

from __future__ import annotations

from typing import Any

from mega_rl.config.reading.tables import table
from mega_rl.errors import shown
from mega_rl.importers.draft import megatron
from mega_rl.importers.draft.draft import Draft, Rule
from mega_rl.importers.draft.units import as_list, exact
from mega_rl.importers.rules.learned import AdapterKeys, CriticKeys, has_critic, set_adapter, set_critic, set_stage

ACTOR, RL, GENERATE, SAMPLING = "actor_config.", "rl_config.", "generate_config.", "generate_config.sampling_config."
ADAPTER = AdapterKeys(
    switches=(),
    rank=(f"{ACTOR}lora_r",),
    alpha=(f"{ACTOR}lora_alpha",),
    targets=(f"{ACTOR}lora_target_modules",),
)
CRITIC = CriticKeys(
    lr=("critic_config.lr",),
    gamma=(f"{RL}gamma",),
    lam=(f"{RL}lam",),
    clip=(f"{RL}cliprange_value",),
)
ESTIMATORS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
# Their verifier -> our reward, and how theirs differs; empty: it does not.
VERIFIERS = {
    "acc_for_dapo": ("dapo_math", ""),
    "math_17k_acc": ("math_verify", ""),
    "acc_for_ppo": ("math_verify", ""),
    "base_acc": ("math_verify", "base_acc gives 0 without <think>...</think>...<answer>...\\boxed{}...</answer>"),
    "math_verify_reward": ("math_verify", "it gives 0 without <think>...</think>...<answer>...\\boxed{}...</answer>"),
    "acc": ("math_verify", "acc gives -0.5 for a wrong answer and -1 for none"),
    "retool_reward": ("dapo_math", "retool_reward gives 0.1 for each call of a tool where the answer is wrong"),
}
MANY_STEPS = 1000  # more than anybody records
FORMAT = r"^<think>.*?</think>\s*<answer>.*?</answer>$"


def keys_of(rule: str) -> list[str]:
    return list(table("mindspeed_rl").find_rule(rule))


def _kind(draft: Draft) -> str:
    """``grpo``, ``dapo``, ``ppo`` or ``dpo``: the stage, else the name of the program."""
    words = f"{draft.get(f'{ACTOR}stage', default='')} {' '.join(draft.given.program)}"
    return next((kind for kind in ("grpo", "dapo", "ppo", "dpo") if kind in words), "grpo")


def program(draft: Draft) -> str:
    return "dpo" if _kind(draft) == "dpo" else "rl"


def _samples(draft: Draft) -> bool:
    return any(key.startswith(SAMPLING) for key in draft.given.values)


def stage(draft: Draft) -> None:
    """A section of sampling replaces all of their defaults, so that those of vLLM are left."""
    set_stage(draft, "dpo" if _kind(draft) == "dpo" else "rl", (f"{ACTOR}stage",))
    if _samples(draft):
        draft.defaults = {key: value for key, value in draft.defaults.items() if not key.startswith(SAMPLING)}
    given = draft.count(f"{RL}actor_resource.num_npus")
    draft.num_devices = given or draft.num_devices
    draft.note(f"{RL}actor_resource.num_npus", "mapped", f"torchrun on {given} devices")
    weights(draft)
    set_adapter(draft, ADAPTER, bool(draft.get(*ADAPTER.targets)), rank=8, alpha=16)
    if draft.stage != "rl":
        return
    name = draft.word(f"{RL}adv_estimator", default="group_norm")
    if name not in ("group_norm", "gae"):
        draft.lack([f"{RL}adv_estimator"], "other_advantage", shown(name))
    else:
        draft.set("algorithm.advantage", {"group_norm": "grpo", "gae": "gae"}[name], [f"{RL}adv_estimator"])


def weights(draft: Draft) -> None:
    """Theirs begins with a Megatron checkpoint, which was made from a directory like that of the tokenizer."""
    load, tokenizer = draft.word(f"{ACTOR}load"), draft.word(f"{ACTOR}tokenizer_name_or_path")
    if tokenizer:
        draft.set("model.path", str(tokenizer), [f"{ACTOR}tokenizer_name_or_path"])
    if load and tokenizer:
        draft.notes.append(f"model.path: the weights must be those of {load}, which theirs reads in Megatron's format")
    for key in keys_of("weights"):
        draft.note(key, "same", "model.path stands for it, in Hugging Face's format")


def layout(draft: Draft) -> None:
    megatron.layout(draft, ACTOR)
    key = f"{ACTOR}moe_tp_extend_ep"
    if draft.get(key) and megatron.has_experts(draft, ACTOR):
        ranks = draft.result.get("parallel.tensor", 1) * draft.result.get("parallel.expert", 1)
        draft.set("parallel.expert", ranks, [key])
        draft.set("parallel.expert_tensor", 1, [key])
    draft.note(key, "same", "off, as here")
    key = f"{ACTOR}context_parallel_algo"
    methods = {"ulysses_cp_algo": "ulysses", "megatron_cp_algo": "gather"}
    if draft.result.get("parallel.context", 1) == 1:
        draft.note(key, "same", "not read, as parallel.context is 1")
    elif draft.word(key) in methods:
        draft.set("parallel.context_method", methods[str(draft.word(key))], [key])
    else:
        draft.lack([key], "other_word", shown(draft.get(key)))


def optimizer(draft: Draft) -> None:
    for rule in (megatron.schedule, megatron.saving, megatron.recompute, megatron.router, megatron.precision):
        rule(draft, ACTOR)
    megatron.optimizer_on_host(draft, ACTOR)
    if draft.get(f"{ACTOR}swap_optimizer"):
        draft.set("memory.optimizer_on_host", True, [f"{ACTOR}swap_optimizer"])
    draft.note(f"{ACTOR}swap_optimizer", "same", "off, as here")
    parts = {"param": "weights", "grad": "gradients", "optimizer": "optimizer"}
    keys = {f"{GENERATE}offload_train_{name}": ours for name, ours in parts.items()}
    chosen = {ours: key for key, ours in keys.items() if draft.get(key)}
    if draft.result.get("memory.optimizer_on_host") and (key := chosen.pop("optimizer", None)):
        draft.note(key, "same", "memory.optimizer_on_host says more")
    if chosen:
        draft.set("memory.offload", list(chosen), chosen.values())
    for key in keys:
        draft.note(key, "same", "off, as here")
    draft.set("data.shuffle", not draft.get(f"{ACTOR}no_shuffle"), [f"{ACTOR}no_shuffle"])
    draft.set("data.seed", draft.result.get("trainer.seed", draft.count(f"{ACTOR}seed", default=0)))


def batches(draft: Draft) -> None:
    """Both batches count prompts; where groups are filtered, one says what is sampled and one what is learnt from."""
    whole, keys = draft.count(f"{ACTOR}global_batch_size"), [f"{ACTOR}global_batch_size"]
    steps = draft.count(f"{ACTOR}train_iters")
    if steps:
        draft.set("trainer.total_steps", steps, [f"{ACTOR}train_iters"])
    if draft.stage != "rl":
        draft.set("data.train_batch_size", whole or 1, keys)
        longest = draft.count(f"{ACTOR}seq_length", default=1024) or 1024
        draft.set("data.max_prompt_length", longest // 2, [f"{ACTOR}seq_length"])
        draft.set("data.max_response_length", longest - longest // 2, [f"{ACTOR}seq_length"])
        sequences = 2 * (draft.count(f"{ACTOR}micro_batch_size", default=1) or 1)
        megatron.tokens(draft, keys_of("tokens"), None, sequences, longest)
        return
    draft.note(f"{ACTOR}seq_length", "same", "prompt and response have lengths of their own")
    prompts = (_filtered(draft, whole) if draft.get(f"{RL}filter_groups_enable") else None) or whole
    if not draft.get(f"{RL}filter_groups_enable"):
        for key in keys_of("sampling_groups"):
            draft.note(key, "same", "off, as here")
    mini = draft.count(f"{RL}mini_batch_size", default=1) or 1
    if prompts:
        draft.set("data.train_batch_size", prompts, keys)
        number = exact(prompts, min(mini, prompts), "algorithm.minibatches_per_step", draft)
        draft.set("algorithm.minibatches_per_step", number, [f"{RL}mini_batch_size"])
    passes = draft.number(f"{RL}epochs", default=1)
    if passes == 1:
        draft.note(f"{RL}epochs", "same", "1, as here")
    else:
        draft.lack([f"{RL}epochs"], "several_passes", shown(passes))
    if "data.max_response_length" not in draft.result:
        draft.set("data.max_response_length", 16 if _samples(draft) else 128)
    longest = (draft.count(f"{RL}max_prompt_length") or 0) + int(draft.result["data.max_response_length"])
    budget = draft.count(f"{RL}update_max_packing_token_size") if draft.get(f"{RL}use_dynamic_bsz") else None
    # What is packed together is then divided over the context-parallel ranks.
    each = (budget or 0) // draft.result.get("parallel.context", 1) or None
    micro = draft.count(f"{ACTOR}micro_batch_size", default=1) or 1
    megatron.tokens(draft, keys_of("tokens"), each, micro, longest)


def _filtered(draft: Draft, drawn: int | None) -> int | None:
    prefix, ours = f"{RL}filter_groups_", "algorithm.dynamic_sampling."
    prompts = draft.count(f"{prefix}train_batch_size", default=1) or 1
    draft.set(f"{ours}enabled", True, [f"{prefix}enable", f"{prefix}train_batch_size"])
    if drawn and drawn > prompts:
        draft.set(f"{ours}oversample", drawn / prompts, [f"{ACTOR}global_batch_size"])
    number = draft.count(f"{prefix}max_batches")
    if number and drawn:
        draft.set(f"{ours}budget", float(max(1, number * drawn // prompts)), [f"{prefix}max_batches"])
    draft.note(f"{prefix}max_batches", "same", f"no limit; ours is {ours}budget")
    return prompts


def objective(draft: Draft) -> None:
    if draft.stage != "rl":
        if (kind := draft.word(f"{ACTOR}dpo_loss_type", default="sigmoid")) in ("sigmoid", "hinge", "ipo"):
            draft.set("preference.loss", kind, [f"{ACTOR}dpo_loss_type"])
        else:
            draft.lack([f"{ACTOR}dpo_loss_type"], "preferences", shown(kind))
        return
    kind = _kind(draft)
    both, low, high, switch = (
        f"{RL}{name}" for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_higher_enable")
    )
    is_split = kind == "dapo" and bool(draft.get(switch))
    used = (low, high) if is_split else (both, both)
    for ours, key in zip(("clip_ratio_low", "clip_ratio_high"), used, strict=True):
        draft.set(f"algorithm.{ours}", draft.number(key, default=0.2), [key, switch] if is_split else [key])
    for key in (both, low, high, switch):
        draft.note(key, "same", f"not read by {kind} as it is set")
    _reduction(draft, kind)
    _kl(draft, kind)
    is_on = has_critic(draft)
    set_critic(draft, CRITIC, is_on, lr=5e-6, lam=0.95, clip=0.5, frozen=0)
    _critic(draft, is_on)
    draft.set("algorithm.importance_cap", None)


def _reduction(draft: Draft, kind: str) -> None:
    """Means are taken over the tokens of a micro-batch, and then over the micro-batches."""
    sequences = draft.count(f"{ACTOR}micro_batch_size", default=1)
    by_sequence = kind == "dapo" and draft.get(f"{RL}token_level_loss") is False
    if by_sequence or (sequences == 1 and not draft.get(f"{RL}use_dynamic_bsz")):
        draft.set("algorithm.loss_reduction", "sequence_mean", [f"{RL}token_level_loss"])
        if not by_sequence:
            draft.notes.append("algorithm.loss_reduction: a micro-batch is one sequence there, whose mean is taken")
    else:
        draft.set("algorithm.loss_reduction", "token_mean", [f"{RL}token_level_loss"])
        draft.notes.append("algorithm.loss_reduction: theirs is a mean over the tokens of each micro-batch")


def _kl(draft: Draft, kind: str) -> None:
    """DAPO has none; that of GRPO is in the loss, and that of PPO in the reward if it is asked for."""
    coefficient, estimator, in_reward, control = (
        f"{RL}{name}" for name in ("init_kl_coef", "kl_penalty", "use_kl_in_reward", "kl_ctrl_type")
    )
    is_there = kind == "grpo" or (kind == "ppo" and bool(draft.get(in_reward)))
    weight = (draft.number(coefficient) or 0.0) if is_there else 0.0
    draft.set("algorithm.kl_coefficient", weight, [coefficient] if is_there else [])
    if not weight:
        for key in keys_of("kl"):
            draft.note(key, "same", "not read, as there is no KL")
        return
    found = ESTIMATORS.get(str(draft.word(estimator)))
    if found is None:
        draft.lack([estimator], "other_word", shown(draft.get(estimator)))
    elif found == "k1" and kind == "grpo":
        draft.notes.append("algorithm.kl_estimator: k1 in the loss has no gradient in the mean; k2 is set instead")
        found = "k2"
    draft.set("algorithm.kl_in", "loss" if kind == "grpo" else "reward", [in_reward] if kind == "ppo" else [])
    draft.set("algorithm.kl_estimator", found or "k3", [estimator] if found else [])
    if draft.get(control) != "fixed":
        draft.lack([control], "other_word", "'adaptive'; the weight is fixed")
    for key in keys_of("kl"):
        draft.note(key, "same", "read with another kind of KL only")


def _critic(draft: Draft, is_on: bool) -> None:
    """A critic of other sizes has keys here; all else is the policy's."""
    for key, value in draft.given.values.items():
        if not key.startswith("critic_config.") or key in CRITIC.names():
            continue
        name = key.partition(".")[2]
        ours = {"tensor_model_parallel_size": "tensor", "pipeline_model_parallel_size": "pipeline"}.get(name)
        ours = "context" if name == "context_parallel_size" else ours
        if is_on and name == "load":
            draft.lack([key], "critic_weights")
        elif not is_on or value == draft.get(ACTOR + name):
            draft.note(key, "same", "as the policy's" if is_on else "not read, as there is no critic")
        elif ours:
            draft.set(f"critic.{ours}", value, [key])
        elif name in ("model", "save", "micro_batch_size", "finetune", "no_load_optim", "no_load_rng"):
            draft.note(key, "same", "the critic is made and saved with the policy")
        else:
            draft.lack([key], "critic")


def rewards(draft: Draft) -> None:
    if draft.stage != "rl":
        return
    key, weights_key = f"{RL}verifier_function", f"{RL}verifier_weight"
    names, shares = as_list(draft.get(key)), as_list(draft.get(weights_key))
    for place, name in enumerate(names if draft.get(f"{RL}rule_reward") else []):
        reward, differs = VERIFIERS.get(str(name), ("", ""))
        share = shares[place] if place < len(shares) and isinstance(shares[place], int | float) else 1.0
        entry: dict[str, Any] = {"name": reward} | ({"weight": float(share)} if share != 1 else {})
        if name == "format":
            entry["name"], entry["options"] = "format_regex", {"pattern": FORMAT}
        elif not reward:
            draft.lack([key], "verifier", f"{shown(name)} has none")
            continue
        draft.rewards.append(entry)
        if differs:
            draft.lack([key], "verifier", differs)
        else:
            draft.note(key, "mapped", f"rewards: {entry['name']}")
    draft.note(weights_key, "mapped", "rewards: weight")
    metric = f"{RL}filter_groups_metric"
    if draft.get(f"{RL}filter_groups_enable") and draft.word(metric) in names and draft.word(metric) in VERIFIERS:
        draft.set("algorithm.dynamic_sampling.metric", VERIFIERS[str(draft.word(metric))][0], [metric])
    switch, buffer, factor, longest = (
        f"{RL}{name}"
        for name in (
            "overlong_buffer_enable", "overlong_buffer", "overlong_buffer_penalty_factor", "rollout_max_tokens",
        )
    )  # fmt: skip
    if draft.get(switch) and draft.count(buffer):
        options = {"max_length": draft.count(longest), "buffer": draft.count(buffer)}
        options["factor"] = float(draft.number(factor, default=1.0) or 1.0)  # type: ignore[assignment]
        draft.rewards.append({"name": "overlong", "options": options})
        for name in (switch, buffer, factor, longest):
            draft.note(name, "mapped", "rewards: overlong")
    for name in (switch, buffer, factor, longest, f"{RL}rule_reward"):
        draft.note(name, "same", "nothing to set")


def rest(draft: Draft) -> None:
    """Files, trackers, and what is recorded of a run."""
    path = draft.word(f"{ACTOR}data_path")
    if path:
        draft.set("data.train_files", [f"{str(path).rstrip('/')}/train.parquet"], [f"{ACTOR}data_path"])
        draft.notes.append("data.train_files: theirs are made of rows by a program; name the files that have the rows")
    draft.set("logging.tensorboard", bool(draft.get(f"{RL}use_tensorboard")), [f"{RL}use_tensorboard"])
    for tracker in ("wandb", "swanlab"):
        switch, project = f"{RL}use_{tracker}", f"{RL}{tracker}_project"
        if draft.get(switch):
            name = str(draft.word(project, default="") or "mindspeed_rl")
            draft.set(f"logging.{tracker}_project", name, [switch, project])
        for key in (switch, project):
            draft.note(key, "same", "off, as here")
    if draft.stage == "rl":
        draft.set("rollout.temperature", draft.number(f"{SAMPLING}temperature", default=1.0))
    prefix = "profiler_config.integrated.profile"
    first, last = (draft.count(f"{prefix}_step_{end}", default=1) or 1 for end in ("start", "end"))
    if draft.get(prefix) and last - first > MANY_STEPS:
        draft.lack(keys_of("profile")[:3], "profiler", f"{last - first} steps")
    elif draft.get(prefix):
        draft.set("trainer.profile.steps", list(range(first, max(last, first + 1))), keys_of("profile")[:3])
        ranks = [rank for rank in as_list(draft.get(f"{prefix}_ranks")) if isinstance(rank, int)]
        draft.set("trainer.profile.ranks", ranks or [0], [f"{prefix}_ranks"])
    for key in keys_of("profile"):
        draft.note(key, "same", "off, as here")


RULES: dict[str, Rule] = {
    "stage": stage,
    "layout": layout,
    "optimizer": optimizer,
    "batches": batches,
    "objective": objective,
    "rewards": rewards,
    "rest": rest,
}
