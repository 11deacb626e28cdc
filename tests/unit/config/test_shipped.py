"""Every configuration that the repository ships loads, and is valid for its model and the processes that it names."""

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
from mega_rl.data.sets.retool import TOOL
from mega_rl.environments.choice import tool
from mega_rl.environments.tools import schema
from mega_rl.models.shape import read_model_shape
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.planning.automatic import automatic
from mega_rl.planning.memory_plan import Machine, make_plan
from mega_rl.stages.learn import learning
from mega_rl.synthetic.tiny_model import TOWER

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
SHIPPED = sorted(path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*.yaml"))
ON_CPU = {"grpo_gsm8k_cpu.yaml"} | {name for name in SHIPPED if name.startswith("quickstart")}
# Recipes for Ascend: whether engines sample while the trainer trains, whether adapters are trained, the objective or
# stage, the data of objectives, the model, how many cards of which kind, and whether a machine has 16.
ON_ASCEND = re.compile(
    r"(?P<pinned>pinned_)?(?P<lora>lora_)?"
    r"(?:(?P<objective>grpo|dapo|aqn)_(?P<data>gsm8k|math|retool|geo3k)|(?P<stage>sft|dpo|rm)"
    r"(?P<chained>_retool)?)_(?P<model>.+)_(?P<cards>8|16|32)x(?P<kind>910b|910c)(?P<box>_box16)?\.yaml"
)
# ReTool learns supervised from a set of its own, then mathematics with a tool.
DATA = {
    "gsm8k": "gsm8k",
    "math": "math",
    "geo3k": "geo3k",
    "retool": "math",
    "sft": "sft",
    "dpo": "pairs",
    "rm": "pairs",
}
DEVICES_PER_CARD = {"910b": 1, "910c": 2}
CARDS_PER_NODE = {None: 8, "_box16": 16}
GIB = 1 << 30
SIZED = re.compile(
    r"^# tools/plan\.py: at most (\d+) of 61 GiB on a device, .+; (\d+) GiB of a node's host memory\.$", re.MULTILINE
)


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


def num_devices(name: str) -> int:
    """Of the trainer's processes and of engines that have devices of their own."""
    rollout = load_config(CONFIGS / name).rollout
    engines = rollout.num_engines * rollout.tensor_parallel_size if rollout.placement == "separate" else 0
    return num_processes(name) + engines


def num_processes(name: str) -> int:
    """Of the trainer, as the command in the head of the file starts them; those of `make quickstart` are 2."""
    head = (CONFIGS / name).read_text()
    per_node = re.search(r"--nproc-per-node (\d+)", head)
    if per_node is None:
        assert name in ("quickstart.yaml", "quickstart_sft.yaml"), f"{name} does not say how it is started"
        return 2
    nodes = re.search(r"--nnodes (\d+)", head)
    return int(per_node[1]) * (int(nodes[1]) if nodes else 1)


def load_here(name: str, directory: Path) -> RunConfig:
    """The shipped file with its model and data under ``directory``, as far as validation looks."""
    config = load_config(CONFIGS / name)
    model = directory / Path(config.model.path).name
    model.mkdir()
    kind = "tiny, seeing" if name.startswith("quickstart_vision") else model.name
    (model / "config.json").write_text(json.dumps(model_config(kind)))
    for file in (model / "tokenizer.json", model / "model.safetensors"):
        file.write_text("")
    config.model.path = str(model)
    for files in (config.data.train_files, config.data.val_files):
        for index, file in enumerate(files):
            files[index] = str(directory / f"{index}{Path(file).suffix}")
            Path(files[index]).write_text("")
    return config


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_config_is_valid_for_its_model_and_processes(name: str, tmp_path: Path) -> None:
    world_size = num_processes(name)
    assert world_size == 2 if name in ON_CPU else 8 <= num_devices(name) <= 64
    config = load_here(name, tmp_path)
    assert problems(config, world_size) == []
    # what the session checks when it opens
    check_model(config, world_size)
    layout = ParallelLayout.of(config.parallel, world_size)
    assert layout.data >= 1
    if config.trainer.stage == "rl":
        learning.objective_of(config)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_config_names_its_file(name: str) -> None:
    """The command in the head is that of this very file."""
    named = re.findall(r"--config configs/(\S+)", (CONFIGS / name).read_text())
    assert named == ([name] if name not in ("quickstart.yaml", "quickstart_sft.yaml") else [])


def test_a_layout_that_does_not_fit_its_model_is_found(tmp_path: Path) -> None:
    config = load_here("dapo_math_qwen2.5_32b.yaml", tmp_path)
    config.parallel.pipeline, config.parallel.tensor = 3, 16
    found = "\n".join(problems(config, 32))
    assert "num_hidden_layers" in found and "num_key_value_heads" in found


def test_recipes_of_every_kind_are_shipped() -> None:
    loaded = {name: load_config(CONFIGS / name) for name in SHIPPED}
    on_cpu = {loaded[name].algorithm.name for name in ON_CPU}
    assert {"grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo"} <= on_cpu
    models = {Path(config.model.path).name for config in loaded.values()}
    assert {"Qwen2.5-7B-Instruct", "Qwen2.5-32B", "Qwen3-8B", "Qwen3-30B-A3B"} <= models


def ascend_recipes() -> dict[str, re.Match[str]]:
    found = {name: ON_ASCEND.fullmatch(name) for name in SHIPPED if "910" in name}
    assert all(found.values()), f"named otherwise than the other recipes for Ascend: {found}"
    return {name: match for name, match in found.items() if match}


@pytest.mark.parametrize("name", ascend_recipes())
def test_a_recipe_for_ascend_is_what_its_name_says(name: str) -> None:
    match = ascend_recipes()[name]
    objective, stage, kind = match["objective"], match["stage"], match["kind"]
    config = load_config(CONFIGS / name)
    assert config.platform.name == "npu"
    assert config.trainer.stage == (stage or "rl")
    assert config.tuning.method == ("lora" if match["lora"] else "full")
    assert config.aqn.enabled == (objective == "aqn")
    if objective:
        assert config.algorithm.name in (("grpo", "dapo") if objective == "aqn" else (objective,))
    data = "retool" if match["chained"] else DATA[match["data"] or stage]
    assert Path(config.data.train_files[0]).parent.name == data
    assert (config.environment.name is not None) == (match["data"] == "retool")
    assert Path(config.model.path).name.lower().replace("-", "_").startswith(match["model"])
    assert config.trainer.output_dir == f"runs/{Path(name).stem}"
    head = (CONFIGS / name).read_text()
    assert num_devices(name) == int(match["cards"]) * DEVICES_PER_CARD[kind]
    assert (config.rollout.mode, config.rollout.placement) == (
        ("pinned", "separate") if match["pinned"] else ("synchronous", "colocated")
    )
    if match["pinned"]:
        assert sum(map(int, re.findall(r'"NPU": (\d+)', head))) == num_devices(name) - num_processes(name)
        return
    per_node = re.search(r"--nproc-per-node (\d+)", head)
    assert per_node is not None and int(per_node[1]) == CARDS_PER_NODE[match["box"]] * DEVICES_PER_CARD[kind]


@pytest.mark.parametrize("name", ascend_recipes())
def test_a_recipe_for_ascend_fits_as_its_head_says(name: str, tmp_path: Path) -> None:
    config = load_here(name, tmp_path)
    machine = Machine(num_processes(name), 61 * GIB, 4 * GIB, "npu")  # of the 64 GiB what torch can allocate
    shape = read_model_shape(config.model.path)
    plan = make_plan(automatic(config, shape, machine)[0], shape, machine, with_sync=False)
    assert plan.fits
    figures = SIZED.search((CONFIGS / name).read_text())
    assert figures is not None
    assert plan.worst.fullest.num_bytes / GIB == pytest.approx(int(figures[1]), abs=1)
    match = ascend_recipes()[name]
    ranks_per_node = min(num_processes(name), CARDS_PER_NODE[match["box"]] * DEVICES_PER_CARD[match["kind"]])
    host = max(sum(item.num_bytes for item in rank.host) for rank in plan.ranks) * ranks_per_node / GIB
    assert host == pytest.approx(int(figures[2]), abs=10)


def test_every_model_and_objective_has_recipes_for_ascend() -> None:
    recipes = list(ascend_recipes().values())
    models = {recipe["model"] for recipe in recipes}
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
        assert len({recipe["model"] for recipe in recipes if recipe["objective"] == objective}) >= 3, objective
    assert {recipe["stage"] for recipe in recipes} == {None, "sft", "dpo", "rm"}
    assert {(recipe["objective"], recipe["stage"]) for recipe in recipes if recipe["lora"]} == {
        ("grpo", None),
        ("dapo", None),
        (None, "sft"),
        (None, "dpo"),
    }
    assert {(recipe["cards"], recipe["kind"], recipe["box"]) for recipe in recipes} == {
        *((num, kind, None) for num in ("8", "16") for kind in ("910b", "910c")),
        ("16", "910b", "_box16"),
        ("32", "910b", None),
    }


RETOOL = sorted(name for name in SHIPPED if name.startswith("dapo_retool_"))


@pytest.mark.parametrize("name", RETOOL)
def test_the_second_step_of_a_chain_begins_with_the_first(name: str) -> None:
    """Its command takes the model that the supervised recipe for the same model writes."""
    first = re.search(r"model\.path=(runs/sft_retool_\S+)/huggingface", (CONFIGS / name).read_text())
    assert first is not None
    config, before = load_config(CONFIGS / name), load_config(CONFIGS / f"{Path(first[1]).name}.yaml")
    assert before.trainer.output_dir == first[1]
    assert (before.model.path, before.platform.name) == (config.model.path, config.platform.name)
    made = [tool(entry) for entry in config.environment.options["functions"]]
    assert [schema(function) for function in made] == [TOOL]


def flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Keys of sections within as ``outer.inner``."""
    found: dict[str, Any] = {}
    for key, value in section.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found


# In these a recipe for another machine always differs from the one that it is a variant of; one that samples also in
# the last.
MACHINE = {"platform.name", "trainer.output_dir"}
EAGER = "rollout.vllm.enforce_eager"
# Variant -> the other keys in which it differs from the file without the machine in its name.
VARIANTS: dict[str, set[str]] = {
    "dapo_math_qwen3_14b_16x910b.yaml": set(),
    "dapo_math_qwen3_14b_16x910b_box16.yaml": set(),
    "dapo_math_qwen3_14b_8x910c.yaml": set(),
    "grpo_gsm8k_qwen2.5_7b_8x910b.yaml": set(),
    "lora_grpo_gsm8k_qwen2.5_7b_8x910b.yaml": set(),
    "lora_dapo_math_qwen2.5_32b_8x910c.yaml": set(),
    "dpo_qwen2.5_7b_8x910b.yaml": set(),
    "rm_qwen2.5_7b_8x910b.yaml": set(),
    "pinned_dapo_math_qwen2.5_7b_16x910b.yaml": set(),
    "pinned_dapo_math_qwen2.5_7b_8x910c.yaml": set(),
    "sft_qwen2.5_7b_8x910b.yaml": {"checkpoint.async_save"},
    "sft_qwen2.5_vl_3b_8x910b.yaml": set(),
    "sft_qwen2.5_vl_3b_8x910c.yaml": set(),
    "sft_qwen2.5_vl_7b_8x910b.yaml": set(),
    "sft_qwen2.5_vl_7b_8x910c.yaml": set(),
    "sft_qwen2.5_vl_32b_8x910c.yaml": set(),
    "sft_qwen2.5_vl_32b_16x910b.yaml": set(),
    **{
        f"grpo_geo3k_qwen2.5_vl_{where}.yaml": set()
        for where in ("3b_8x910b", "3b_8x910c", "7b_8x910b", "7b_8x910c", "32b_16x910b", "32b_8x910c")
    },
    **{
        f"{stage}_retool_{model}_{machine}.yaml": set()
        for stage, model, machines in (
            ("sft", "qwen2.5_7b", ("8x910b", "8x910c")),
            ("sft", "qwen2.5_32b", ("16x910b", "8x910c")),
            ("sft", "qwen3_8b", ("8x910b", "8x910c")),
            ("dapo", "qwen2.5_7b", ("8x910b", "8x910c")),
            ("dapo", "qwen2.5_32b", ("32x910b", "16x910c")),
            ("dapo", "qwen3_8b", ("8x910b", "8x910c")),
        )
        for machine in machines
    },
    "grpo_gsm8k_qwen2.5_0.5b_8x910b.yaml": {
        "algorithm.minibatches_per_step",
        "checkpoint.async_save",
        "validation.test_freq",
    },
    "dapo_math_qwen2.5_32b_16x910c.yaml": {
        "algorithm.dual_clip",
        "algorithm.minibatches_per_step",
        "checkpoint.save_freq",
        "data.train_batch_size",
        "trainer.total_epochs",
        "trainer.total_steps",
        "validation.test_freq",
    },
    "dapo_math_qwen2.5_32b_8x910c.yaml": {  # one node: short responses, few of them
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


def different_keys(name: str, other: str) -> set[str]:
    first, second = (flat(asdict(load_config(CONFIGS / file))) for file in (name, other))
    return {key for key in first | second if key not in first or key not in second or first[key] != second[key]}


def plain_name(name: str) -> str:
    """Without the machine: ``grpo_gsm8k_qwen2.5_7b_8x910b.yaml`` -> ``grpo_gsm8k_qwen2.5_7b.yaml``."""
    return re.sub(r"_(8|16|32)x910[bc](_box16)?\.yaml$", ".yaml", name)


def test_a_variant_for_a_machine_differs_in_named_keys_only() -> None:
    assert VARIANTS.keys() == {name for name in SHIPPED if plain_name(name) != name and plain_name(name) in SHIPPED}
    for name, keys in VARIANTS.items():
        samples = load_config(CONFIGS / name).trainer.stage == "rl"
        assert different_keys(name, plain_name(name)) == MACHINE | keys | ({EAGER} if samples else set()), name


# Of stages that learn from files.
FROM_FILES = {f"quickstart_{stage}.yaml" for stage in ("sft", "tools_sft", "vision_sft", "lora_sft", "pt", "rm", "dpo")}
OTHER_TASKS = {f"{name}.yaml" for name in ("grpo_gsm8k_cpu", "quickstart_tools", "quickstart_vision")}
QUICKSTARTS = sorted(ON_CPU - {"quickstart.yaml", "quickstart_lora.yaml"} - OTHER_TASKS - FROM_FILES)


@pytest.mark.parametrize("name", QUICKSTARTS)
def test_the_quickstarts_of_other_objectives_are_the_quickstart(name: str) -> None:
    """They differ from it in what the objective is, in its rewards, and in the noise."""
    found = different_keys(name, "quickstart.yaml")
    noise = {"aqn.enabled", "aqn.sigma_start", "aqn.sigma_end"}
    others = {key for key in found if not key.startswith("algorithm.")} - noise - {"trainer.output_dir"}
    assert "algorithm.name" in found and "trainer.output_dir" in found
    critic = {"critic.lr", "critic.warmup_steps", "data.train_batch_size", "rollout.n", "trainer.total_steps"}
    own = {"quickstart_dapo.yaml": {"rewards"}, "quickstart_ppo.yaml": critic}
    assert others == own.get(name, set())


def test_the_quickstart_with_adapters_is_the_quickstart() -> None:
    """At ten times its learning rate."""
    changed = {"tuning.method", "optimizer.lr", "optimizer.min_lr", "trainer.output_dir"}
    assert different_keys("quickstart_lora.yaml", "quickstart.yaml") == changed


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
    config = load_config(CONFIGS / "quickstart_gspo.yaml")
    text = to_yaml(config)
    assert "clip_ratio_high: 0.0004" in text and "loss_reduction: sequence_mean" in text
    (tmp_path / "resolved.yaml").write_text(text)
    assert load_config(tmp_path / "resolved.yaml") == config
