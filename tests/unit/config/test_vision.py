"""What a run may do with a model that sees pictures, and what of its tower it trains."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mega_rl.bridge.mapping.tuning import tuning_plan
from mega_rl.bridge.mapping.vllm import vllm_slices
from mega_rl.config.checks.model import TOWER_LEFT_OUT, model_problems
from mega_rl.config.schema.learning import TuningConfig, VisionConfig
from mega_rl.config.schema.sampling import RewardConfig
from mega_rl.config.schema.sections import RunConfig
from mega_rl.models.shape import ModelShape, parse_config
from mega_rl.planning.automatic import automatic
from mega_rl.planning.memory_plan import Machine
from tests.models import families


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    (tmp_path / "config.json").write_text(json.dumps(families.CONTRACT.config("qwen3_vl")))
    config = RunConfig()
    config.model.path, config.trainer.stage = str(tmp_path), "sft"
    config.data.max_prompt_length = config.data.max_response_length = 32
    return config


def shape() -> ModelShape:
    return parse_config(families.CONTRACT.config("qwen3_vl"), "qwen3_vl")


def problems(config: RunConfig) -> str:
    return "; ".join(model_problems(config, 4)[1])


def test_what_is_supported(config: RunConfig) -> None:
    for stage in ("sft", "pt", "dpo", "kto", "rl"):
        config.trainer.stage = stage
        assert problems(config) == ""
    config.trainer.stage = "rm"
    assert "trainer.stage is 'rm', which does not take a qwen3_vl model" in problems(config)


@pytest.mark.parametrize(
    ("section", "key", "value", "fix"),
    [
        ("rollout", "adapter", "slots", "set it to merged"),
        ("environment", "name", "tools", "leave it out"),
        ("algorithm", "advantage", "gae", "set it to grpo"),
    ],
)
def test_what_samplers_that_see_cannot_do(config: RunConfig, section: str, key: str, value: str, fix: str) -> None:
    config.trainer.stage = "rl"
    setattr(getattr(config, section), key, value)
    found = re.search(
        f"{section}.{key} is '{value}', but the qwen3_vl model of model.path sees pictures.*", problems(config)
    )
    assert found is not None and fix in found[0]


def test_a_quantised_engine_leaves_the_tower_as_it_is(config: RunConfig) -> None:
    config.trainer.stage, config.rollout.vllm = "rl", {"quantization": "fp8"}
    remedy = "set rollout.vllm.quantization_config to {ignore: ['re:visual[.]']}"
    assert "rollout.vllm.quantization is 'fp8', but" in problems(config) and remedy in problems(config)
    for no_list_with_it in (["lm_head"], 5, f"x {TOWER_LEFT_OUT}", {TOWER_LEFT_OUT: 1}, None):
        config.rollout.vllm["quantization_config"] = {"ignore": no_list_with_it}
        assert remedy in problems(config)
    config.rollout.vllm["quantization_config"] = {"ignore": ["lm_head", TOWER_LEFT_OUT]}
    assert problems(config) == ""
    config.rollout.vllm["mm_encoder_attn_dtype"] = "fp8"  # attention in the tower, whatever the weights are
    found = problems(config)
    assert "rollout.vllm.mm_encoder_attn_dtype is 'fp8', but" in found and found.endswith("leave it out")
    for family in ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"):  # vLLM matches a layer's name from its beginning
        names = [
            piece.local_name for piece in vllm_slices(parse_config(families.CONTRACT.config(family), family), 1, 0)
        ]
        left_out = {name for name in names if re.match(TOWER_LEFT_OUT.removeprefix("re:"), name)}
        assert left_out and left_out == {name for name in names if not name.startswith("language_model.")}


def test_value_models_see_no_pictures(config: RunConfig, tmp_path: Path) -> None:
    config.trainer.stage, config.algorithm.advantage = "rl", "gae"
    (problem,) = model_problems(config, 4)[1]
    assert problem.startswith("algorithm.advantage is 'gae', but the qwen3_vl model of model.path sees pictures")
    (text := tmp_path / "text").mkdir()
    (text / "config.json").write_text(json.dumps(families.CONTRACT.config("qwen3")))
    config.model.path, config.critic.path = str(text), str(tmp_path)
    assert "critic.path is a qwen3_vl model: value models see no pictures" in problems(config)
    config.algorithm.advantage = "grpo"
    config.rewards = [RewardConfig(name="model", options={"path": str(tmp_path)})]
    assert "architectures is ['Qwen3VLForConditionalGeneration']" in problems(config)


def test_the_first_layers_stand_on_the_first_stage(config: RunConfig) -> None:
    config.parallel.pipeline = 4
    assert "parallel.pipeline leaves 1 layers to the first stage, but the model's first 2 layers" in problems(config)
    config.parallel.pipeline = 2
    assert problems(config) == ""


@pytest.mark.parametrize("key", ["overlap_grad_reduce", "overlap_param_gather"])
def test_overlapped_gradients_need_a_frozen_tower(config: RunConfig, key: str) -> None:
    setattr(config.parallel, key, True)
    assert problems(config) == ""
    config.model.vision.freeze_merger = False
    assert f"parallel.{key} is True, but model.vision trains the tower" in problems(config)
    config.model.vision.freeze_merger, config.tuning = True, TuningConfig("lora", also_train=["*visual.merger.*"])
    assert f"parallel.{key} is True" in problems(config)


def test_names_reach_into_the_tower_only_where_they_say_so() -> None:
    plan = tuning_plan(TuningConfig("lora", also_train=["norm.weight"]), shape())
    assert plan.trained and not any("visual" in name for name in plan.trained)
    plan = tuning_plan(TuningConfig("lora", also_train=["*visual.merger.*"]), shape())
    assert plan.trained and all("visual.merger" in name for name in plan.trained)
    assert not any("visual" in name for name in plan.adapters.ranks)


@pytest.mark.parametrize(("freeze", "freeze_merger"), [(True, True), (True, False), (False, False)])
def test_what_of_the_tower_is_trained(freeze: bool, freeze_merger: bool) -> None:
    plan = tuning_plan(TuningConfig(), shape(), VisionConfig(freeze, freeze_merger))
    seeing = {name for name in plan.trained if "visual" in name}
    assert any(".blocks." in name for name in seeing) != freeze
    assert any("merger" in name for name in seeing) != freeze_merger
    assert plan.is_full == (not freeze and not freeze_merger)


def test_what_is_not_planned_for_is_recomputed(config: RunConfig) -> None:
    config.memory.recompute, config.trainer.total_steps = "auto", 1
    config.data.train_files = ["rows.jsonl"]
    machine = Machine(4, 64 << 30, 4 << 30, "cuda")
    assert automatic(config, shape(), machine)[0].memory.recompute == "full"
