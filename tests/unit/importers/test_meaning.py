"""An imported configuration means what the neighbour's means: compared by what is computed, not by names."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_rl.algorithms.kl import KL_ESTIMATORS
from mega_rl.algorithms.policy_loss import cispo_loss
from mega_rl.config.schema.data_file import DataFile
from mega_rl.config.schema.sampling import RewardConfig
from mega_rl.config.schema.sources import rewards_of
from mega_rl.data.rows.rows import DataFiles, write_parquet
from mega_rl.errors import InputError
from mega_rl.importers.convert import convert
from mega_rl.importers.draft.draft import Draft
from mega_rl.importers.draft.reading import Given
from mega_rl.rewards.functions.registry import bind
from tests.unit.importers.meaning import INTERPRETERS, differing, ours

DEVICES = 8
ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
# Neighbour -> keys that always stand in a file, and values that others are drawn from, with those that are left out.
FIXED: dict[str, dict[str, Any]] = {
    "verl": {"algorithm.adv_estimator": "grpo"},
    "areal": {"actor.backend": "fsdp:d4t2", "train_dataset.max_length": 1024, "actor.kl_estimator": "k1"},
    "openrlhf": {"algo.advantage.estimator": "group_norm", "rollout.batch_size": 128},
    "trl": {"num_generations": 8},
    "llamafactory": {"stage": "sft", "finetuning_type": "full", "model_name_or_path": "m"},
    "mindspeed_rl": {"megatron_training.global_batch_size": 64, "actor_config.lr": 1e-6,
                     "actor_config.micro_batch_size": 2},
    "swift": {"rlhf_type": "grpo", "max_length": 1024, "global_batch_size": 64, "tuner_type": "full"},
    "slime": {"rollout_batch_size": 32, "n_samples_per_prompt": 8, "rollout_max_response_len": 1024},
}  # fmt: skip
DRAWN: dict[str, dict[str, list[Any]]] = {
    "verl": {
        "actor_rollout_ref.model.path": ["Qwen/Qwen3-8B", "Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen3.5-2B"],
        "data.train_batch_size": [128, 512], f"{ACTOR}ppo_mini_batch_size": [32, 64, 1024],
        "data.max_prompt_length": [512, 2048], "data.max_response_length": [1024, 8192], f"{ROLLOUT}n": [5, 16],
        f"{ROLLOUT}temperature": [0.7], f"{ROLLOUT}val_kwargs.do_sample": [True, False],
        f"{ROLLOUT}val_kwargs.temperature": [0, 0.6, 1.0], f"{ROLLOUT}val_kwargs.n": [1, 8],
        f"{ACTOR}clip_ratio": [0.1], f"{ACTOR}clip_ratio_low": [None, 0.3], f"{ACTOR}clip_ratio_high": [None, 0.28],
        f"{ACTOR}clip_ratio_c": [10.0], f"{ACTOR}loss_agg_mode": ["token-mean", "seq-mean-token-mean"],
        f"{ACTOR}use_kl_loss": [True, False], f"{ACTOR}kl_loss_coef": [0.01],
        f"{ACTOR}kl_loss_type": ["low_var_kl", "k3+", "low_var_kl+", "k1+", "mse", "kl"],
        f"{ACTOR}optim.lr": [5e-7], f"{ACTOR}optim.lr_warmup_steps": [-1, 10],
        f"{ACTOR}optim.lr_warmup_steps_ratio": [0.0, 0.03], f"{ACTOR}optim.lr_scheduler_type": ["constant", "cosine"],
        f"{ACTOR}optim.min_lr_ratio": [0.1], f"{ACTOR}optim.min_lr": [1e-8], f"{ACTOR}optim.weight_decay": [0.1],
        f"{ACTOR}megatron.tensor_model_parallel_size": [4], f"{ACTOR}megatron.expert_model_parallel_size": [8],
        f"{ACTOR}freeze_vision_tower": [True, False], "trainer.save_freq": [-1, 20],
    },
    "areal": {
        "actor.path": ["Qwen/Qwen3-8B", "Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen3.5-2B"], "ref.path": ["m"],
        "train_dataset.batch_size": [64, 256], "gconfig.n_samples": [4, 16], "gconfig.max_new_tokens": [1024],
        "gconfig.temperature": [0.9], "eval_gconfig.n_samples": [2], "eval_gconfig.temperature": [0.6],
        "eval_gconfig.greedy": [True, False], "actor.ppo_n_minibatches": [1, 2], "actor.eps_clip": [0.4],
        "actor.eps_clip_higher": [0.28, None], "actor.c_clip": [3.0], "actor.kl_ctl": [0.0, 0.01],
        "actor.kl_estimator": ["k2", "k3"], "actor.optimizer.lr": [1e-6], "actor.optimizer.min_lr_ratio": [0.1],
        "actor.optimizer.beta2": [0.95], "actor.optimizer.weight_decay": [0.1], "saver.freq_steps": [20],
        "actor.optimizer.warmup_steps_proportion": [0.1, 0.0], "actor.optimizer.warmup_steps": [10],
        "actor.optimizer.lr_scheduler_type": ["cosine", "linear"],
    },
    "openrlhf": {
        "actor.model_name_or_path": ["Qwen/Qwen3-8B", "Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen3.5-2B"],
        "train.batch_size": [64, 2048], "rollout.n_samples_per_prompt": [8, 16], "data.max_len": [4096],
        "rollout.temperature": [0.8], "eval.temperature": [0.2], "eval.n_samples_per_prompt": [8],
        "actor.eps_clip": [0.1], "actor.eps_clip_low_high": [[0.2, 0.27]], "actor.dual_clip": [10.0],
        "algo.kl.init_coef": [0, 1e-3], "algo.kl.use_loss": [True], "algo.kl.estimator": ["k2", "k3"],
        "actor.adam.lr": [5e-7], "actor.min_lr_ratio": [0.2], "actor.lr_warmup_ratio": [0.1],
        "actor.lr_scheduler": ["constant", "linear"], "actor.adam.weight_decay": [0.1], "ds.ring_attn_size": [2],
        "ds.tensor_parallel_size": [2], "ckpt.save_steps": [-1, 20], "actor.freeze_visual_encoder": [True],
    },
    "trl": {
        "per_device_train_batch_size": [4, 16], "gradient_accumulation_steps": [2, 4],
        "steps_per_generation": [1, 4, 8], "num_generations": [4, 16], "max_completion_length": [2048],
        "temperature": [0.7], "beta": [0.04], "num_generations_eval": [2],
        "loss_type": ["grpo", "dr_grpo", "dapo", "cispo"], "epsilon": [0.3], "epsilon_high": [5.0], "delta": [4.0],
        "learning_rate": [2e-6], "warmup_ratio": [0.1], "warmup_steps": [10], "adam_beta2": [0.95],
        "lr_scheduler_type": ["constant", "cosine"], "weight_decay": [0.1], "save_strategy": ["no"], "save_steps": [64],
    },
    "llamafactory": {
        "per_device_train_batch_size": [1, 4], "gradient_accumulation_steps": [8], "cutoff_len": [4096],
        "learning_rate": [1e-5], "warmup_ratio": [0.1], "warmup_steps": [20], "adam_beta2": [0.95],
        "lr_scheduler_type": ["cosine", "constant"], "tensor_model_parallel_size": [2], "save_strategy": ["no"],
        "pipeline_model_parallel_size": [4], "expert_model_parallel_size": [2], "save_steps": [64],
        "freeze_vision_tower": [True, False],
    },
    "mindspeed_rl": {
        "megatron_training.stage": ["ray_grpo", "ray_dapo"], "actor_config.global_batch_size": [32, 256],
        "rl_config.mini_batch_size": [16, 512], "rl_config.n_samples_per_prompt": [8, 16],
        "rl_config.max_prompt_length": [2048], "generate_config.sampling_config.max_tokens": [2048, 8192],
        "generate_config.sampling_config.temperature": [0.8], "generate_config.sampling_config.top_p": [1.0],
        "actor_config.lr_decay_style": ["constant", "cosine"], "actor_config.min_lr": [1e-8],
        "actor_config.lr_warmup_fraction": [0.0, 0.05], "megatron_training.weight_decay": [0.1, 0.2],
        "actor_config.weight_decay": [0.3], "actor_config.adam_beta2": [0.95], "actor_config.save_interval": [100],
        "actor_config.tensor_model_parallel_size": [2, 4], "actor_config.pipeline_model_parallel_size": [4],
        "actor_config.expert_model_parallel_size": [2], "actor_config.moe_tp_extend_ep": [True],
        "actor_config.context_parallel_size": [2], "actor_config.micro_batch_size": [1, 4],
        "rl_config.use_dynamic_bsz": [True], "rl_config.token_level_loss": [False], "rl_config.clip_ratio": [0.1],
        "rl_config.clip_higher_enable": [True], "rl_config.clip_ratio_low": [0.2], "rl_config.clip_ratio_high": [0.28],
        "rl_config.init_kl_coef": [0, 0.001], "rl_config.kl_penalty": ["kl", "low_var_kl"],
        "rl_config.filter_groups_enable": [True], "rl_config.filter_groups_train_batch_size": [32],
    },
    "swift": {
        "global_batch_size": [128], "steps_per_generation": [1, 4], "num_generations": [4, 16], "max_length": [4096],
        "max_completion_length": [2048], "temperature": [0.7], "beta": [0.0, 0.001], "epsilon": [0.1],
        "num_generations_eval": [2],
        "epsilon_high": [0.28], "delta": [4.0], "loss_type": ["grpo", "bnpo", "dr_grpo", "dapo"],
        "importance_sampling_level": ["token", "sequence"], "lr": [1e-6], "min_lr": [1e-7],
        "lr_decay_style": ["constant", "linear"], "lr_warmup_fraction": [0.05], "lr_warmup_iters": [10],
        "adam_beta2": [0.99], "adam_eps": [1e-7], "weight_decay": [0.01], "tensor_model_parallel_size": [2],
        "pipeline_model_parallel_size": [2], "context_parallel_size": [2], "expert_model_parallel_size": [4],
        "freeze_vit": [True, False], "save_steps": [64], "tuner_type": ["lora"],
    },
    "slime": {
        "rollout_batch_size": [64], "global_batch_size": [128, 256], "num_steps_per_rollout": [2],
        "rollout_max_response_len": [8192], "rollout_max_context_len": [16384], "rollout_max_prompt_len": [512],
        "rollout_temperature": [0.8], "eval_temperature": [0.0, 0.6], "eval_top_k": [1, -1],
        "n_samples_per_eval_prompt": [16], "advantage_estimator": ["grpo", "gspo", "cispo"], "eps_clip": [0.1, 1.0],
        "eps_clip_high": [0.28, 4.0], "eps_clip_c": [3.0], "use_kl_loss": [True], "kl_loss_coef": [0.0, 0.001],
        "kl_loss_type": ["k1", "k2", "k3", "low_var_kl"], "kl_coef": [0.01], "calculate_per_token_loss": [True],
        "lr": [5e-6], "min_lr": [1e-7], "lr_decay_style": ["constant", "cosine"], "lr_warmup_fraction": [0.1],
        "lr_warmup_iters": [10], "adam_beta2": [0.98], "adam_eps": [1e-6], "weight_decay": [0.1],
        "tensor_model_parallel_size": [2], "pipeline_model_parallel_size": [2], "context_parallel_size": [2],
        "expert_model_parallel_size": [8], "expert_tensor_parallel_size": [1], "save_interval": [20],
        "rollout_shuffle": [True], "use_tis": [True], "colocate": [True],
    },
}  # fmt: skip


def imported(neighbour: str, given: dict[str, Any]) -> Draft:
    return convert(neighbour, Given(dict(given)), DEVICES)


@pytest.mark.parametrize("neighbour", INTERPRETERS)
def test_files_mean_the_same(neighbour: str) -> None:
    draw = random.Random(neighbour)
    for _ in range(200):
        chosen = draw.sample(list(DRAWN[neighbour]), draw.randint(0, len(DRAWN[neighbour])))
        given = FIXED[neighbour] | {key: draw.choice(DRAWN[neighbour][key]) for key in chosen}
        if neighbour == "trl" and given.get("loss_type") == "cispo":
            given["epsilon_high"] = 5.0
        wanted = INTERPRETERS[neighbour](given, DEVICES)
        assert differing(ours(imported(neighbour, given).result), wanted) == {}, given


SWIFT = {
    "per_device_train_batch_size": [2, 4], "gradient_accumulation_steps": [2, 4], "steps_per_generation": [1, 4, 8],
    "sequence_parallel_size": [2], "generation_batch_size": [32], "save_strategy": ["no"],
    "learning_rate": [1e-6], "warmup_ratio": [0.05], "warmup_steps": [10],
    "lr_scheduler_type": ["constant", "linear"], "tuner_type": ["full"], "beta": [0.0, 0.01], "adam_epsilon": [1e-7],
}  # fmt: skip


def test_swift_without_megatron_means_the_same() -> None:
    draw = random.Random("swift")
    for _ in range(200):
        chosen = draw.sample(list(SWIFT), draw.randint(0, len(SWIFT)))
        given = {"rlhf_type": "grpo", "max_length": 512, "num_generations": 4, "per_device_train_batch_size": 8}
        given |= {key: draw.choice(SWIFT[key]) for key in chosen}
        if "warmup_ratio" in given:
            given.pop("warmup_steps", None)  # they refuse both
        assert differing(ours(imported("swift", given).result), INTERPRETERS["swift"](given, DEVICES)) == {}, given


@pytest.mark.parametrize("kind", ["low_var_kl", "low_var_kl+", "k3", "k3+", "k1+", "kl+", "mse", "mse+", "k2"])
def test_gradient_of_the_kl_in_the_loss_is_that_of_verl(kind: str) -> None:
    """With a plus theirs takes the gradient of k2, whatever the value."""
    draft = imported(
        "verl",
        {
            "algorithm.adv_estimator": "grpo",
            f"{ACTOR}use_kl_loss": True,
            f"{ACTOR}kl_loss_type": kind,
            f"{ACTOR}kl_loss_coef": 1,
        },
    )
    log_ratios = torch.tensor([-1.0, 0.25, 1.0, 3.0], dtype=torch.float64)
    ours_T, theirs_T = (log_ratios.clone().requires_grad_() for _ in range(2))
    KL_ESTIMATORS[draft.result["algorithm.kl_estimator"]](ours_T, torch.zeros_like(ours_T)).sum().backward()
    base = kind.rstrip("+")
    square = 0.5 * theirs_T.square()
    value = square if base in ("mse", "k2") else torch.exp(-theirs_T) + theirs_T - 1
    (square if kind.endswith("+") else value).sum().backward()
    torch.testing.assert_close(ours_T.grad, theirs_T.grad)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 4.9, 5.5, 8.0])
def test_gradient_of_cispo_is_that_of_trl(ratio: float) -> None:
    """Theirs bounds the weight itself, at 5 here."""
    result = imported("trl", {"num_generations": 8, "loss_type": "cispo", "epsilon_high": 5.0}).result
    logprob, old, advantage = torch.tensor([0.0], requires_grad=True), -torch.log(torch.tensor([ratio])), torch.ones(1)
    low, high = result["algorithm.clip_ratio_low"], result["algorithm.clip_ratio_high"]
    cispo_loss(logprob, old, advantage, low, high)[0].sum().backward()
    assert logprob.grad is not None and logprob.grad.item() == pytest.approx(-min(ratio, 5.0), rel=1e-6)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus_baseline", "gae"])
def test_kl_before_the_baseline_is_refused(estimator: str) -> None:
    """theirs: A = (r - beta KL - mean) / std, ours: (r - mean) / std - beta KL to go; one number without a baseline."""
    key = "algorithm.use_kl_in_reward"
    outcome = imported("verl", {"algorithm.adv_estimator": estimator, key: True}).outcomes[key]
    assert outcome.became == ("mapped" if estimator == "gae" else "none")
    assert "before" in outcome.text or estimator == "gae"


def test_two_places_of_the_kl_are_two_advantages() -> None:
    """The refusal above has a reason: the sums over a group differ, by the formulas of both."""
    scores, kl = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([0.061, 0.128, 0.202, 0.006])
    theirs = (scores - kl - (scores - kl).mean()) / (scores - kl).std()
    mine = (scores - scores.mean()) / scores.std() - kl
    assert abs(theirs.sum().item()) < 1e-6 and mine.sum().item() == pytest.approx(-kl.sum().item(), abs=1e-6)


def rows_read(folder: Path, entries: list[str]) -> list[tuple[str, int]]:
    """File and number of every row that the imported configuration reads, of files of six rows each."""
    for entry in entries:
        path = folder / DataFile.of(entry).path
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [{"n": number} for number in range(6)]
        path.write_text(json.dumps(rows)) if path.suffix == ".json" else write_parquet(path, rows)
    return [(row.file.stem, row.get("n")) for row in DataFiles([str(folder / entry) for entry in entries]).rows()]


@pytest.mark.parametrize("limit", [4, 9, None])
@pytest.mark.parametrize("stage", ["sft", "pt", "dpo", "rm", "kto"])
def test_rows_of_each_data_set_of_llamafactory(tmp_path: Path, stage: str, limit: int | None) -> None:
    """Theirs takes ``range(min(max_samples, len))`` of every set, held-out ones too, before it merges them."""
    given = FIXED["llamafactory"] | {"stage": stage, "dataset": "a,b", "eval_dataset": "c", "max_samples": limit}
    draft = imported("llamafactory", given)
    taken = range(min(limit or 6, 6))
    assert rows_read(tmp_path, draft.result["data.train_files"]) == [(name, n) for name in "ab" for n in taken]
    assert rows_read(tmp_path, draft.result["data.val_files"]) == [("c", n) for n in taken]
    assert draft.outcomes["max_samples"].became == ("same" if limit is None else "mapped")
    assert draft.result.get("data.max_val_samples") is None
    alone = imported("llamafactory", FIXED["llamafactory"] | {"eval_dataset": "c", "max_samples": 2})
    assert alone.result["data.val_files"] == ["data/c.json[:2]"]


@pytest.mark.parametrize(
    ("neighbour", "key", "files"),
    [
        ("openrlhf", "data.max_samples", "data.prompt_dataset"),
        ("verl", "data.train_max_samples", "data.train_files"),
    ],
)
def test_rows_of_all_files_together(tmp_path: Path, neighbour: str, key: str, files: str) -> None:
    """Theirs counts them after merging; of one file that is the file's own bound, of several it has none here."""
    one = imported(neighbour, FIXED[neighbour] | {files: "d/a.parquet", key: 4})
    assert len(rows_read(tmp_path, one.result["data.train_files"])) == 4
    assert neighbour != "verl" or any("drawn at random" in note for note in one.notes)
    several = imported(neighbour, FIXED[neighbour] | {files: ["d/a.parquet", "d/b.parquet"], key: 4})
    outcome = several.outcomes[key]
    assert outcome.became == "none" and "FILE[:N]" in outcome.text
    assert len(rows_read(tmp_path, several.result["data.train_files"])) == 12
    none = imported(neighbour, FIXED[neighbour] | {files: "d/a.parquet", key: -1})
    assert none.outcomes[key].became == "same" and none.result["data.train_files"] == ["d/a.parquet"]
    assert not {key for key in several.result if key.endswith("max_val_samples")}


def test_rows_of_a_split_of_trl(tmp_path: Path) -> None:
    given = FIXED["trl"] | {"dataset_name": "x/sums"}
    part = imported("trl", given | {"dataset_train_split": "train[:4]"})
    assert len(rows_read(tmp_path, part.result["data.train_files"])) == 4
    assert imported("trl", given | {"dataset_train_split": "descriptiveness"}).result["data.train_files"] == [
        "data/sums/train.parquet"
    ]
    share = imported("trl", given | {"dataset_train_split": "train[:5%]"})
    assert share.outcomes["dataset_train_split"].became == "none"


@pytest.mark.parametrize(
    ("neighbour", "key"),
    [("llamafactory", "ddp_timeout"), ("trl", "ddp_timeout"), ("verl", "actor_rollout_ref.nccl_timeout")],
)
def test_years_are_no_timeout(neighbour: str, key: str) -> None:
    draft = imported(neighbour, FIXED[neighbour] | {key: 180_000_000})
    assert draft.result.get("trainer.collective_timeout_s", 1800.0) <= 7200 and draft.outcomes[key].became == "same"
    assert imported(neighbour, FIXED[neighbour] | {key: 3600}).result["trainer.collective_timeout_s"] == 3600.0


def test_batches_of_megatron_and_of_version_1_count_data_parallel_ranks() -> None:
    sizes = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 4, "expert_model_parallel_size": 2}
    batch = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
    assert imported("llamafactory", {"stage": "sft"} | sizes | batch).result["data.train_batch_size"] == 16
    assert imported("llamafactory", {"model": "m", "micro_batch_size": 1, "cp_size": 2}).result[
        "data.train_batch_size"
    ] == 4  # fmt: skip


@pytest.mark.parametrize(("betas", "beta2"), [(None, 0.999), ([0.9, 0.95], 0.95)])
def test_version_1_without_an_optimizer_has_that_of_torch(betas: list[float] | None, beta2: float) -> None:
    given = {"model": "m"} | ({"optim_config.adamw_betas": betas} if betas else {})
    assert imported("llamafactory", given).result["optimizer.beta2"] == beta2


def test_verl_supervised_has_its_own_defaults_and_megatron_sizes() -> None:
    sft = {"model.path": "m", "engine.expert_model_parallel_size": 8, "engine.expert_tensor_parallel_size": 1}
    sft |= {"engine.override_transformer_config.recompute_granularity": "full"}
    result = imported("verl", sft).result
    assert not [key for key in result if key.startswith(("algorithm.", "rollout."))]
    assert (result["data.train_batch_size"], result["trainer.total_epochs"]) == (256, 4)
    assert (result["optimizer.lr"], result["trainer.max_tokens_per_microbatch"]) == (1e-3, 8192)
    assert (result["parallel.expert"], result["parallel.expert_tensor"]) == (8, 1)
    assert result["memory.recompute"] == "full" and result.get("checkpoint.save_freq", -1) == -1


def test_experts_of_areal_have_their_own_tensor_ranks() -> None:
    given = {"actor.backend": "megatron:(attn:d4p4t2|ffn:d2p4e4)", "gconfig.n_samples": 8}
    result = imported("areal", given).result
    assert (result["parallel.tensor"], result["parallel.pipeline"], result["parallel.expert"]) == (2, 4, 4)
    assert result["parallel.expert_tensor"] == 1


@pytest.mark.parametrize(("decoupled", "cap"), [(True, 5.0), (False, None)])
def test_importance_weights_of_areal_need_the_decoupled_loss(decoupled: bool, cap: float | None) -> None:
    given = {"gconfig.n_samples": 8, "actor.rejection_sampling.metric": "ratio", "actor.use_decoupled_loss": decoupled}
    assert imported("areal", given).result["algorithm.importance_cap"] == cap
    del given["actor.use_decoupled_loss"], given["actor.rejection_sampling.metric"]
    assert imported("areal", given).result["algorithm.importance_cap"] is None


@pytest.mark.parametrize("given", [{}, {"rollout.max_head_offpolicyness": 0}, {"rollout.max_head_offpolicyness": 4}])
def test_staleness_of_areal(given: dict[str, int]) -> None:
    result, versions = imported("areal", given).result, given.get("rollout.max_head_offpolicyness", 0)
    assert result.get("rollout.max_staleness", 0) == versions
    assert result.get("rollout.mode", "synchronous") == ("in_flight" if versions else "synchronous")


BOX, THINK = r"it is \\boxed{%s}", r"<think>so</think> it is \\boxed{%s}"
# data_source -> responses to a row whose truth is 7, with what verl's function for that source gives them.
OF_VERL: dict[str, dict[str, float]] = {
    "openai/gsm8k": {"#### 7": 1.0, "#### 8": 0.0, "7": 0.0, BOX % 7: 0.0},
    "DigitalLearningGmbH/MATH-lighteval": {BOX % 7: 1.0, BOX % 8: 0.0, "#### 7": 0.0},
    "HuggingFaceH4/MATH-500": {BOX % 7: 1.0, "Answer: 7": 0.0},
    "hiyouga/geometry3k": {THINK % 7: 1.0, BOX % 7: 0.9, THINK % 8: 0.1, BOX % 8: 0.0},
    "math_dapo": {"Answer: 7": 1.0, "Answer: 8": -1.0, BOX % 7: -1.0},
    "aime2024": {"Answer: 7": 1.0, "#### 7": -1.0},
}
# Files -> the sources of their rows.
FILES_OF_VERL = {
    ("gsm8k", "math"): ("openai/gsm8k", "DigitalLearningGmbH/MATH-lighteval"),
    ("geo3k",): ("hiyouga/geometry3k",),
    ("gsm8k", "geo3k", "MATH-500", "aime-2024"): (
        "openai/gsm8k", "hiyouga/geometry3k", "HuggingFaceH4/MATH-500", "aime2024",
    ),
    ("dapo-math-17k", "aime-2024"): ("math_dapo", "aime2024"),
    ("gsm8k",): ("openai/gsm8k",),
    ("math",): ("HuggingFaceH4/MATH-500",),
}  # fmt: skip


def scored(rewards: list[dict[str, Any]], source: str, response: str) -> float:
    """The reward of a row: what the entries for its source come to."""
    total, entries = 0.0, rewards_of([RewardConfig(**entry) for entry in rewards], source)
    assert entries, f"no reward scores {source}"
    for entry in entries:
        reward = bind(entry.name, entry.options)
        total += entry.weight * reward.function(**reward.arguments([(source, response, "7", {}, 1)]))
    return total


@pytest.mark.parametrize("folders", FILES_OF_VERL)
@pytest.mark.parametrize("held_out", [False, True])
def test_which_reward_scores_a_row_of_verl(folders: tuple[str, ...], held_out: bool) -> None:
    files = [f"$HOME/data/{folder}/train.parquet" for folder in folders]
    named = {"data.train_files": files[:1], "data.val_files": files} if held_out else {"data.train_files": files}
    rewards = imported("verl", {"algorithm.adv_estimator": "grpo"} | named).rewards
    for source in FILES_OF_VERL[folders]:
        found = {response: scored(rewards, source, response) for response in OF_VERL[source]}
        assert found == pytest.approx(OF_VERL[source]), source


def test_a_data_set_that_is_not_known_gets_no_reward_of_another() -> None:
    files = ["data/gsm8k/train.parquet", "data/own/train.parquet"]
    draft = imported("verl", {"algorithm.adv_estimator": "grpo", "data.train_files": files})
    assert rewards_of([RewardConfig(**entry) for entry in draft.rewards], "own") == []
    assert any("data/own/train.parquet" in note and "add an entry" in note for note in draft.notes)
    assert imported("verl", {"algorithm.adv_estimator": "grpo", "data.train_files": files[1:]}).rewards == []


def test_the_reward_of_gsm8k_of_areal_reads_a_box() -> None:
    given = FIXED["areal"] | {"train_dataset.path": "openai/gsm8k"}
    assert scored(imported("areal", given).rewards, "openai/gsm8k", BOX % 7) == 1.0


def test_what_swift_reads_from_a_file_and_learns_from() -> None:
    given = {"model": "m", "system": "prompt.txt", "loss_scale": "last_round"}
    draft = imported("swift", given)
    assert {key for key, outcome in draft.outcomes.items() if outcome.became == "none"} == {"system", "loss_scale"}
    given = {"rlhf_type": "dpo", "system": "Think.", "loss_scale": "last_round"}
    draft = imported("swift", given)
    assert draft.result["data.system_prompt"] == "Think." and draft.outcomes["loss_scale"].became == "same"


@pytest.mark.parametrize(
    ("neighbour", "given", "dtype"),
    [
        ("trl", {"dtype": "float32"}, "bfloat16"),
        ("trl", {"bf16": False}, "float32"),
        ("llamafactory", {}, "float32"),
        ("llamafactory", {"bf16": True}, "bfloat16"),
        ("llamafactory", {"pure_bf16": True}, "bfloat16"),
    ],
)
def test_what_is_computed_in(neighbour: str, given: dict[str, Any], dtype: str) -> None:
    assert imported(neighbour, FIXED[neighbour] | given).result["model.dtype"] == dtype


@pytest.mark.parametrize(
    ("neighbour", "given"),
    [
        ("llamafactory", {"deepspeed": "examples/deepspeed/ds_z3_config.json"}),
        ("trl", {"accelerate_config": "examples/accelerate_configs/fsdp2.yaml"}),
        ("openrlhf", {"ds.zero_stage": 3}),
    ],
)
def test_divided_weights_ask_for_a_layout(neighbour: str, given: dict[str, Any]) -> None:
    notes = imported(neighbour, FIXED[neighbour] | given).notes
    assert any("tools/plan.py" in note and next(iter(given)) in note for note in notes)


def test_a_file_that_composes_others_is_refused_for_the_composed_one() -> None:
    with pytest.raises(
        InputError, match="^defaults composes other files .*: give the composed configuration, which verl"
    ):
        imported("verl", {"defaults": ["ppo_megatron_trainer", "_self_"], "trainer.nnodes": 1})


def test_the_schedule_of_the_guide_for_noise_is_spoken_of_where_none_is_given() -> None:
    given = FIXED["verl"] | {"trainer.noise_injection.enabled": True, "trainer.noise_injection.sigma_start": 0.05}
    assert any("set linear if that is meant" in note for note in imported("verl", given).notes)
    for other in ({"trainer.noise_injection.schedule": "linear"}, {"trainer.noise_injection.enabled": False}):
        assert not any("linear" in note for note in imported("verl", given | other).notes)
