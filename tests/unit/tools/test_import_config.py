"""tools/import_config.py: units, what is refused, how scripts are read, and where its name is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from mega_rl.config import RunConfig, load_config
from mega_rl.errors import InputError
from tools.import_config import INCOMPLETE, main

VERL = """
set -x
export HCCL_CONNECT_TIMEOUT=1500
batch=${BATCH:-512}
sp_size=4
name=trial  # a comment with "quotes
tokens=$(((512 + 1024) * 2))
DATA=(
    data.train_files="$HOME/gsm8k/train.parquet"
    data.train_batch_size=${batch}
)
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo "${DATA[@]}" \\
    data.max_prompt_length=512 data.max_response_length=1024 \\
    # data.max_response_length=7 \\
    actor_rollout_ref.model.path='some/$model' \\
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \\
    actor_rollout_ref.actor.use_dynamic_bsz=True \\
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$tokens \\
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=${sp_size} \\
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.rollout.n=5 actor_rollout_ref.rollout.top_p=0.7 \\
    actor_rollout_ref.model.lora_rank=8 \\
    +trainer.noise_injection.enabled=True '+trainer.noise_injection.exclude_patterns=["input_layernorm","lm_head"]' \\
    trainer.logger='["console","wandb"]' trainer.project_name=p trainer.nnodes=2 trainer.n_gpus_per_node=8 \\
    trainer.experiment_name="${name}_$(date +%s)" $@
"""


def made(tmp_path: Path, neighbour: str, text: str, *more: str) -> tuple[int, dict[str, Any], RunConfig | None]:
    out = tmp_path / "run.yaml"
    out.unlink(missing_ok=True)
    status = main(["--from", neighbour, text, "-o", str(out), *more])
    tree = yaml.safe_load(out.read_text(encoding="utf-8")) if out.exists() else {}
    return status, tree, load_config(out) if tree and "path" in tree.get("model", {}) else None


def test_verl_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.sh"
    script.write_text(VERL, encoding="utf-8")
    status, tree, config = made(tmp_path, "verl", str(script))
    assert status == INCOMPLETE and config is not None
    assert config.model.path == "some/$model" and tree["data"]["train_files"] == ["${oc.env:HOME}/gsm8k/train.parquet"]
    assert config.data.train_batch_size == 512 and config.data.max_response_length == 1024
    assert config.algorithm.minibatches_per_step == 4 and config.optimizer.warmup_steps == 40
    assert config.trainer.max_tokens_per_microbatch == 3072 * 4 and config.parallel.context == 4
    assert (config.algorithm.kl_in, config.algorithm.kl_estimator) == ("loss", "k3")
    assert config.algorithm.dual_clip == 3.0 and config.validation.n == 0 and config.optimizer.beta2 == 0.999
    assert config.aqn.enabled and config.aqn.exclude_patterns == ["input_layernorm"]
    assert config.logging.wandb_project == "p" and [reward.name for reward in config.rewards] == ["gsm8k"]
    said = capsys.readouterr().out
    assert "torchrun --nnodes 2 --nproc-per-node 8" in said
    head = (tmp_path / "run.yaml").read_text(encoding="utf-8").partition("model:")[0]
    assert (config.tuning.method, config.tuning.adapter.rank, config.tuning.adapter.alpha) == ("lora", 8, 16.0)
    assert "rollout.top_p = " in head and "rollout.top_p = " in said
    assert "trainer.experiment_name: trial, without (...)" in head and tree["trainer"]["output_dir"] == "runs/p/trial"


def test_trl_counts_completions_per_device(tmp_path: Path) -> None:
    command = (
        "accelerate launch --num_processes 4 grpo.py --model_name_or_path m --per_device_train_batch_size 8 "
        "--gradient_accumulation_steps 2 --steps_per_generation 4 --num_generations 16 --max-completion-length 256 "
        "--reward_funcs accuracy_reward my.rewards.f --reward_weights 1.0 0.5 --max_steps 100 --warmup_ratio 0.1 "
        "--use_vllm --loss_type dr_grpo --scale_rewards none --no_log_completions"
    )
    status, _, config = made(tmp_path, "trl", command)
    assert status == 0 and config is not None
    assert config.data.train_batch_size == 8 * 4 * 4 // 16 and config.algorithm.minibatches_per_step == 2
    assert config.trainer.total_steps == 50 and config.optimizer.warmup_steps == 0.1
    assert [(reward.name, reward.weight) for reward in config.rewards] == [("math_verify", 1.0), ("my.rewards:f", 0.5)]
    assert config.algorithm.loss_reduction == "sequence_mean_token_sum_norm" and config.algorithm.advantage == "dr_grpo"


def test_trl_script_in_python(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("from trl import GRPOConfig\nGRPOConfig(learning_rate=2e-6, beta=0.04, output_dir=name)\n")
    status, tree, _ = made(tmp_path, "trl", str(program), "--devices", "8")
    assert status == INCOMPLETE and tree["optimizer"]["lr"] == 2e-6
    assert tree["algorithm"]["kl_coefficient"] == 0.04


def test_llamafactory_file(tmp_path: Path) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text(
        "model_name_or_path: m\nstage: sft\nfinetuning_type: lora\nlora_rank: 8\ndataset: identity,alpaca_en_demo\n"
        "cutoff_len: 2048\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 8\nlearning_rate: 1.0e-4\n"
        "lr_scheduler_type: cosine\nmax_steps: 500\nwarmup_ratio: 0.1\nbf16: true\nreport_to: none\n"
    )
    status, tree, config = made(tmp_path, "llamafactory", str(file), "--devices", "8")
    assert status == 0 and config is not None and config.trainer.stage == "sft"
    assert (config.tuning.method, config.tuning.adapter.rank, config.tuning.adapter.alpha) == ("lora", 8, 16.0)
    assert config.data.train_batch_size == 64 and config.optimizer.warmup_steps == 0.1
    assert config.data.max_prompt_length + config.data.max_response_length == 2048
    assert config.data.train_files == ["data/identity.json", "data/alpaca_en_demo.json"]
    assert "rollout" not in tree and "algorithm" not in tree


def test_areal_file_with_references(tmp_path: Path) -> None:
    file = tmp_path / "grpo.yaml"
    file.write_text(
        "actor:\n  path: m\n  backend: megatron:d2p2t2\n  eps_clip: 0.4\n  kl_ctl: 0.0\n  ppo_n_minibatches: 4\n"
        "  temperature: ${gconfig.temperature}\n  reward_norm: {mean_level: group, std_level: group}\n"
        "rollout: {backend: 'vllm:d4t2', max_head_offpolicyness: 2}\ngconfig: {n_samples: 4, temperature: 0.9}\n"
        "train_dataset: {batch_size: 256, path: openai/gsm8k, type: rl, max_length: 1024}\n"
    )
    status, _, config = made(tmp_path, "areal", str(file))
    assert status == 0 and config is not None
    assert (config.rollout.mode, config.rollout.max_staleness) == ("in_flight", 2)
    assert (config.parallel.tensor, config.parallel.pipeline, config.parallel.sequence) == (2, 2, True)
    assert (config.rollout.num_engines, config.rollout.tensor_parallel_size) == (4, 2)
    assert config.rollout.placement == "separate" and config.rollout.temperature == 0.9
    assert config.algorithm.advantage == "grpo" and config.algorithm.minibatches_per_step == 4


@pytest.mark.parametrize("old", [False, True])
def test_openrlhf_flags_of_both_generations(tmp_path: Path, old: bool) -> None:
    new = {"--pretrain": "--actor.model_name_or_path", "--rollout_batch_size": "--rollout.batch_size"}
    new |= {"--train_batch_size": "--train.batch_size", "--n_samples_per_prompt": "--rollout.n_samples_per_prompt"}
    new |= {"--init_kl_coef": "--algo.kl.init_coef", "--advantage_estimator": "--algo.advantage.estimator"}
    command = (
        "python3 -m openrlhf.cli.train_ppo_ray --pretrain m --rollout_batch_size 128 --train_batch_size 256 "
        "--n_samples_per_prompt 8 --init_kl_coef 1e-3 --advantage_estimator group_norm"
    )
    for flat, dotted in {} if old else new.items():
        command = command.replace(f"{flat} ", f"{dotted} ")
    _, _, config = made(tmp_path, "openrlhf", command)
    assert config is not None and config.data.train_batch_size == 128
    assert config.algorithm.minibatches_per_step == 4 and config.rollout.n == 8
    assert (config.algorithm.kl_in, config.algorithm.kl_coefficient) == ("reward", 1e-3)


def test_what_cannot_be_read_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for neighbour, text, part in (
        ("trl", "trl grpo --per_device_train_batch_size 8", "--devices"),
        ("verl", "nothing at all", "holds no keys"),
        ("verl", "absent.yaml", "is no file"),
        ("verl", "python3 -m verl a.b='1", "close it"),
        ("verl", "A=$B B=$A python3 -m x a.b=$(( A", "does not end"),
    ):
        assert made(tmp_path, neighbour, text)[0] == 2
        said = capsys.readouterr().err
        assert part in said and said.count("\n") == 1


def test_loading_names_the_tool(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {path: m}\nactor_rollout_ref: {model: {path: m}}\nalgorithm: {adv_estimator: grpo}\n")
    with pytest.raises(InputError, match="tools/import_config.py --from verl") as error:
        load_config(file)
    assert "algorithm.adv_estimator: the name of verl for algorithm.advantage" in str(error.value)


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("rollout.num_generations", "rollout.n"),
        ("data.max_completion_length", "data.max_response_length"),
        ("algorithm.adv_estimator", "algorithm.advantage"),
        ("data.max_promt_length", "did you mean data.max_prompt_length"),
    ],
)
def test_names_of_others_do_not_mislead(tmp_path: Path, key: str, ours: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {path: m}\n")
    with pytest.raises(InputError, match=ours) as error:
        load_config(file, [f"{key}=1"])
    assert "import_config" not in str(error.value)
