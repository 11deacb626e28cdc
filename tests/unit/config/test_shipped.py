"""Every recipe of the index loads, is valid for its model and its machine, and is what its place says."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mega_rl.config import RunConfig, load_config, problems, to_yaml
from mega_rl.config.checks.algorithm import PRESETS
from mega_rl.config.checks.model import check_model
from mega_rl.config.reading.yaml_text import parse_yaml
from mega_rl.data.sets.retool import TOOL
from mega_rl.environments.choice import tool
from mega_rl.environments.tools import schema
from mega_rl.errors import InputError
from mega_rl.models.shape import read_model_shape
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.planning.automatic import automatic
from mega_rl.planning.memory_plan import Machine, make_plan
from mega_rl.stages.learn import learning
from mega_rl.synthetic.tiny_model import TOWER
from tools import recipes as index
from tools.recipes import CONFIGS, MACHINES, Recipe, before, head, is_recipe, recipe

RECIPES = index.recipes()
IDS = [f"{row.file.removesuffix('.yaml')}:{row.machine}" for row in RECIPES]
ASCEND = [row for row in RECIPES if "910" in row.machine]
every_recipe = pytest.mark.parametrize("row", RECIPES, ids=IDS)
every_ascend_recipe = pytest.mark.parametrize("row", ASCEND, ids=[IDS[RECIPES.index(row)] for row in ASCEND])
# Folder -> stage, objective, and the directory of its data. ReTool learns supervised from a set of its own, then
# mathematics with a tool.
TASKS = {
    "grpo_gsm8k": ("rl", "grpo", "gsm8k"),
    "grpo_math": ("rl", "grpo", "math"),
    "grpo_geo3k": ("rl", "grpo", "geo3k"),
    "dapo_math": ("rl", "dapo", "math"),
    "dapo_retool": ("rl", "dapo", "math"),
    "gspo_math": ("rl", "gspo", "math"),
    "sft": ("sft", None, "sft"),
    "sft_retool": ("sft", None, "retool"),
    "sft_vision": ("sft", None, "sft"),
    "dpo": ("dpo", None, "pairs"),
    "rm": ("rm", None, "pairs"),
}
DEVICES_PER_CARD = {"910b": 1, "910c": 2}
GIB = 1 << 30


EXPERTS = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "head_dim": 128,
}
# What the models' own config.json say, by the last part of model.path; tiny ones as tools/make_tiny_model.py does.
KEYS = [
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
]


def seeing(hidden_size: int, ffn_size: int, **more: Any) -> dict[str, Any]:
    """What Qwen2.5-VL's say besides."""
    tower = {"depth": 32, "hidden_size": 1280, "intermediate_size": ffn_size, "out_hidden_size": hidden_size}
    rope = {"type": "mrope", "mrope_section": [16, 24, 24]}
    return {"vision_config": tower, "rope_scaling": rope, "max_position_embeddings": 128000, **more}


MODELS: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "Qwen2.5-0.5B-Instruct": ("Qwen2", (24, 14, 2, 896, 4864, 151936), {"tie_word_embeddings": True}),
    "Qwen2.5-1.5B-Instruct": ("Qwen2", (28, 12, 2, 1536, 8960, 151936), {"tie_word_embeddings": True}),
    "Qwen2.5-7B-Instruct": ("Qwen2", (28, 28, 4, 3584, 18944, 152064), {}),
    "Qwen2.5-32B": ("Qwen2", (64, 40, 8, 5120, 27648, 152064), {"max_position_embeddings": 131072}),
    "Qwen2.5-VL-3B-Instruct": (
        "Qwen2_5_VL",
        (36, 16, 2, 2048, 11008, 151936),
        seeing(2048, 3420, tie_word_embeddings=True),
    ),
    "Qwen2.5-VL-7B-Instruct": ("Qwen2_5_VL", (28, 28, 4, 3584, 18944, 152064), seeing(3584, 3420)),
    "Qwen2.5-VL-32B-Instruct": ("Qwen2_5_VL", (64, 40, 8, 5120, 27648, 152064), seeing(5120, 3456)),
    "Qwen2.5-32B-Instruct": ("Qwen2", (64, 40, 8, 5120, 27648, 152064), {}),
    "Qwen3-8B": ("Qwen3", (36, 32, 8, 4096, 12288, 151936), {"max_position_embeddings": 40960, "head_dim": 128}),
    "Qwen3-8B-Base": ("Qwen3", (36, 32, 8, 4096, 12288, 151936), {"head_dim": 128}),
    "Qwen3-14B-Base": ("Qwen3", (40, 40, 8, 5120, 17408, 151936), {"head_dim": 128}),
    "Qwen3-30B-A3B": ("Qwen3Moe", (48, 32, 4, 2048, 6144, 151936), {"max_position_embeddings": 40960, **EXPERTS}),
    "model": ("Qwen2", (2, 4, 2, 128, 384, 4096), {"max_position_embeddings": 1024}),
    "huggingface": ("Qwen2", (2, 4, 2, 128, 384, 20), {"max_position_embeddings": 2048}),
    "tiny, seeing": (
        "Qwen2_5_VL",
        (2, 4, 2, 128, 384, 300),
        {
            "vision_config": {**TOWER, "out_hidden_size": 128},
            "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
        },
    ),
}


def model_config(model: str) -> dict[str, Any]:
    family, sizes, more = MODELS[model]
    kind = "ForConditionalGeneration" if "vision_config" in more else "ForCausalLM"
    plain = {"architectures": [f"{family}{kind}"], "hidden_act": "silu", "max_position_embeddings": 32768}
    return plain | dict(zip(KEYS, sizes, strict=True)) | more


def num_devices(row: Recipe) -> int:
    """Of the trainer's processes and of engines that have devices of their own."""
    rollout = row.load().rollout
    engines = rollout.num_engines * rollout.tensor_parallel_size if rollout.placement == "separate" else 0
    return row.num_processes + engines


def load_here(row: Recipe, directory: Path) -> RunConfig:
    """The recipe with its model and data under ``directory``, as far as validation looks."""
    config = row.load()
    model = directory / Path(config.model.path).name
    model.mkdir()
    kind = "tiny, seeing" if row.folder == "quickstart_vision" else model.name
    (model / "config.json").write_text(json.dumps(model_config(kind)))
    for file in (model / "tokenizer.json", model / "model.safetensors"):
        file.write_text("")
    config.model.path = str(model)
    for files in (config.data.train_files, config.data.val_files):
        for number, file in enumerate(files):
            files[number] = str(directory / f"{number}{Path(file).suffix}")
            Path(files[number]).write_text("")
    return config


@every_recipe
def test_a_recipe_is_valid_for_its_model_and_processes(row: Recipe, tmp_path: Path) -> None:
    world_size = row.num_processes
    assert world_size == 2 if row.machine == "cpu" else 8 <= num_devices(row) <= 64
    config = load_here(row, tmp_path)
    assert problems(config, world_size) == []
    # what the session checks when it opens
    check_model(config, world_size)
    layout = ParallelLayout.of(config.parallel, world_size)
    assert layout.data >= 1
    if config.trainer.stage == "rl":
        learning.objective_of(config)


def test_a_layout_that_does_not_fit_its_model_is_found(tmp_path: Path) -> None:
    config = load_here(recipe("dapo_math/qwen2.5_32b"), tmp_path)
    config.parallel.pipeline, config.parallel.tensor = 3, 16
    found = "\n".join(problems(config, 32))
    assert "num_hidden_layers" in found and "num_key_value_heads" in found


def test_recipes_of_every_kind_are_shipped() -> None:
    on_cpu = {row.load().algorithm.name for row in RECIPES if row.machine == "cpu"}
    assert {"grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo"} <= on_cpu
    models = {Path(row.load().model.path).name for row in RECIPES}
    assert {"Qwen2.5-7B-Instruct", "Qwen2.5-32B", "Qwen3-8B", "Qwen3-30B-A3B"} <= models


def test_the_index_is_current_and_names_every_file() -> None:
    pages = index.pages()
    stale = [name for name, text in pages.items() if (CONFIGS / name).read_text(encoding="utf-8") != text]
    assert stale == [], "run `make reference`"
    assert {row.file for row in RECIPES} == set(filter(is_recipe, index.shipped()))
    assert {file for row in RECIPES for file in row.files} == set(index.shipped()), "a file that no recipe uses"
    for text in pages.values():
        assert [file for file in index.shipped() if f"({file})" not in text] == []
        assert all(f"`{row.command()}`" in text for row in RECIPES)


def test_a_command_of_the_index() -> None:
    assert recipe("grpo_gsm8k/qwen2.5_7b", "8x910b").command() == (
        "torchrun --nproc-per-node 8 tools/train.py --config configs/grpo_gsm8k/base.yaml "
        "--config configs/grpo_gsm8k/qwen2.5_7b.yaml --config configs/machines/ascend_sampling.yaml "
        "trainer.output_dir=runs/grpo_gsm8k_qwen2.5_7b_8x910b model.path=path/to/Qwen2.5-7B-Instruct"
    )
    assert recipe("sft/qwen3_8b").command() == (
        "torchrun --nproc-per-node 16 tools/train.py --config configs/sft/base.yaml --config configs/sft/qwen3_8b.yaml "
        "--config configs/machines/ascend.yaml model.path=path/to/Qwen3-8B "
        "'data.train_files=[path/to/train.jsonl]' 'data.val_files=[path/to/val.jsonl]'"
    )
    assert "--nnodes 2 --node-rank RANK --master-addr ADDRESS" in recipe("grpo_math/qwen2.5_32b").command()


def test_a_folder_can_be_overlooked_and_all_files_are_short() -> None:
    folders = [path for path in CONFIGS.iterdir() if path.is_dir()]
    assert all(len(list(folder.glob("*.yaml"))) <= 12 for folder in folders)
    assert sum((CONFIGS / file).read_text().count("\n") for file in index.shipped()) <= 2200


@pytest.mark.parametrize("file", filter(is_recipe, index.shipped()))
def test_a_recipe_says_only_what_is_special(file: str) -> None:
    """No value that the files before it have given; and without them it is no run."""
    files = before(file)
    if not files:
        return
    given: dict[str, Any] = {}
    for name in files:
        given |= flat(parse_yaml((CONFIGS / name).read_text()))
    own = flat(parse_yaml((CONFIGS / file).read_text()))
    assert {key: value for key, value in own.items() if given.get(key, KeyError) == value} == {}
    assert is_refused(file) and is_refused(files[0])


def is_refused(file: str) -> bool:
    """Whether a file by itself lacks the model, or data or rewards."""
    try:
        config = load_config(CONFIGS / file)
    except InputError as error:
        return "model.path is not set" in str(error)
    return not config.data.train_files or (config.trainer.stage == "rl" and not config.rewards)


@pytest.mark.parametrize("file", [file for file in index.shipped() if file.startswith("machines/")])
def test_a_machine_by_itself_is_one_sentence(file: str) -> None:
    with pytest.raises(
        InputError, match=r"^configuration \S+/machines/\w+\.yaml: model\.path is not set: give it [^\n]+$"
    ):
        load_config(CONFIGS / file)


@pytest.mark.parametrize("file", index.shipped())
def test_every_head_names_the_source_of_its_values(file: str) -> None:
    """A published recipe, a paper, a page, another recipe of ours (which has to exist), or that there is none."""
    (source,) = re.findall(r"^# Source: ((?:.+\n)(?:# \S.+\n)*)", head(file), re.MULTILINE)
    assert re.search(r"verl|MindSpeed|LLaMA-Factory|arXiv \d{4}\.\d{5}|docs/|\w\.yaml|own values", source)
    ours = [name for name in re.findall(r"(\S*)\b([\w.]+/[\w.]+\.yaml)", source) if not name[0]]
    assert all((CONFIGS / name).is_file() for _, name in ours), ours


VERL = {  # what every recipe that repeats one of verl's has of its defaults
    "algorithm.objective": "ppo",
    "algorithm.loss_reduction": "token_mean",
    "algorithm.clip_ratio_low": 0.2,
    "algorithm.clip_ratio_high": 0.2,
    "algorithm.dual_clip": 3.0,
    "algorithm.importance_cap": None,
    "algorithm.kl_estimator": "k3",
    "algorithm.kl_in": "loss",
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": 0,
    "optimizer.weight_decay": 0.01,
    "optimizer.clip_grad": 1.0,
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.999,
    "rollout.n": 5,
    "rollout.temperature": 1.0,
    "validation.n": 0,
}
GEO3K = VERL | {
    "data.train_batch_size": 512,
    "data.max_prompt_length": 1024,
    "data.max_response_length": 2048,
    "algorithm.kl_coefficient": 0.01,
    "algorithm.entropy_coefficient": 0.0,
    "algorithm.minibatches_per_step": 16,
    "model.vision.freeze": False,
    "model.vision.freeze_merger": False,
    "optimizer.lr": 1e-6,
    "trainer.total_epochs": 15,
}
# Recipe -> what is published, in our keys and units (a mini-batch of 32 of 1024 prompts: 32 of a step).
PUBLISHED: dict[str, dict[str, Any]] = {
    "grpo_gsm8k/qwen2.5_0.5b_8x910b": VERL
    | {
        "data.train_batch_size": 128,
        "data.max_prompt_length": 512,
        "data.max_response_length": 128,
        "algorithm.minibatches_per_step": 2,
        "algorithm.entropy_coefficient": 0.001,
        "algorithm.kl_coefficient": 0.001,
        "optimizer.lr": 5e-7,
        "rollout.tensor_parallel_size": 2,
        "rollout.vllm.gpu_memory_utilization": 0.6,
        "trainer.total_epochs": 1,
        "checkpoint.save_freq": None,
        "validation.test_freq": 5,
    },
    "grpo_gsm8k/published_qwen2.5_7b": VERL
    | {
        "data.train_batch_size": 1024,
        "data.max_prompt_length": 1024,
        "data.max_response_length": 1024,
        "algorithm.minibatches_per_step": 32,
        "algorithm.entropy_coefficient": 0.0,
        "algorithm.kl_coefficient": 0.001,
        "optimizer.lr": 5e-8,
        "rollout.tensor_parallel_size": 4,
        "rollout.vllm.gpu_memory_utilization": 0.3,
        "trainer.max_tokens_per_microbatch": 2 * 2048,
        "trainer.total_epochs": 5,
        "checkpoint.save_freq": None,
        "validation.test_freq": 5,
    },
    "grpo_geo3k/qwen2.5_vl_3b": GEO3K | {"algorithm.minibatches_per_step": 32},
    "grpo_geo3k/qwen2.5_vl_7b": GEO3K,
    "grpo_geo3k/qwen2.5_vl_32b": GEO3K,
    "sft/lora_qwen3_8b": {
        "tuning.adapter.rank": 32,
        "tuning.adapter.alpha": 16,
        "tuning.adapter.targets": ["all-linear"],
        "tuning.adapter.dropout": 0.0,
        "data.train_batch_size": 256,
        "data.max_prompt_length": 512,
        "data.max_response_length": 512,
        "optimizer.lr": 1e-4,
        "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 0,
        "optimizer.weight_decay": 0.01,
        "optimizer.beta2": 0.999,
        "trainer.total_epochs": 2,
    },
    "aqn/gsm8k_tuned_qwen2.5_1.5b": {
        "data.train_batch_size": 128,
        "data.max_prompt_length": 512,
        "data.max_response_length": 1024,
        "algorithm.minibatches_per_step": 4,
        "algorithm.kl_coefficient": 0.001,
        "rollout.n": 4,
        "rollout.tensor_parallel_size": 1,
        "rollout.vllm.gpu_memory_utilization": 0.8,
        "trainer.max_tokens_per_microbatch": 16 * (512 + 1024),
        "trainer.total_epochs": 2,
        "optimizer.lr": 5e-7,
        "validation.test_freq": 20,
        "aqn.sigma_start": 0.05,
        "aqn.sigma_end": 0.0005,
        "aqn.num_stages": 10,
        "aqn.target_modules": ["post_attention_layernorm"],
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_that_repeats_a_published_one_has_its_values(name: str) -> None:
    found = flat(asdict(recipe(name).load()))
    assert {key: found[key] for key in PUBLISHED[name]} == PUBLISHED[name]


def model_of(row: Recipe) -> str:
    """As the name of the file has it."""
    name = Path(row.file).name.removesuffix(".yaml").removesuffix(f"_{row.machine}")
    return name[name.index("qwen") :]


@every_recipe
def test_a_recipe_is_what_its_place_says(row: Recipe) -> None:
    config = row.load()
    name = Path(row.file).name
    assert (config.platform.name == "npu") == (row in ASCEND)
    assert config.tuning.method == ("lora" if name.startswith("lora") else "full")
    if row.machine == "cpu":
        assert config.platform.name == "cpu"
        return
    stage, objective, data = TASKS[(before(row.file) or [row.file])[0].split("/")[0]]
    assert config.trainer.stage == stage
    assert config.aqn.enabled == (row.folder == "aqn")
    if objective:
        assert config.algorithm.name == objective
    assert Path(config.data.train_files[0]).parent.name == data
    assert (config.environment.name is not None) == (row.folder == "dapo_retool")
    assert Path(config.model.path).name.lower().replace("-", "_").startswith(model_of(row))
    assert config.trainer.output_dir.endswith(f"_{row.machine}") == (row in ASCEND)
    assert (config.rollout.mode, config.rollout.placement) == (
        ("pinned", "separate") if name.startswith("pinned") else ("synchronous", "colocated")
    )


def test_every_recipe_writes_elsewhere() -> None:
    directories = [row.load().trainer.output_dir for row in RECIPES]
    assert len(set(directories)) == len(directories)


@every_ascend_recipe
def test_a_recipe_for_ascend_takes_all_devices_of_its_machine(row: Recipe) -> None:
    cards, kind = row.machine.removesuffix("_box16").split("x")
    assert num_devices(row) == int(cards) * DEVICES_PER_CARD[kind]
    machine = MACHINES[row.machine]
    assert machine.num_nodes * machine.per_node == num_devices(row)
    assert machine.per_node == (16 if row.machine.endswith("_box16") else 8) * DEVICES_PER_CARD[kind]


def test_the_engines_of_a_pinned_recipe_have_the_devices_that_ray_is_given() -> None:
    rows = [row for row in ASCEND if row.load().rollout.placement == "separate"]
    assert [row.machine for row in rows] == ["16x910b", "8x910c"]
    assert [num_devices(row) - row.num_processes for row in rows] == [4 + 8, 12]
    assert re.findall(r'"NPU": (\d+)', head(rows[0].file)) == ["4", "8", "12"]


@every_ascend_recipe
def test_a_recipe_for_ascend_fits_as_its_head_says(row: Recipe, tmp_path: Path) -> None:
    config = load_here(row, tmp_path)
    machine = Machine(row.num_processes, 61 * GIB, 4 * GIB, "npu")  # of the 64 GiB what torch can allocate
    shape = read_model_shape(config.model.path)
    plan = make_plan(automatic(config, shape, machine)[0], shape, machine, with_sync=False)
    assert plan.fits
    assert row.figures is not None
    device, usable, on_host = row.figures
    assert usable == 61
    assert plan.worst.fullest.num_bytes / GIB == pytest.approx(device, abs=1)
    ranks_per_node = min(row.num_processes, MACHINES[row.machine].per_node)
    host = max(sum(item.num_bytes for item in rank.host) for rank in plan.ranks) * ranks_per_node / GIB
    assert host == pytest.approx(on_host, abs=10)


def test_every_model_and_objective_has_recipes_for_ascend() -> None:
    models = {model_of(row) for row in ASCEND}
    assert models == {
        "qwen2.5_0.5b",
        "qwen2.5_1.5b",
        "qwen2.5_7b",
        "qwen2.5_32b",
        "qwen3_8b",
        "qwen3_14b",
        "qwen3_30b_a3b",
        "qwen2.5_vl_3b",
        "qwen2.5_vl_7b",
        "qwen2.5_vl_32b",
    }
    for objective in ("grpo", "dapo", "aqn"):
        assert len({model_of(row) for row in ASCEND if row.folder.startswith(objective)}) >= 3, objective
    loaded = [row.load() for row in ASCEND]
    assert {config.trainer.stage for config in loaded} == {"rl", "sft", "dpo", "rm"}
    assert {row.folder for row in ASCEND if row.load().tuning.method == "lora"} == {
        "grpo_gsm8k",
        "dapo_math",
        "sft",
        "dpo",
    }
    assert {row.machine for row in ASCEND} == {name for name in MACHINES if "910" in name}


@pytest.mark.parametrize("row", [row for row in RECIPES if row.folder == "dapo_retool"], ids=lambda row: row.machine)
def test_the_second_step_of_a_chain_begins_with_the_first(row: Recipe) -> None:
    """Its command takes the model that the supervised recipe for the same model writes."""
    (given,) = row.yours
    first = given.removeprefix("model.path=").removesuffix("/huggingface")
    before_it = {one.load().trainer.output_dir: one.load() for one in RECIPES if one.folder == "sft_retool"}[first]
    config = row.load()
    assert (before_it.model.path, before_it.platform.name) == (config.model.path, config.platform.name)
    made = [tool(entry) for entry in config.environment.options["functions"]]
    assert [schema(function) for function in made] == [TOOL]


def flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Keys of sections within as ``outer.inner``."""
    found: dict[str, Any] = {}
    for key, value in section.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found


def different_keys(row: Recipe, other: Recipe) -> set[str]:
    first, second = (flat(asdict(one.load())) for one in (row, other))
    return {key for key in first | second if key not in first or key not in second or first[key] != second[key]}


def keys_of_machine(row: Recipe, other: Recipe) -> set[str]:
    """In which recipes differ that run elsewhere: always in the directory, and one on Ascend in these."""
    if ("910" in row.machine) == ("910" in other.machine):
        return {"trainer.output_dir"}
    on_ascend = next(one.load() for one in (row, other) if "910" in one.machine)
    features = {f"platform.mindspeed.features.{name}" for name in on_ascend.platform.mindspeed.features}
    eager = {"rollout.vllm.enforce_eager"} if on_ascend.trainer.stage == "rl" else set()
    return {"trainer.output_dir", "platform.name"} | features | eager


# File for one machine -> the keys in which it differs besides from the file without the machine in its name.
VARIANTS: dict[str, set[str]] = {
    "grpo_gsm8k/qwen2.5_0.5b_8x910b": {
        "algorithm.dual_clip",
        "algorithm.entropy_coefficient",
        "algorithm.importance_cap",
        "algorithm.minibatches_per_step",
        "checkpoint.save_freq",
        "data.max_response_length",
        "optimizer.beta2",
        "rollout.vllm.gpu_memory_utilization",
        "trainer.total_epochs",
    },
    "grpo_gsm8k/qwen2.5_1.5b_8x910c": {"data.max_response_length"},
    "aqn/gsm8k_qwen2.5_1.5b_8x910c": {"data.max_response_length", "aqn.sigma_start", "aqn.sigma_end"},
    "dapo_math/qwen2.5_32b_16x910c": {
        "algorithm.dual_clip",
        "algorithm.minibatches_per_step",
        "checkpoint.save_freq",
        "data.train_batch_size",
        "trainer.total_epochs",
        "trainer.total_steps",
        "validation.test_freq",
    },
    "dapo_math/qwen2.5_32b_8x910c": {  # one node: short responses, few of them
        "algorithm.minibatches_per_step",
        "checkpoint.async_save",
        "data.max_response_length",
        "data.train_batch_size",
        "optimizer.warmup_steps",
        "optimizer.weight_decay",
        "parallel.context",
        "parallel.pipeline",
        "rewards",
        "rollout.n",
        "rollout.vllm.gpu_memory_utilization",
        "trainer.total_steps",
    },
}


def test_a_variant_for_a_machine_differs_in_named_keys_only() -> None:
    assert set(VARIANTS) == {file.removesuffix(".yaml") for file in index.shipped() if "910" in file}
    for name, keys in VARIANTS.items():
        row = recipe(name)
        plain = recipe(name.removesuffix(f"_{row.machine}"))
        assert different_keys(row, plain) == keys | keys_of_machine(row, plain), name


@pytest.mark.parametrize("file", filter(is_recipe, index.shipped()))
def test_a_recipe_on_other_machines_is_the_same(file: str) -> None:
    first, *others = [row for row in RECIPES if row.file == file]
    for row in others:
        own = {"checkpoint.async_save"} if file == "sft/qwen2.5_7b.yaml" else set()
        assert different_keys(row, first) == own | keys_of_machine(row, first), row.machine


QUICKSTARTS = ("cispo", "dapo", "dr_grpo", "gspo", "ppo", "rloo")


@pytest.mark.parametrize("name", QUICKSTARTS)
def test_the_quickstarts_of_other_objectives_are_the_quickstart(name: str) -> None:
    """They differ from it in what the objective is, in its rewards, and in the noise."""
    found = different_keys(recipe(f"quickstart/{name}"), recipe("quickstart/grpo"))
    noise = {"aqn.enabled", "aqn.sigma_start", "aqn.sigma_end"}
    others = {key for key in found if not key.startswith("algorithm.")} - noise - {"trainer.output_dir"}
    assert "algorithm.name" in found and "trainer.output_dir" in found
    critic = {"critic.lr", "critic.warmup_steps", "data.train_batch_size", "rollout.n", "trainer.total_steps"}
    own = {"dapo": {"rewards"}, "ppo": critic}
    assert others == own.get(name, set())


def test_the_quickstart_with_adapters_is_the_quickstart() -> None:
    """At ten times its learning rate."""
    changed = {"tuning.method", "optimizer.lr", "optimizer.min_lr", "trainer.output_dir"}
    assert different_keys(recipe("quickstart/lora"), recipe("quickstart/grpo")) == changed


@pytest.mark.parametrize("name", PRESETS)
def test_a_name_sets_what_the_user_does_not(name: str, tmp_path: Path) -> None:
    file, named = tmp_path / "own.yaml", f"algorithm.name={name}"

    def algorithm(*overrides: str) -> dict[str, Any]:
        return flat(asdict(load_config(file, overrides).algorithm))

    file.write_text("model: {path: x}\n")
    plain, preset = algorithm(), flat(PRESETS[name])
    assert algorithm(named) == plain | {"name": name} | preset
    for key, value in preset.items():  # given in the file or on the command line: kept, even where it is grpo's
        assert value != plain[key], f"{key} of {name} says what the schema says"
        assert algorithm(named, f"algorithm.{key}={plain[key]}") == plain | preset | {"name": name, key: plain[key]}
    for key in preset:
        tree: dict[str, Any] = {"name": name}
        inner = tree
        *outer, last = key.split(".")
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[last] = plain[key]
        file.write_text(json.dumps({"model": {"path": "x"}, "algorithm": tree}))
        assert algorithm() == plain | preset | {"name": name, key: plain[key]}


def test_the_resolved_config_says_what_a_name_set(tmp_path: Path) -> None:
    config = recipe("quickstart/gspo").load()
    text = to_yaml(config)
    assert "clip_ratio_high: 0.0004" in text and "loss_reduction: sequence_mean" in text
    (tmp_path / "resolved.yaml").write_text(text)
    assert load_config(tmp_path / "resolved.yaml") == config
