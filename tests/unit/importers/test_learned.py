"""Adapters, preferences, reward models and critics of published commands: units, defaults, and a file that is valid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mega_rl.config import RunConfig, load_config, problems
from mega_rl.importers.convert import convert
from mega_rl.importers.draft.reading import Given
from tools.import_config import main

MODEL = {
    "architectures": ["Qwen2ForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4,
    "hidden_size": 16, "intermediate_size": 64, "max_position_embeddings": 8192, "vocab_size": 100,
}  # fmt: skip
SCORES = {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1, "id2label": {"0": "LABEL_0"}}

TRL_LORA = "--use_peft --lora_r 32 --lora_alpha 16"
LLAMAFACTORY = {"model_name_or_path": "MODEL", "finetuning_type": "lora", "lora_rank": 8, "lora_target": "all"} | {
    "dataset": "DATA", "cutoff_len": 2048, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8,
}  # fmt: skip
OPENRLHF = (
    "--train.batch_size 256 --train.micro_batch_size 1 --model.model_name_or_path MODEL --data.max_len 2048 "
    "--data.dataset DATA --data.chosen_key chosen --data.rejected_key rejected --ds.packing_samples"
)
VERL = (
    "python3 -m verl.trainer.main_ppo data.train_files=DATA data.max_prompt_length=512 data.max_response_length=1024 "
    "actor_rollout_ref.model.path=MODEL actor_rollout_ref.rollout.tensor_model_parallel_size=1 "
    "trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.test_freq=-1 "
)
AREAL: dict[str, Any] = {
    "actor": {"path": "MODEL", "backend": "fsdp:d8p1t1", "mb_spec": {"max_tokens_per_mb": 2048}, "kl_ctl": 0.0},
    "train_dataset": {"batch_size": 64, "path": "d/gsm8k", "max_length": 1024},
    "gconfig": {"n_samples": 8, "max_new_tokens": 1024},
    "total_train_epochs": 1,
}


def areal(kind: str, more: dict[str, Any], **sections: dict[str, Any]) -> str:
    return json.dumps(
        AREAL
        | {"actor": AREAL["actor"] | more, "train_dataset": AREAL["train_dataset"] | {"type": kind}}
        | {"rollout": {"backend": "vllm:d4t1"}, "valid_dataset": {"path": ""}}
        | sections
    )


COMMANDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "trl dpo": (
        "trl",
        f"trl dpo --model_name_or_path MODEL --train_dataset DATA --per_device_train_batch_size 2 {TRL_LORA} "
        "--gradient_accumulation_steps 8 --precompute_ref_log_probs --loss_type sigmoid sft --loss_weights 0.5 1.0",
        {
            "trainer.stage": "dpo", "tuning.method": "lora", "tuning.adapter.rank": 32, "tuning.adapter.alpha": 16.0,
            "tuning.adapter.targets": ["q_proj", "v_proj"], "preference.loss": "sigmoid", "preference.beta": 0.1,
            "preference.sft_coefficient": 2.0, "optimizer.lr": 1e-6, "data.train_batch_size": 128,
            "trainer.max_tokens_per_microbatch": 2 * 2 * 1024,
        },
    ),
    "trl kto": (
        "trl",
        "trl kto --model_name_or_path MODEL --train_dataset DATA --use_peft --lora_target_modules=all-linear "
        "--use_rslora --desirable_weight 1.5 --beta 0.2",
        {
            "trainer.stage": "kto", "tuning.adapter.targets": ["all-linear"], "tuning.adapter.rslora": True,
            "tuning.adapter.rank": 16, "kto.beta": 0.2, "kto.desirable_weight": 1.5, "kto.undesirable_weight": 1.0,
        },
    ),
    "trl reward": (
        "trl",
        "trl reward --model_name_or_path MODEL --train_dataset DATA --center_rewards_coefficient 0.01 --max_length 512",
        {"trainer.stage": "rm", "reward_model.centre": 0.01, "optimizer.lr": 1e-4, "tuning.method": "full"},
    ),
    "trl simpo": (
        "trl",
        "python examples/scripts/cpo.py --model_name_or_path MODEL --train_dataset DATA --loss_type simpo --beta 2.0",
        {"preference.loss": "simpo", "preference.simpo_gamma": 0.5, "preference.sft_coefficient": 1.0},
    ),
    "trl ppo": (
        "trl",
        "python examples/scripts/ppo/ppo.py --num_ppo_epochs 1 --num_mini_batches 2 --sft_model_path MODEL "
        "--reward_model_path SCORES --train_dataset DATA --per_device_train_batch_size 16 --total_episodes 1024",
        {
            "algorithm.advantage": "gae", "critic.path": "SCORES", "critic.lam": 0.95, "critic.clip_value": 0.2,
            "critic.lr": 3e-6, "algorithm.kl_coefficient": 0.05, "algorithm.kl_in": "reward", "rollout.n": 1,
            "algorithm.minibatches_per_step": 2, "trainer.total_steps": 8, "data.max_response_length": 53,
        },
    ),
    "llamafactory dpo": (
        "llamafactory",
        json.dumps(LLAMAFACTORY | {"stage": "dpo", "pref_loss": "simpo", "pref_beta": 2.0, "simpo_gamma": 1.0}),
        {
            "trainer.stage": "dpo", "tuning.adapter.rank": 8, "tuning.adapter.alpha": 16.0, "preference.beta": 2.0,
            "preference.loss": "simpo", "preference.simpo_gamma": 1.0, "trainer.max_tokens_per_microbatch": 4096,
        },
    ),
    "llamafactory kto": (
        "llamafactory",
        json.dumps(LLAMAFACTORY | {"stage": "kto", "pref_beta": 0.3, "kto_rejected_weight": 0.5, "lora_alpha": 8}),
        {"trainer.stage": "kto", "kto.beta": 0.3, "kto.undesirable_weight": 0.5, "tuning.adapter.alpha": 8.0},
    ),
    "llamafactory rm": (
        "llamafactory",
        json.dumps(LLAMAFACTORY | {"stage": "rm"}),
        {"trainer.stage": "rm", "tuning.method": "full"},
    ),
    "llamafactory pt by default": (
        "llamafactory",
        json.dumps({key: value for key, value in LLAMAFACTORY.items() if key != "finetuning_type"} | {"stage": "pt"}),
        {"trainer.stage": "pt", "tuning.method": "lora"},
    ),
    "llamafactory ppo": (
        "llamafactory",
        json.dumps(LLAMAFACTORY | {"stage": "ppo", "reward_model": "SCORES", "reward_model_type": "full"}),
        {
            "trainer.stage": "rl", "algorithm.advantage": "gae", "algorithm.kl_in": "reward", "critic.lr": 5e-5,
            "data.max_prompt_length": 2048, "rollout.n": 1, "tuning.method": "lora",
        },
    ),
    "llamafactory freeze": (
        "llamafactory",
        json.dumps(
            LLAMAFACTORY
            | {"stage": "sft", "finetuning_type": "freeze", "freeze_trainable_layers": -3}
            | {"freeze_trainable_modules": "mlp", "freeze_extra_modules": "embed_tokens,norm"}
        ),
        {
            "tuning.method": "freeze", "tuning.train_layers": -3, "tuning.train_modules": "mlp",
            "tuning.also_train": ["embed_tokens", "norm"],
        },
    ),
    "openrlhf dpo": (
        "openrlhf",
        f"deepspeed --module openrlhf.cli.train_dpo {OPENRLHF} --model.beta 0.2 --model.label_smoothing 0.1",
        {
            "trainer.stage": "dpo", "preference.beta": 0.2, "preference.label_smoothing": 0.1, "optimizer.lr": 1e-5,
            "trainer.max_tokens_per_microbatch": 4096, "tuning.method": "full",
        },
    ),
    "openrlhf rm": ("openrlhf", f"deepspeed --module openrlhf.cli.train_rm {OPENRLHF}", {"trainer.stage": "rm"}),
    "openrlhf lora": (
        "openrlhf",
        f"deepspeed --module openrlhf.cli.train_sft {OPENRLHF} --ds.lora.rank 64 "
        "--ds.lora.target_modules q_proj o_proj",
        {"trainer.stage": "sft", "tuning.adapter.rank": 64, "tuning.adapter.alpha": 16.0}
        | {"tuning.adapter.targets": ["q_proj", "o_proj"]},
    ),
    "openrlhf ppo": (
        "openrlhf",
        "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path MODEL --reward.model_name_or_path SCORES "
        "--data.prompt_dataset DATA --critic.adam.lr 9e-6 --critic.freezing_steps 5 --train.colocate_all",
        {
            "algorithm.advantage": "gae", "critic.path": "SCORES", "critic.lr": 9e-6, "critic.warmup_steps": 5,
            "critic.clip_value": 0.5,
        },
    ),
    "verl lora": (
        "verl",
        f"{VERL} algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=5 actor_rollout_ref.model.lora_rank=64 "
        "actor_rollout_ref.model.target_modules=all-linear actor_rollout_ref.rollout.load_format=safetensors "
        "actor_rollout_ref.rollout.layered_summon=True custom_reward_function.path=REWARD",
        {"tuning.method": "lora", "tuning.adapter.rank": 64, "tuning.adapter.alpha": 16.0},
    ),
    "verl megatron lora": (
        "verl",
        f"{VERL} algorithm.adv_estimator=rloo actor_rollout_ref.rollout.n=5 actor_rollout_ref.model.lora.rank=8 "
        "'actor_rollout_ref.model.lora.target_modules=[linear_qkv,linear_fc2]' custom_reward_function.path=REWARD "
        "actor_rollout_ref.model.lora.merge=True trainer.logger='[console,swanlab]' trainer.project_name=p",
        {
            "tuning.adapter.alpha": 32.0, "tuning.adapter.targets": ["q_proj", "k_proj", "v_proj", "down_proj"],
            "rollout.adapter": "merged", "logging.swanlab_project": "p",
        },
    ),
    "verl ppo": (
        "verl",
        f"{VERL} algorithm.adv_estimator=gae algorithm.lam=0.95 critic.model.path=MODEL critic.optim.lr=2e-5 "
        "critic.model.use_remove_padding=True critic.ppo_max_token_len_per_gpu=98304 trainer.critic_warmup=3 "
        "reward_model.enable=True reward_model.model.path=SCORES reward_model.micro_batch_size_per_gpu=32",
        {
            "algorithm.advantage": "gae", "critic.path": "MODEL", "critic.lr": 2e-5, "critic.lam": 0.95,
            "critic.warmup_steps": 2, "critic.clip_value": 0.5, "rollout.n": 1,
        },
    ),
    "areal dpo": (
        "areal",
        areal("dpo", {"beta": 0.2, "loss_type": "ipo"}),
        {"trainer.stage": "dpo", "preference.beta": 0.2, "preference.loss": "ipo"}
        | {"trainer.max_tokens_per_microbatch": 2048, "data.train_batch_size": 64},
    ),
    "areal rw": ("areal", areal("rw", {"is_critic": True}), {"trainer.stage": "rm"}),
    "areal lora": (
        "areal",
        areal("rl", {"use_lora": True, "reward_norm": {"mean_level": "group", "std_level": "group"}}),
        {"tuning.method": "lora", "tuning.adapter.rank": 32, "tuning.adapter.alpha": 16.0},
    ),
    "areal ppo": (
        "areal",
        areal("rl", {"gae_lambda": 0.9}, critic={"path": "MODEL", "eps_clip": 0.4, "optimizer": {"lr": 1.7e-5}}),
        {"algorithm.advantage": "gae", "critic.lam": 0.9, "critic.clip_value": 0.4, "critic.lr": 1.7e-5},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_published_commands(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    neighbour, text, wanted = COMMANDS[name]
    places = {"MODEL": tmp_path / "model", "SCORES": tmp_path / "scores", "DATA": tmp_path / "rows.jsonl"}
    for word, tree in (("MODEL", MODEL), ("SCORES", MODEL | SCORES)):
        places[word].mkdir()
        (places[word] / "config.json").write_text(json.dumps(tree))
    places["REWARD"] = tmp_path / "reward.py"
    places["REWARD"].write_text("def compute_score(): ...\n")
    for word, place in places.items():
        text = text.replace(word, str(place))
    if text.startswith("{"):
        file = tmp_path / "theirs.json"
        file.write_text(text)
        text = str(file)
    out = tmp_path / "run.yaml"
    assert main(["--from", neighbour, text, "--devices", "8", "-o", str(out)]) in (0, 3)
    assert "not in the table" not in capsys.readouterr().out
    config = load_config(out)
    found = {key: _get(config, key) for key in wanted}
    assert found == {key: str(places[str(value)]) if str(value) in places else value for key, value in wanted.items()}
    left = [line for line in problems(config, has_files=False) if not line.startswith(("data.", "rewards is []"))]
    assert left == []
    if "SCORES" in COMMANDS[name][1]:
        assert [(reward.name, reward.options) for reward in config.rewards] == [
            ("model", {"path": str(places["SCORES"])})
        ]


def _get(config: RunConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize(
    ("neighbour", "given", "refused"),
    [
        ("trl", {"use_peft": True, "lora_dropout": 0.05, "use_dora": True}, {"use_dora"}),
        ("trl", {"use_peft": True, "lora_dropout": 0.05, "num_generations": 8}, {"lora_dropout"}),
        ("trl", {"precompute_ref_log_probs": True, "loss_type": ["sigmoid", "bco_pair"]}, {"loss_type"}),
        ("trl", {"precompute_ref_log_probs": True, "loss_type": "hinge", "label_smoothing": 0.1}, {"label_smoothing"}),
        ("llamafactory", {"stage": "rm", "finetuning_type": "lora", "lora_rank": 8}, {"finetuning_type", "lora_rank"}),
        ("llamafactory", {"stage": "dpo", "pref_loss": "kto_pair", "ref_model": "m"}, {"pref_loss", "ref_model"}),
        ("llamafactory", {"finetuning_type": "oft", "use_llama_pro": True}, {"finetuning_type", "use_llama_pro"}),
        ("llamafactory", {"adapter_name_or_path": "a,b"}, {"adapter_name_or_path"}),
        ("verl", {"actor_rollout_ref.model.lora_rank": 8, "actor_rollout_ref.model.target_modules": r".*\.(q|v)_proj"},
         {"actor_rollout_ref.model.target_modules"}),
        ("verl", {"algorithm.adv_estimator": "gae", "critic.ppo_epochs": 2, "critic.model.lora_rank": 8},
         {"critic.ppo_epochs", "critic.model.lora_rank"}),
        ("verl", {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 8, "critic.ppo_epochs": 2}, set()),
        ("verl", {"algorithm.adv_estimator": "grpo", "critic.model.path": "m"}, {"algorithm.adv_estimator"}),
        ("openrlhf", {"ds.lora.rank": 8, "ds.lora.dropout": 0.1}, set()),
        ("openrlhf", {"rollout.batch_size": 8, "ds.lora.rank": 8, "ds.lora.dropout": 0.1}, {"ds.lora.dropout"}),
        ("areal", {"train_dataset.type": "dpo", "actor.loss_type": "hinge"}, {"actor.loss_type"}),
    ],
)  # fmt: skip
def test_what_is_not_there_is_refused(neighbour: str, given: dict[str, Any], refused: set[str]) -> None:
    draft = convert(neighbour, Given(dict(given)), num_devices=8)
    assert {key for key, outcome in draft.outcomes.items() if outcome.became == "none"} == refused
    assert draft.outcomes.keys() == given.keys()


@pytest.mark.parametrize(
    ("neighbour", "given", "share"),
    [
        ("trl", {"use_peft": True}, 0.05),
        ("trl", {"use_peft": True, "lora_dropout": 0.1}, 0.1),
        ("llamafactory", {"stage": "dpo", "lora_dropout": 0.1}, 0.1),
        ("llamafactory", {"stage": "sft"}, 0.0),
        ("openrlhf", {"ds.lora.rank": 8, "ds.lora.dropout": 0.2}, 0.2),
    ],
)
def test_dropout_of_adapters_where_there_is_some(neighbour: str, given: dict[str, Any], share: float) -> None:
    result = convert(neighbour, Given(dict(given)), num_devices=8).result
    assert result["tuning.adapter.dropout"] == share


def made(neighbour: str, program: str = "", **given: Any) -> dict[str, Any]:
    """The result of a program of theirs on 8 devices."""
    return convert(neighbour, Given(dict(given), program=[program]), 8).result


@pytest.mark.parametrize(
    ("program", "given", "is_shuffled"),
    [
        ("SFTTrainer", {}, True), ("SFTTrainer", {"shuffle_dataset": False}, True), ("DPOTrainer", {}, True),
        ("SFTTrainer", {"train_sampling_strategy": "sequential"}, False), ("KTOTrainer", {}, False),
        ("GRPOTrainer", {}, True), ("GRPOTrainer", {"shuffle_dataset": False}, False),
    ],
)  # fmt: skip
def test_rows_of_trl_are_drawn_at_random_unless_its_sampler_says_otherwise(
    program: str, given: dict[str, Any], is_shuffled: bool
) -> None:
    """The default of SFT's own key is false, but it shuffles besides the sampler; that of KTO takes them in order."""
    assert made("trl", program, **given).get("data.shuffle", True) is is_shuffled


def test_the_asynchronous_trainer_of_trl_samples_while_it_trains() -> None:
    """With a schedule, lengths and staleness of its own, and without the mask of GRPO's trainer."""
    result = made("trl", "AsyncGRPOConfig", per_device_train_batch_size=16, gradient_accumulation_steps=2)
    assert (result["data.train_batch_size"], result["data.max_response_length"]) == (32, 2048)
    assert result.get("optimizer.schedule", "constant") == "constant"
    assert (result["rollout.placement"], result["rollout.mode"]) == ("separate", "in_flight")
    assert result["rollout.max_staleness"] == 4 and result["algorithm.loss_reduction"] == "token_mean"
    assert result.get("algorithm.importance_correction", "truncate") == "truncate"
    outcomes = convert("trl", Given({"weight_sync_steps": 2}, program=["AsyncGRPOConfig"]), 8).outcomes
    assert outcomes["weight_sync_steps"].became == "none"


@pytest.mark.parametrize(
    ("given", "adapter"),
    [({}, (8, 8.0, 0.0)), ({"r": 32, "lora_alpha": 16}, (32, 16.0, 0.0)), ({"lora_dropout": 0.05}, (8, 8.0, 0.05))],
)
def test_the_class_of_peft_has_defaults_of_its_own(given: dict[str, Any], adapter: tuple[int, float, float]) -> None:
    draft = convert("trl", Given(dict(given), program=["LoraConfig", "SFTConfig"]), 8)
    assert tuple(draft.result[f"tuning.adapter.{key}"] for key in ("rank", "alpha", "dropout")) == adapter


@pytest.mark.parametrize(
    ("given", "recomputed"),
    [
        ({}, "full"), ({"disable_gradient_checkpointing": False}, "full"),
        ({"disable_gradient_checkpointing": True}, "none"), ({"gradient_checkpointing": True}, "full"),
        ({"tensor_model_parallel_size": 4}, "none"), ({"recompute_granularity": "selective"}, "selective"),
        ({"tensor_model_parallel_size": 4, "recompute_granularity": "full"}, "full"),
    ],
)  # fmt: skip
def test_llamafactory_computes_activations_again_unless_it_is_told_not_to(
    given: dict[str, Any], recomputed: str
) -> None:
    result = made("llamafactory", stage="sft", model_name_or_path="m", **given)
    assert result["memory.recompute"] == recomputed


@pytest.mark.parametrize(
    ("given", "resumed"),
    [({}, "auto"), ({"overwrite_output_dir": True}, "never"),
     ({"overwrite_output_dir": True, "resume_from_checkpoint": "c"}, "c")],
)  # fmt: skip
def test_llamafactory_begins_anew_where_it_overwrites(given: dict[str, Any], resumed: str) -> None:
    result = made("llamafactory", stage="sft", model_name_or_path="m", **given)
    assert result["checkpoint.resume"] == resumed and result["validation.val_before_train"] is False


@pytest.mark.parametrize("applies", [True, False])
@pytest.mark.parametrize(("program", "has_pattern"), [("train_sft", True), ("train_dpo", False), ("train_ppo", False)])
def test_openrlhf_applies_the_chat_template_only_if_asked(program: str, has_pattern: bool, applies: bool) -> None:
    given = {"data.apply_chat_template": True} if applies else {}
    draft = convert("openrlhf", Given(given, program=[f"openrlhf.cli.{program}"]), 8)
    assert draft.result["data.chat_template"] == ("auto" if applies else "never")
    assert any("User: {}" in note for note in draft.notes) == (has_pattern and not applies)
    assert draft.result["validation.val_before_train"] is False


def test_the_bounds_of_rewards_of_openrlhf_are_told_where_a_model_gives_them() -> None:
    given = {"actor.model_name_or_path": "m", "reward.model_name_or_path": "r"}
    for more, told in (({}, True), ({"reward.clip_range": [-1, 1]}, False)):
        draft = convert("openrlhf", Given({**given, **more}), 8)
        assert any("[-10, 10]" in note for note in draft.notes) is told
        assert told or draft.outcomes["reward.clip_range"].became == "none"


def test_a_template_of_another_file_is_refused() -> None:
    for neighbour, key in (("trl", "chat_template_path"), ("openrlhf", "data.tokenizer_chat_template")):
        assert convert(neighbour, Given({key: "t.jinja"}), 8).outcomes[key].became == "none"


def test_nothing_is_removed_where_theirs_keeps_every_checkpoint() -> None:
    slime = made("slime", rollout_batch_size=8, save_interval=20, save="out", rollout_max_response_len=1024)
    mindspeed = {f"actor_config.{key}": 1 for key in ("global_batch_size", "micro_batch_size", "lr", "save_interval")}
    areal = made("areal", **{"actor.backend": "fsdp:d8", "saver.freq_steps": 10})
    for result in (slime, made("mindspeed_rl", **mindspeed), areal):
        assert result["checkpoint.save_freq"] and result["checkpoint.keep_checkpoints"] == 0
    assert areal["validation.val_before_train"] is False
