"""Where a run's adapters begin, what of the model can change, and how adapters reach the engines."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mega_rl.bridge.files.huggingface import HFReader
from mega_rl.bridge.files.peft.peft import PeftReader
from mega_rl.bridge.files.peft.peft_config import CONFIG_FILE
from mega_rl.bridge.files.sampled_digest import weights_digest
from mega_rl.bridge.lora import merged
from mega_rl.bridge.mapping.tensors import hf_tensors
from mega_rl.bridge.mapping.tuning import tuning_plan
from mega_rl.bridge.outgoing.noise import AqnNoise
from mega_rl.bridge.slices import indices, whole_box
from mega_rl.config import RunConfig
from mega_rl.config.schema.learning import AdapterConfig, TuningConfig
from mega_rl.config.schema.sampling import RolloutConfig
from mega_rl.errors import InputError
from mega_rl.models.shape import ModelShape, read_model_shape
from mega_rl.stages.weights.adapters import changing, check_continued, engine_slots, peft_config, starting_point
from tests.models import adapters, families


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name in ("qwen2", "qwen3_moe"):
        families.make(name).save_pretrained(root / name)
        adapters.save(root / f"{name}_adapter", adapters.state(adapters.pairs(read_model_shape(root / name))))
    return root


def tuning(**changes: Any) -> TuningConfig:
    return TuningConfig("lora", adapter=AdapterConfig(**{"rank": adapters.RANK, "alpha": adapters.ALPHA, **changes}))


def adapter_of(root: Path, name: str = "qwen2") -> PeftReader:
    return PeftReader(root / f"{name}_adapter", read_model_shape(root / name), root / name, "tuning.adapter.path")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"rank": 8, "alpha": 16}, "tuning.adapter.rank is 8"),
        ({"alpha": 4}, "tuning.adapter.alpha"),
        ({"rslora": True}, "tuning.adapter.rslora"),
        ({"targets": ["q_proj"]}, "tuning.adapter.targets"),
        ({"exclude": ["*.layers.0.*"]}, "tuning.adapter.targets"),
    ],
)
def test_a_run_goes_on_only_with_the_adapters_own_settings(root: Path, changes: dict[str, Any], word: str) -> None:
    settings = tuning(**changes)
    with pytest.raises(InputError, match=word) as refused:
        check_continued(
            adapter_of(root), tuning_plan(settings, read_model_shape(root / "qwen2")).adapters, settings.adapter
        )
    assert "\n" not in str(refused.value) and "tuning.adapter.new" in str(refused.value)
    same = tuning()
    check_continued(adapter_of(root), tuning_plan(same, read_model_shape(root / "qwen2")).adapters, same.adapter)


def test_a_new_adapter_begins_from_the_merged_weights(root: Path) -> None:
    """What the trainer then reads, box by box, is the weight with the adapter in it; all else is the file's."""
    model = HFReader(root / "qwen2")
    shape = read_model_shape(root / "qwen2")
    reader, adapter, digest = starting_point(tuning(path=str(root / "qwen2_adapter"), new=True), shape, model)
    assert adapter is None and digest is None
    factors = adapter_of(root)
    for name, size in hf_tensors(shape).items():
        weight = model.read(name, whole_box(size))
        expected = merged(weight, factors.factors(name), whole_box(size)) if name in factors.weights else weight
        assert torch.equal(reader.read(name, whole_box(size)), expected)
        assert torch.equal(expected, weight) == (name not in factors.weights)
        part = ((1, 5), *((1, 3) for _ in size[1:]))
        assert torch.equal(reader.read(name, part), expected[indices(part)])
    assert starting_point(tuning(), shape, model) == (model, None, None)
    _, adapter, digest = starting_point(tuning(path=str(root / "qwen2_adapter")), shape, model)
    assert adapter is not None and digest == weights_digest(root / "qwen2_adapter", CONFIG_FILE)


def test_only_what_can_change_is_sent_again(root: Path) -> None:
    shape, config = read_model_shape(root / "qwen2"), RunConfig()
    noise = AqnNoise(config.aqn, 10)

    def names(settings: TuningConfig, has_slots: bool = False) -> frozenset[str] | None:
        policy: Any = SimpleNamespace(plan=tuning_plan(settings, shape), shape=shape)
        return changing(config, policy, noise, has_slots)

    norm, weight = "model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.q_proj.weight"
    assert names(TuningConfig()) is None
    assert names(tuning(targets=["q_proj"])) == {f"model.layers.{i}.self_attn.q_proj.weight" for i in range(4)}
    of_slots = names(tuning(), has_slots=True)
    assert of_slots is not None and weight not in of_slots and len(of_slots) == 2 * 4 * 7
    config.aqn.enabled = True
    noise = AqnNoise(config.aqn, 10)
    of_slots = names(tuning(), has_slots=True)
    assert of_slots is not None and norm in of_slots and weight not in of_slots
    config.rollout.simulated_quantization = "nvfp4"
    of_slots = names(tuning(targets=["q_proj"]), has_slots=True)
    assert of_slots is not None and weight.replace("q_proj", "k_proj") in of_slots


@pytest.mark.parametrize(
    ("model", "device", "changes", "has_slots", "said"),
    [
        ("qwen2", "cpu", {}, False, "slow on a CPU"),
        ("qwen2", "npu", {}, True, "slots of rank 8"),
        ("qwen2", "npu", {"adapter": "merged"}, False, ""),
        ("qwen2", "npu", {"weight_update": "reload"}, False, "reload"),
        ("qwen2", "cpu", {"adapter": "slots"}, True, "slots of rank 8"),
        ("qwen3_moe", "npu", {}, False, "experts"),
    ],
)
def test_the_way_to_the_engines_is_said(
    root: Path, model: str, device: str, changes: dict[str, Any], has_slots: bool, said: str
) -> None:
    shape, lines = read_model_shape(root / model), list[str]()
    plan = tuning_plan(tuning(), shape).adapters
    assert (engine_slots(RolloutConfig(**changes), shape, plan, device, lines.append) is not None) == has_slots
    assert said in "".join(lines) and len(lines) == bool(said)


def test_slots_that_there_cannot_be_are_refused(root: Path) -> None:
    shape = read_model_shape(root / "qwen3_moe")
    for device, targets in (("cpu", ["q_proj"]), ("npu", ["all-linear"])):
        plan = tuning_plan(tuning(targets=targets), shape).adapters
        with pytest.raises(InputError, match="rollout.adapter"):
            engine_slots(RolloutConfig(adapter="slots"), shape, plan, device, print)


def test_experts_of_another_rank_are_written_with_a_pattern(root: Path, tmp_path: Path) -> None:
    """The scale that is read back is that of the plan for every module."""
    shape: ModelShape = read_model_shape(root / "qwen3_moe")
    settings = tuning(rank=8, expert_rank=2)
    policy: Any = SimpleNamespace(plan=tuning_plan(settings, shape), spec=SimpleNamespace(tuning=settings))
    plan, config = policy.plan.adapters, peft_config(policy, "base")
    for weight, rank in plan.ranks.items():
        module = weight.removesuffix(".weight")
        assert (config.rank_of(module), config.scale_of(module)) == (rank, plan.scale(rank))
