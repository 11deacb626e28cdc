"""What follows from several flags of OpenRLHF together."""

from __future__ import annotations

from typing import cast

from mega_rl.errors import shown
from mega_rl.importers.draft.data_sets import HELD_OUT, TRAIN, add_rewards, limit_rows
from mega_rl.importers.draft.draft import Draft, Rule, Stage
from mega_rl.importers.draft.units import (
    as_list,
    exact,
    note_sharding,
    set_tokens,
    set_vision,
    set_warmup,
)
from mega_rl.importers.rules.learned import (
    AdapterKeys,
    CriticKeys,
    add_reward_model,
    sequences_per_row,
    set_adapter,
    set_critic,
    set_smoothing,
    set_stage,
)

IS = "algo.advantage.is_correction_"
KTO_RATE = 5e-7  # learning rate of the program for KTO, which newer versions do not have
ADAPTER = AdapterKeys(
    switches=(),
    rank=("ds.lora.rank",),
    alpha=("ds.lora.alpha",),
    targets=("ds.lora.target_modules",),
    dropout=("ds.lora.dropout",),
)
CRITIC = CriticKeys(
    path=("critic.model_name_or_path",),
    lr=("critic.adam.lr",),
    gamma=("algo.advantage.gamma",),
    lam=("algo.advantage.lambd",),
    clip=("critic.value_clip",),
    warmup=("critic.freezing_steps",),
)


def program(draft: Draft) -> str:
    """The name of the program says it, else the keys that only one has; newer versions have none for KTO."""
    found = _named(draft)
    return "dpo" if found == "kto" else found


def _named(draft: Draft) -> str:
    words = " ".join([*draft.given.program, str(draft.get("module", default=""))])
    if draft.has("actor.model_name_or_path", "rollout.batch_size", "data.prompt_dataset") or "train_ppo" in words:
        return "rl"
    named = next((name for name in ("dpo", "kto", "rm", "sft") if f"train_{name}" in words), None)
    return named or ("dpo" if draft.has("model.beta", "model.ipo_enable", "model.nll_loss_coef") else "sft")


def stage(draft: Draft) -> None:
    set_stage(draft, cast(Stage, _named(draft)))
    if draft.stage == "kto" and not draft.has("adam.lr"):
        draft.set("optimizer.lr", KTO_RATE)
    set_adapter(draft, ADAPTER, bool(draft.count("ds.lora.rank")), rank=8, alpha=16)
    nodes, per_node = draft.count("actor.num_nodes", default=1) or 1, draft.count("actor.num_gpus_per_node")
    if per_node and draft.has("actor.num_gpus_per_node"):
        draft.num_devices = nodes * per_node
        for key in ("actor.num_nodes", "actor.num_gpus_per_node"):
            draft.note(key, "mapped", f"torchrun --nnodes {nodes} --nproc-per-node {per_node}")


def algorithm(draft: Draft) -> None:
    if draft.stage != "rl":
        return
    weight = draft.number("algo.kl.init_coef") or 0.0
    draft.set("algorithm.kl_coefficient", weight, ["algo.kl.init_coef"])
    where = "loss" if draft.get("algo.kl.use_loss") else "reward"
    estimator = draft.word("algo.kl.estimator")
    if weight:
        draft.set("algorithm.kl_in", where, ["algo.kl.use_loss"])
        if where == "loss" and estimator == "k1":
            draft.notes.append("algorithm.kl_estimator: k1 in the loss has no gradient in the mean; k2 is set instead")
            estimator = "k2"
        draft.set("algorithm.kl_estimator", estimator, ["algo.kl.estimator"])
    for key in ("algo.kl.use_loss", "algo.kl.estimator"):
        draft.note(key, "same", "not read, as the weight of the KL is 0") if not weight else None
    _critic(draft)
    if draft.get("algo.advantage.no_std_norm"):
        if draft.result.get("algorithm.advantage") == "grpo":
            draft.set("algorithm.advantage", "dr_grpo", ["algo.advantage.no_std_norm"])
        else:
            draft.lack(["algo.advantage.no_std_norm"], "other_advantage")
    bounds = draft.get("actor.eps_clip_low_high")
    both = draft.number("actor.eps_clip", default=0.2)
    pair = bounds if isinstance(bounds, list) and len(bounds) == 2 else [bounds, bounds] if bounds else [both, both]
    keys = ["actor.eps_clip_low_high"] if bounds else ["actor.eps_clip"]
    draft.set("algorithm.clip_ratio_low", pair[0], keys)
    draft.set("algorithm.clip_ratio_high", pair[1], keys)
    entropy = draft.number("actor.entropy_coef")
    if entropy is not None:
        draft.set("algorithm.entropy_coefficient", entropy, ["actor.entropy_coef"])
    is_gspo = draft.result.get("algorithm.objective") == "gspo"
    draft.set("algorithm.loss_reduction", "sequence_mean" if is_gspo else "token_mean")
    _correction(draft)


def _critic(draft: Draft) -> None:
    """Without a path, theirs begins as the reward model, or as the policy if there is none."""
    is_on = draft.word("algo.advantage.estimator", default="gae") == "gae"
    if is_on and not draft.has("algo.advantage.estimator"):
        draft.notes.append("algorithm.advantage: theirs is gae by default, with a critic, so it is set here")
    frozen = int(draft.number("critic.freezing_steps", default=-1) or 0)
    set_critic(draft, CRITIC, is_on, lr=9e-6, lam=1.0, clip=0.5, frozen=frozen)
    if is_on and "critic.path" not in draft.result and draft.word("reward.model_name_or_path"):
        draft.set("critic.path", str(draft.word("reward.model_name_or_path")))
    for key in draft.given.values:
        entry = draft.table.find(key)
        if entry is None or entry.reason != "critic" or key in CRITIC.names():
            continue
        if is_on:
            draft.lack([key], "critic")
        else:
            draft.note(key, "same", "not read, as there is no critic")


def preferences(draft: Draft) -> None:
    """IPO takes sums of log-probabilities there, means per token here."""
    if draft.stage == "dpo":
        is_ipo = bool(draft.get("model.ipo_enable"))
        draft.set("preference.loss", "ipo" if is_ipo else "sigmoid", ["model.ipo_enable"])
        draft.set("preference.beta", draft.number("model.beta", default=0.1), ["model.beta"])
        draft.set(
            "preference.sft_coefficient", draft.number("model.nll_loss_coef", default=0.0), ["model.nll_loss_coef"]
        )
        set_smoothing(draft, "model.label_smoothing")
        if is_ipo:
            draft.notes.append("preference.beta: their IPO takes sums of log-probabilities, ours means per token")
    elif draft.stage == "kto":
        draft.set("kto.beta", draft.number("model.beta", default=0.01), ["model.beta"])
    elif draft.stage == "rm":
        if draft.word("model.loss_type", default="sigmoid") != "sigmoid":
            draft.lack(["model.loss_type"], "other_loss", shown(draft.get("model.loss_type")))
        if not draft.get("model.margin_loss_enable"):
            draft.notes.append("data.train_files: a column margin is always read; remove it if there is one")


def _correction(draft: Draft) -> None:
    keys = [key for key in (f"{IS}enable", f"{IS}threshold", f"{IS}type") if draft.has(key)]
    if not draft.get(f"{IS}enable"):
        draft.set("algorithm.importance_cap", None, keys)
        return
    given = draft.get(f"{IS}threshold")
    is_one = isinstance(given, int | float) and not isinstance(given, bool)
    low, high = (0.5, given) if is_one else given if isinstance(given, list) and len(given) == 2 else (0.5, 5.0)
    kind = draft.word(f"{IS}type", default="tis")
    draft.set("algorithm.importance_cap", high, [f"{IS}threshold", f"{IS}enable"])
    if kind == "tis":
        draft.set("algorithm.importance_correction", "truncate", [f"{IS}type"])
        draft.note(f"{IS}threshold", "mapped", "weights below 1 stay as they are")
    else:
        draft.set("algorithm.importance_correction", "mask", [f"{IS}type"])
        draft.set("algorithm.importance_floor", low, [f"{IS}threshold"])
        if kind == "seq-mask-tis":
            draft.set("algorithm.importance_level", "sequence", [f"{IS}type"])


def batches(draft: Draft) -> None:
    """Their train batch counts samples, and the rollout batch prompts."""
    longest = draft.count("data.max_len", default=2048) or 2048
    micro = draft.count("train.micro_batch_size", default=1) or 1
    train = draft.count("train.batch_size", default=128) or 128
    if draft.stage != "rl":
        draft.set("data.train_batch_size", train, ["train.batch_size"])
        draft.set("data.max_prompt_length", longest // 2, ["data.max_len"])
        draft.set("data.max_response_length", longest - longest // 2, ["data.max_len"])
    else:
        prompts = draft.count("rollout.batch_size", default=1024) or 1024
        samples = prompts * (draft.count("rollout.n_samples_per_prompt", default=1) or 1)
        draft.set("data.train_batch_size", prompts, ["rollout.batch_size"])
        number = exact(samples, min(train, samples), "algorithm.minibatches_per_step", draft)
        draft.set("algorithm.minibatches_per_step", number, ["train.batch_size"])
        _lengths(draft, longest)
    tokens = draft.count("train.max_tokens_per_gpu", default=16192) if draft.get("train.dynamic_batch_enable") else None
    ranks = draft.count("ds.ring_attn_size", default=1) or 1
    keys = ["train.max_tokens_per_gpu", "train.dynamic_batch_enable", "train.micro_batch_size"]
    longest *= sequences_per_row(draft)
    set_tokens(draft, tokens * ranks if tokens else micro * longest, keys, longest)
    passes = draft.number("train.max_epochs", default=1)
    if draft.stage != "rl":
        draft.set("trainer.total_epochs", int(passes or 1), ["train.max_epochs"])
        return
    draft.set("trainer.total_epochs", draft.count("train.num_episodes", default=1), ["train.num_episodes"])
    if passes == 1:
        draft.note("train.max_epochs", "same", "1, as here")
    else:
        draft.lack(["train.max_epochs"], "several_passes", shown(passes))


def _lengths(draft: Draft, longest: int) -> None:
    """Their longest sequence is prompt and response together."""
    response, prompt = draft.count("rollout.max_new_tokens"), draft.count("data.prompt_max_len")
    if response is None:
        response = longest - prompt if prompt else longest // 2
        draft.notes.append(f"data.max_response_length: {response} of the {longest} tokens of data.max_len: check it")
    draft.set("data.max_response_length", response, ["data.max_len"])
    draft.set("data.max_prompt_length", prompt or max(1, longest - response), ["data.max_len"])


def prompts(draft: Draft) -> None:
    """Without the flag no chat template is applied; supervised training has a pattern of its own then."""
    key, pattern = "data.apply_chat_template", "data.input_template"
    is_applied = bool(draft.get(key))
    draft.set("data.chat_template", "auto" if is_applied else "never", [key])
    given = draft.word(pattern)
    if is_applied:
        draft.note(pattern, "same", "not read, as the chat template is applied")
    elif given and draft.has(pattern):
        draft.lack([pattern], "data_options")
    elif given:
        draft.notes.append(f"data.train_files: theirs writes a prompt as {shown(given)} by default; prepare it so")


def files(draft: Draft) -> None:
    for key, ours, name in (
        ("data.prompt_dataset", "train_files", "train"),
        ("data.dataset", "train_files", "train"),
        ("eval.dataset", "val_files", "test"),
    ):
        listed = [str(part) for part in as_list(draft.get(key))]
        if listed:
            are_files = all(part.endswith((".jsonl", ".json", ".parquet")) for part in listed)
            made = listed if are_files else [f"data/{part.rpartition('/')[2]}/{name}.parquet" for part in listed]
            draft.set(f"data.{ours}", made, [key])
            if not are_files:
                draft.notes.append(f"data.{ours}: nothing is downloaded; put the data there, or name your files")
    limit_rows(draft, "data.max_samples", (TRAIN, HELD_OUT) if draft.stage == "rl" else (TRAIN,), is_each=False)
    if draft.stage != "rl":
        return
    url = str(draft.get("reward.remote_url", default=""))
    if url.endswith(".py"):
        draft.rewards.append({"name": f"{url}:reward_func"})
        draft.note("reward.remote_url", "mapped", f"rewards: {url}:reward_func")
        draft.notes.append("rewards: reward_func(queries, prompts, labels) takes other arguments; see docs/rewards.md")
    elif url:
        draft.lack(["reward.remote_url"], "reward_model", "a server")
    elif draft.word("reward.model_name_or_path"):
        add_reward_model(draft, "reward.model_name_or_path")
        bounds = draft.get("reward.clip_range")
        if bounds and not draft.has("reward.clip_range"):
            draft.notes.append(f"rewards: theirs are bounded to {shown(bounds)} by default; those of the model are not")
    else:
        add_rewards(draft, [draft.get("data.prompt_dataset")], [draft.get("eval.dataset")])
    buffer = draft.count("reward.overlong_buffer_len")
    if buffer:
        factor = float(draft.number("reward.overlong_penalty_factor", default=1.0) or 1.0)
        longest = draft.result.get("data.max_response_length")
        draft.rewards.append(
            {"name": "overlong", "options": {"max_length": longest, "buffer": buffer, "factor": factor}}
        )
        for key in ("reward.overlong_buffer_len", "reward.overlong_penalty_factor"):
            draft.note(key, "mapped", "rewards: overlong")


def rest(draft: Draft) -> None:
    ratio_keys, floor_keys = ("actor.lr_warmup_ratio", "lr_warmup_ratio"), ("actor.min_lr_ratio", "min_lr_ratio")
    set_warmup(draft, ratio_keys, steps=None, ratio=draft.number(*ratio_keys))
    lr = float(draft.result.get("optimizer.lr") or 1e-6)
    draft.set("optimizer.min_lr", (draft.number(*floor_keys) or 0.0) * lr, floor_keys)
    betas = draft.get("actor.adam.betas", "adam.betas")
    if isinstance(betas, list) and len(betas) == 2:
        draft.set("optimizer.beta1", betas[0], ["actor.adam.betas", "adam.betas"])
        draft.set("optimizer.beta2", betas[1], ["actor.adam.betas", "adam.betas"])
    for theirs, ours in (("ds.tensor_parallel_size", "tensor"), ("ds.ring_attn_size", "context")):
        if draft.has(theirs):
            draft.set(f"parallel.{ours}", draft.count(theirs, default=1), [theirs])
    if draft.result.get("parallel.tensor", 1) > 1:
        draft.set("parallel.sequence", True, ["ds.tensor_parallel_size"])
    if images := draft.count("data.max_images_per_prompt"):
        draft.set("data.max_images", images, ["data.max_images_per_prompt"])
    draft.note("data.max_images_per_prompt", "same", "of text alone")
    if draft.stage == "rl":
        _engines(draft)
        _staleness(draft)
        _filtering(draft)
    draft.set("validation.val_before_train", False)
    note_sharding(draft, ("ds.zero_stage",))
    set_vision(draft, "actor.freeze_visual_encoder")
    if (draft.number("ckpt.save_steps", default=-1) or 0) <= 0:
        draft.set("checkpoint.save_freq", None, ["ckpt.save_steps"])
    saves = bool(draft.get("actor.gradient_checkpointing_enable", "model.gradient_checkpointing_enable"))
    keys = ("actor.gradient_checkpointing_enable", "model.gradient_checkpointing_enable")
    draft.set("memory.recompute", "full" if saves else "none", keys)
    draft.set("checkpoint.resume", "auto" if draft.get("ckpt.load_enable") else "never", ["ckpt.load_enable"])
    draft.set("logging.tensorboard", bool(draft.get("logger.tensorboard_dir")), ["logger.tensorboard_dir"])
    if draft.get("logger.wandb.key"):
        project = str(draft.get("logger.wandb.project", default="openrlhf_train_ppo"))
        draft.set("logging.wandb_project", project)
        draft.note("logger.wandb.key", "mapped", f"logging.wandb_project = {project}; the key is wandb's own business")
    dtype = {"bf16": "bfloat16", True: "bfloat16", "fp32": "float32"}.get(draft.word("ds.param_dtype", default="bf16"))
    if dtype:
        draft.set("model.dtype", dtype, ["ds.param_dtype"])
    else:
        draft.lack(["ds.param_dtype"], "other_word", shown(draft.get("ds.param_dtype")))


def _staleness(draft: Draft) -> None:
    """A batch is sampled while the one before it is learnt from, and more of them wait where the queue is longer."""
    keys = ["train.async_enable", "train.partial_rollout_enable", "train.async_queue_size"]
    if not draft.get(keys[0]):
        for key in keys:
            draft.note(key, "same", "off, as here")
        return
    draft.set("rollout.mode", "in_flight" if draft.get(keys[1]) else "pinned", keys[:2])
    draft.set("rollout.max_staleness", draft.count(keys[2], default=1), [keys[0], keys[2]])
    if draft.result.get("algorithm.importance_cap") is None:
        draft.result["algorithm.importance_cap"] = 2.0
        draft.notes.append("algorithm.importance_cap: 2, as samples of older weights need importance weights here")


def _filtering(draft: Draft) -> None:
    """A group whose mean reward lies outside of a range is left out; here one whose rewards are all equal."""
    key, switch = "algo.dynamic_filtering_range", "algo.dynamic_filtering_enable"
    if not draft.get(switch):
        draft.note(key, "same", "not read, as no groups are filtered")
    elif draft.get(key, default=[0, 1]) == [0, 1]:
        draft.note(key, "mapped", "algorithm.dynamic_sampling.enabled = true")
        draft.notes.append("algorithm.dynamic_sampling: with rewards of 0 and 1 alone their range leaves out the same")
    else:
        draft.lack([key], "filtering")


def _engines(draft: Draft) -> None:
    is_shared = bool(draft.get("train.colocate_all")) and not draft.get("train.async_enable")
    draft.set("rollout.placement", "colocated" if is_shared else "separate", ["train.colocate_all"])
    if is_shared:
        draft.note("vllm.num_engines", "same", "colocated engines are as many as the ranks allow")
    else:
        draft.set("rollout.num_engines", draft.count("vllm.num_engines", default=1), ["vllm.num_engines"])
    parts = {"ds.adam_offload": ["optimizer"], "ds.enable_sleep": ["weights", "gradients", "optimizer"]}
    moved = {part for key, names in parts.items() if draft.get(key) for part in names}
    keys = [key for key in parts if draft.get(key)]
    if moved and is_shared:
        draft.set("memory.offload", [part for part in parts["ds.enable_sleep"] if part in moved], keys)
    elif draft.get("ds.adam_offload"):
        draft.set("memory.optimizer_on_host", True, ["ds.adam_offload"])


RULES: dict[str, Rule] = {
    "stage": stage,
    "algorithm": algorithm,
    "preferences": preferences,
    "batches": batches,
    "prompts": prompts,
    "files": files,
    "rest": rest,
}
