"""How files of today are read: launchers, blocks of commands, Python, newer names, odd values, what is off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.importing.published import files, measure
from mega_rl.config.reading.tables import NEIGHBOURS
from mega_rl.errors import InputError
from mega_rl.importers.convert import convert
from mega_rl.importers.draft.draft import Draft
from mega_rl.importers.draft.reading import Given, read_given
from tools.import_config import main

ACTOR = "actor_rollout_ref.actor."


def read(text: str, **known: str) -> Given:
    return read_given([text], known)


def unknown(draft: Draft) -> list[str]:
    return [key for key, outcome in draft.outcomes.items() if outcome.became == "unknown"]


@pytest.mark.parametrize(
    "launch",
    [
        "uv run --frozen --all-packages --extra gpu --extra vllm python3 -m verl.trainer.main_ppo",
        "uv run --frozen torchrun --nproc_per_node 8 -m verl.trainer.main_ppo",
        'LAUNCH=(uv run --frozen --all-packages --extra "${B}" python3)\n"${LAUNCH[@]}" -m verl.trainer.main_ppo',
        "docker run --rm --shm-size 10g image:1\npython3 -m verl.trainer.main_ppo",
    ],
)
def test_flags_of_launchers_are_no_keys(launch: str) -> None:
    given = read(f"{launch} \\\n  data.train_batch_size=64 trainer.total_epochs=2\n", B="vllm")
    assert given.values.keys() - {"nproc_per_node"} == {"data.train_batch_size", "trainer.total_epochs"}
    assert unknown(convert("verl", given)) == []


def test_programs_of_a_block_are_no_values_of_the_launchers_flags() -> None:
    text = "accelerate launch --num_processes 2 sft.py --learning_rate 1e-5\n"
    text += "accelerate launch --num_processes 2 grpo.py --beta 0.1\n"
    given = read(text)
    assert given.values == {"num_processes": 2, "learning_rate": 1e-5, "beta": 0.1}
    assert given.program == ["sft.py", "grpo.py"]


STRINGS = """
batch=64
ACTOR="
    data.train_batch_size=$batch \\
    actor_rollout_ref.actor.use_kl_loss=False"
MORE="data.max_prompt_length=100"
ACTOR="$ACTOR $MORE"
python3 -m verl.trainer.main_ppo $ACTOR ${ROLLOUT_CONFIG} trainer.experiment_name="$name"
"""


def test_keys_in_a_string_are_not_lost() -> None:
    given = read(STRINGS, name="a b", ROLLOUT_CONFIG="actor_rollout_ref.rollout.n=5 trainer.total_epochs=2")
    assert given.values == {
        "data.train_batch_size": 64,
        "actor_rollout_ref.actor.use_kl_loss": False,
        "data.max_prompt_length": 100,
        "actor_rollout_ref.rollout.n": 5,
        "trainer.total_epochs": 2,
        "trainer.experiment_name": "a b",
    }


SLIME = """
TARGETS=(q_proj v_proj)
CKPT_ARGS=(
   --hf-checkpoint models/Qwen3-4B
   # --load elsewhere
)
EMPTY=()
ray start --head --node-ip-address 127.0.0.1 --num-gpus 8
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json="{}" \\
   -- python3 train.py --colocate ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} --lora-target-modules ${TARGETS[@]} ${EMPTY[@]} \\
   --actor-num-gpus-per-node 8 2>&1 | tee log
"""


def test_arrays_and_launchers_of_ray() -> None:
    given = read(SLIME)
    assert given.values == {
        "hf_checkpoint": "models/Qwen3-4B",
        "colocate": True,
        "lora_target_modules": ["q_proj", "v_proj"],
        "actor_num_gpus_per_node": 8,
    }
    assert given.unresolved == {} and given.program == ["train.py"]


SWIFT = """
# swift rollout --model m
CUDA_VISIBLE_DEVICES=0 swift rollout --model other --vllm_data_parallel_size 2
NPROC_PER_NODE=4 MAX_PIXELS=50176 \\
megatron rlhf --rlhf_type grpo --model m --dataset 'a/b#1000' --global_batch_size 64 --max_length 512
"""


def test_commands_of_swift_that_train_nothing_are_left_out() -> None:
    given = read(SWIFT)
    assert given.program == ["megatron", "rlhf"] and given.values["model"] == "m"
    draft = convert("swift", given)
    assert draft.num_devices == 4 and draft.result["data.max_pixels"] == 50176
    assert draft.result["data.train_files"] == ["data/b/train.jsonl[:1000]"]
    assert any("1000 rows" in note for note in draft.notes)


@pytest.mark.parametrize(("groups", "placement"), [([["train", "rollout"]], "colocated"), (None, "separate")])
def test_sections_of_swift_through_ray(groups: Any, placement: str) -> None:
    given = {"rlhf_type": "grpo", "global_batch_size": 16, "train.gpus": 4, "train.tuner_type": "lora"}
    given |= {"rollout.gpus": 8, "rollout.vllm_tensor_parallel_size": 2, "colocate_groups": groups}
    draft = convert("swift", Given(given))
    assert draft.num_devices == 4 and draft.result["tuning.method"] == "lora"
    assert draft.result["rollout.placement"] == placement
    assert draft.result.get("rollout.num_engines") == (4 if placement == "separate" else None)


def test_what_a_script_computes_is_asked_for_and_taken() -> None:
    text = (
        "python3 -m verl.trainer.main_ppo trainer.nnodes=$(nodes) data.train_batch_size=$BATCH trainer.total_epochs=1"
    )
    draft = convert("verl", read(text))
    assert {key for key, outcome in draft.outcomes.items() if "--set" in outcome.text} == {
        "trainer.nnodes", "data.train_batch_size",
    }  # fmt: skip
    assert convert("verl", read(text, BATCH="64")).result["data.train_batch_size"] == 64


PYTHON = """
import logging
from trl import GRPOConfig
rate = 3e-6
logging.basicConfig(level=logging.INFO, datefmt="x")
GRPOConfig(learning_rate=rate, beta=args.beta, max_steps=num_steps, temperature=0.7)
GRPOTrainer(model=name, reward_funcs=[accuracy_reward])
LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
"""


def test_set_is_read_for_python(tmp_path: Path) -> None:
    program = tmp_path / "grpo.py"
    program.write_text(PYTHON)
    plain = read_given([str(program)], {})
    assert plain.values["learning_rate"] == 3e-6 and set(plain.unresolved) == {"beta", "max_steps", "model"}
    assert "datefmt" not in plain.values and plain.values["reward_funcs"] == ["accuracy_reward"]
    out = tmp_path / "run.yaml"
    more = ["--set", "args.beta=0.04", "--set", "num_steps=20", "--set", "name=some/model", "--devices", "8"]
    assert main(["--from", "trl", str(program), "-o", str(out), *more]) == 0
    text = out.read_text()
    for line in ("kl_coefficient: 0.04", "total_steps: 20", "path: some/model", "rank: 8", "name: math_verify"):
        assert line in text


def test_two_values_of_a_name_are_not_a_constant(tmp_path: Path) -> None:
    program = tmp_path / "sft.py"
    program.write_text("rate = 1e-6\nrate = 2e-6\nSFTConfig(learning_rate=rate)\n")
    assert read_given([str(program)], {}).unresolved == {"learning_rate": "rate"}


@pytest.mark.parametrize("neighbour", NEIGHBOURS)
def test_null_and_what_is_off_is_needless(neighbour: str) -> None:
    keys = {
        "verl": ["algorithm.rollout_correction.rollout_rs", "actor_rollout_ref.actor.profiler.all_ranks"],
        "areal": ["actor.use_sapo_loss", "actor.megatron.fp8_config"],
        "openrlhf": ["train.async_enable", "algo.kl.target"],
        "trl": ["use_adaptive_entropy", "tf32"],
        "llamafactory": ["use_galore", "freeze_language_model"],
        "swift": ["freeze_llm", "teacher_model"],
        "slime": ["use_opd", "custom_tis_function_path"],
        "mindspeed_rl": ["rl_config.multi_turn_enable", "megatron_training.reuse_fp32_param"],
    }[neighbour]
    for value in (None, False):
        draft = convert(neighbour, Given(dict.fromkeys(keys, value)), 8)
        keys = list(draft.given.values)
        assert {key: draft.outcomes[key].became for key in keys} == dict.fromkeys(keys, "same"), value
    assert "none" in {
        outcome.became for outcome in convert(neighbour, Given(dict.fromkeys(keys, 3)), 8).outcomes.values()
    }


@pytest.mark.parametrize(
    ("neighbour", "key", "value", "rest"),
    [
        ("verl", f"{ACTOR}clip_ratio_high", "wide", {"data.train_batch_size": 64}),
        ("verl", "algorithm.adv_estimator", ["a"], {"data.train_batch_size": 64}),
        ("trl", "beta", "x", {"learning_rate": 1e-5}),
        ("llamafactory", "warmup_steps", "soon", {"learning_rate": 1e-5}),
        ("openrlhf", "algo.kl.init_coef", [1], {"data.max_len": 4096, "rollout.batch_size": 64}),
        ("areal", "actor.kl_ctl", "x", {"actor.eps_clip_higher": 0.3}),
        ("swift", "temperature", "warm", {"rlhf_type": "grpo", "global_batch_size": 64}),
        ("slime", "eps_clip", "wide", {"rollout_batch_size": 64, "eps_clip_high": 0.28}),
        ("mindspeed_rl", "rl_config.kl_penalty", "full", {"rl_config.clip_ratio": 0.1}),
    ],
)
def test_one_odd_value_refuses_one_key(neighbour: str, key: str, value: Any, rest: dict[str, Any]) -> None:
    draft = convert(neighbour, Given({key: value, **rest}), 8)
    assert draft.outcomes[key].became == "none" and str(value) in draft.outcomes[key].text
    assert all(draft.outcomes[name].became in ("mapped", "same") for name in rest)


def test_a_value_out_of_bounds_refuses_its_key() -> None:
    draft = convert("verl", Given({"data.train_batch_size": 0, "trainer.total_epochs": 2}))
    assert draft.outcomes["data.train_batch_size"].became == "none"
    assert draft.result["trainer.total_epochs"] == 2 and draft.result.get("data.train_batch_size") != 0


def test_two_bounds_of_verl_leave_tokens_out() -> None:
    prefix = "algorithm.rollout_correction.rollout_is"
    result = convert("verl", Given({prefix: "token", f"{prefix}_threshold": "0.5_4.0"})).result
    found = {key.rpartition("_")[2]: value for key, value in result.items() if key.startswith("algorithm.importance_")}
    assert found == {"cap": 4.0, "floor": 0.5, "correction": "mask", "level": "token"}


@pytest.mark.parametrize("section", ["reward_model.reward_kwargs", "reward.reward_kwargs"])
def test_verl_rewards_under_both_names(section: str) -> None:
    buffer = f"{section}.overlong_buffer_cfg"
    given = {f"{buffer}.enable": True, f"{buffer}.len": 512, f"{buffer}.penalty_factor": 0.5}
    draft = convert("verl", Given({**given, f"{section}.max_resp_len": 2048, "data.train_files": "gsm8k.parquet"}))
    assert draft.rewards[1] == {"name": "overlong", "options": {"max_length": 2048, "buffer": 512, "factor": 0.5}}
    assert unknown(draft) == []


@pytest.mark.parametrize(("mode", "ours"), [("disabled", "off"), ("R2", "recompute"), ("R3", "rollout")])
@pytest.mark.parametrize("section", ["", "megatron.", "veomni."])
def test_routing_replay(mode: str, ours: str, section: str) -> None:
    result = convert("verl", Given({f"{ACTOR}{section}router_replay.mode": mode})).result
    assert result.get("rollout.routing_replay", "off") == ours


def test_steps_of_the_profiler() -> None:
    draft = convert("verl", Given({"global_profiler.steps": [3, 4], f"{ACTOR}profiler.ranks": [0]}))
    assert (draft.result["trainer.profile.steps"], draft.result["trainer.profile.ranks"]) == ([3, 4], [0])


def test_a_composed_file_is_refused() -> None:
    given = {"defaults": ["../math/gsm8k_grpo@_global_"], "actor.path": "m", "gconfig.n_samples": 8}
    assert "composed" in convert("areal", Given(given)).outcomes["defaults"].text


def test_the_measurement_counts_files_and_keys(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text("python3 -m verl.trainer.main_ppo data.train_batch_size=64 no.such=1\n")
    (tmp_path / "b.sh").write_text("python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae\n")
    (tmp_path / "c.sh").write_text("echo done\n")
    (tmp_path / "d.yaml").write_text("a: 1\n")
    paths = files("verl", [tmp_path])
    assert [path.name for path in paths] == ["a.sh", "b.sh", "c.sh"]
    found = measure("verl", paths, 8)
    assert (found["files"], found["not of it"], found["read"], found["exit 0"]) == (2, 1, 2, 1)
    assert (found["set"], found["unknown"], found["keys"]) == (2, 1, {"no.such": 1})


def test_a_batch_per_device_still_asks_for_the_devices() -> None:
    with pytest.raises(InputError, match="--devices"):
        convert("trl", Given({"per_device_train_batch_size": 8}), None)


BRANCHES = """
NUM=${NUM:-8}
LR="1e-5"
case "${DEVICE}" in
    npu)
        NUM=16
        ;;
esac
ENGINE="\
    optim.lr=${LR} \
    optim.betas='[0.9,0.999]' \
    optim.lr_decay_style='cosine' \
    "
python3 -m verl.trainer.sft_trainer model.path=m ${ENGINE} trainer.n_gpus_per_node=${NUM}
"""


def test_the_default_of_a_variable_is_one_of_its_values() -> None:
    assert read(BRANCHES).several == {"NUM": ["8", "16"]}


def test_values_in_quotes_within_a_variable_have_none() -> None:
    given = read(BRANCHES)
    assert (given.values["optim.betas"], given.values["optim.lr_decay_style"]) == ([0.9, 0.999], "cosine")
    result = convert("verl", given).result
    assert (result["optimizer.beta2"], result["optimizer.schedule"]) == (0.999, "cosine")


@pytest.mark.parametrize("more, floor", [("optim.min_lr=1e-6", 1e-6), ("optim.min_lr_ratio=0.1", 1e-6), ("", 0.0)])
def test_the_last_rate_of_supervised_training_is_a_rate_or_a_share(more: str, floor: float) -> None:
    given = read(f"python3 -m verl.trainer.sft_trainer model.path=m optim.lr=1e-5 {more}")
    assert convert("verl", given).result["optimizer.min_lr"] == pytest.approx(floor)


def test_constants_that_a_program_gives_later_count(tmp_path: Path) -> None:
    text = "config = SFTConfig(max_length=512, learning_rate=1e-5)\ntraining_args.max_length = None\n"
    text += "training_args.model_init_kwargs = dict(dtype=dtype)\nself.args = 1\n"
    (tmp_path / "sft.py").write_text(text)
    given = read_given([str(tmp_path / "sft.py")], {})
    assert given.values == {"max_length": None, "learning_rate": 1e-5}
    notes = convert("trl", given, 8).notes
    assert any("theirs has no limit" in note for note in notes)


def test_the_template_of_llamafactory_is_told() -> None:
    notes = convert("llamafactory", Given({"stage": "sft", "model_name_or_path": "m", "template": "alpaca"}), 8).notes
    assert any("alpaca" in note for note in notes)
