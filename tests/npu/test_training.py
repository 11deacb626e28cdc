"""Training on device npu is training on the CPU: our engine on Megatron-core, by one rank and two.

``make test-npu MINDSPEED=PATH`` runs it with Megatron-core patched by the MindSpeed of that folder.

The two differ by the order of summation inside fused operators alone. Measured in float32: losses, gradient norms and
log-probabilities to 3e-7 of their values or less, weights after four steps to 5e-7; in bfloat16 an operator's result
may be the next number, 2^-8 away.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch

from mega_rl.data.rows.rows import write_jsonl
from mega_rl.synthetic.arithmetic import ArithmeticSpec, arithmetic_data, arithmetic_tokenizer
from mega_rl.synthetic.tiny_model import TinyModelSpec, write_tiny_model
from tests.launching.training import SFT, TRAIN, metrics_of
from tests.models import tiny_models
from tests.models.layouts import Case
from tests.npu.figures import NUM_STEPS, Figures
from tests.npu.platforms import NEEDS_MINDSPEED, on_cpu, on_npu

HERE = Path(__file__).parent
NUM_LAYERS = 2
FAMILIES = ("qwen2", "qwen3", "qwen3_moe")
LAYOUTS = {
    "tp1": Case(1, families=FAMILIES),
    "tp2": Case(2, tensor=2, sequence=True, families=FAMILIES),
    "ep2": Case(2, expert=2, families=("qwen3_moe",)),
}
FLOAT32, BFLOAT16 = 2e-6, 2e-2  # relative, of losses, norms and log-probabilities
WEIGHTS = {"float32": 2e-6, "bfloat16": 2e-2}  # absolute; a weight's step is 1e-3
# How often each runs in one layer of a micro-batch, forward and backward: where one runs less, torch's own operators
# took its place. The norm behind the last layer comes on top.
ATTENTION = {
    "npu_fusion_attention": 1,
    "npu_fusion_attention_grad": 1,
    "npu_rotary_mul": 2,
    "npu_rotary_mul_backward": 2,
}
NORMS = {"npu_rms_norm": 1, "npu_add_rms_norm": 1, "npu_rms_norm_backward": 2}
NORMS_OF_HEADS = {"npu_rms_norm": 3, "npu_add_rms_norm": 1, "npu_rms_norm_backward": 4}
MLP = {"npu_swiglu": 1, "npu_swiglu_backward": 1}
EXPERTS = {
    "npu_grouped_matmul": 6,  # two products, each with two gradients
    "npu_swiglu": 2,  # once more for the gradient of the experts' weights
    "npu_swiglu_backward": 1,
    "npu_moe_token_permute_with_routing_map": 1,
    "npu_moe_token_permute_with_routing_map_grad": 1,
    "_npu_moe_token_unpermute_with_routing_map": 1,
    "npu_moe_token_unpermute_with_routing_map_grad": 1,
}
PER_LAYER = {
    "qwen2": ATTENTION | NORMS | MLP,
    "qwen3": ATTENTION | NORMS_OF_HEADS | MLP,
    "qwen3_moe": ATTENTION | NORMS_OF_HEADS | EXPERTS,
}
LAST_NORM = ("npu_rms_norm", "npu_rms_norm_backward")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1250)]  # two launches, each with a limit of its own


@dataclass(frozen=True)
class Both:
    """(family, dtype) -> figures, of the same launch on the CPU and on device npu."""

    layout: str
    cpu: dict[tuple[str, str], Figures]
    npu: dict[tuple[str, str], Figures]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one Hugging Face model per family."""
    directory = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        tiny_models.make(family, NUM_LAYERS).save_pretrained(directory / family)
    return directory


@pytest.fixture(scope="module", params=LAYOUTS)
def both(request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Both:
    """What the launches of one layout of ``LAYOUTS`` wrote."""
    case, directory, found = LAYOUTS[request.param], tmp_path_factory.mktemp(request.param), []
    for name, launch in (("cpu", on_cpu), ("npu", on_npu)):
        out = directory / f"{name}.pt"
        arguments = ("--models", models, "--out", out, "--case", json.dumps(asdict(case)))
        launch(HERE / "run_training.py", *arguments, nproc=case.num_ranks).check()
        found.append({key: Figures(**values) for key, values in torch.load(out).items()})
    return Both(request.param, *found)


def largest_difference(own: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(own, expected, strict=True))


def test_figures_are_those_of_the_cpu(both: Both) -> None:
    assert both.npu.keys() == both.cpu.keys()
    for (family, dtype), own in both.npu.items():
        expected, where = both.cpu[family, dtype], f"{family} {dtype}"
        tolerance = {"float32": FLOAT32, "bfloat16": BFLOAT16}[dtype]
        assert len(own.losses) == len(own.norms) == NUM_STEPS, where
        assert own.losses == pytest.approx(expected.losses, rel=tolerance), where
        assert own.norms == pytest.approx(expected.norms, rel=tolerance), where
        assert own.losses[-1] < own.losses[0] - 0.5, "the model learns"
        for ours, theirs in zip(own.logprobs, expected.logprobs, strict=True):
            assert largest_difference(ours, theirs) < 10 * tolerance, where
        for ours, theirs in zip(own.weights, expected.weights, strict=True):
            assert ours.keys() == theirs.keys(), where
            assert largest_difference(list(ours.values()), list(theirs.values())) < WEIGHTS[dtype], where


@NEEDS_MINDSPEED
def test_the_figures_are_of_a_trainer_that_mindspeed_has_patched(both: Both) -> None:
    assert all(figures.has_mindspeed for figures in both.npu.values())
    assert not any(figures.has_mindspeed for figures in both.cpu.values())


def test_fused_operators_ran(both: Both, report_operators: Callable[[str, Mapping[str, int]], None]) -> None:
    for (family, dtype), figures in both.npu.items():
        times = NUM_STEPS * figures.num_microbatches
        layers = {name: count * NUM_LAYERS for name, count in PER_LAYER[family].items()}
        expected = {f"npu::{name}": (count + (name in LAST_NORM)) * times for name, count in layers.items()}
        own = {name: count for name, count in figures.operators.items() if name.startswith("npu::") and count}
        assert own == expected, f"{family} {dtype}"
        assert figures.operators["aten::_fused_adamw_"] >= NUM_STEPS
        what = f"{both.layout} {family} {dtype}, {NUM_STEPS} steps of {figures.num_microbatches} micro-batches"
        report_operators(what, figures.operators)


def test_the_host_does_not_wait_in_a_layer(both: Both) -> None:
    """But where ranks exchange the rows of experts: it reads five tensors of how many, after one wait.

    Once a step Megatron asks for the token count; a micro-batch waits for nothing.
    """
    for (family, dtype), figures in both.npu.items():
        exchanges = both.layout != "tp1" and family == "qwen3_moe"
        expected = {"_local_scalar_dense": 1}
        expected |= {"_to_copy": 5 * NUM_LAYERS * figures.num_microbatches} if exchanges else {}
        assert figures.host_reads == expected, f"{family} {dtype}"
        assert both.cpu[family, dtype].host_reads == {}


def test_state_is_kept_moved_and_restored(tmp_path: Path) -> None:
    """Offload, checkpoints, generators, memory and the bridge's resharding, by two ranks, experts apart."""
    launched = on_npu(HERE / "run_state.py", "--dir", tmp_path, nproc=2).check()
    passed = [line.removeprefix("PASSED ") for line in launched.stdout.splitlines() if line.startswith("PASSED ")]
    assert passed == [
        "qwen2 offload",
        "qwen2 optimizer_on_host",
        "qwen2 reference",
        "qwen2 skipped",
        "qwen2 checkpoint_round_trip",
        "qwen2 generators",
        "qwen2 memory",
        "qwen2 bridge",
        "qwen3_moe checkpoint_round_trip",
    ]


MEMORY = ("used", "reserved", "total")
SFT_OVERRIDES = (
    "trainer.total_steps=4",
    "checkpoint.save_freq=-1",
    "validation.test_freq=-1",
    "optimizer.warmup_steps=1",
)


def test_supervised_run_is_that_of_the_cpu(tmp_path: Path) -> None:
    """``tools/train.py`` from a configuration to its metrics, tensor-parallel over two devices."""
    model = write_tiny_model(
        tmp_path / "model", TinyModelSpec(hidden_size=64, num_layers=2, ffn=96), arithmetic_tokenizer()
    )
    data = arithmetic_data(ArithmeticSpec(max_operand=9, num_train=1, num_val=1, num_sft=80))
    write_jsonl(tmp_path / "sft.jsonl", data.sft)
    config = tmp_path / "sft.yaml"
    config.write_text(SFT.format(model=model, sft=tmp_path / "sft.jsonl", sft_val=tmp_path / "sft.jsonl"))
    series = {}
    for name, launch in (("cpu", on_cpu), ("npu", on_npu)):
        directory = tmp_path / name
        arguments = ("--config", config, f"trainer.output_dir={directory}", f"platform.name={name}", *SFT_OVERRIDES)
        launch(TRAIN, *arguments, nproc=2).check()
        series[name] = [row for step, row in sorted(metrics_of(directory).items()) if step]
    assert len(series["npu"]) == 4
    assert series["npu"][-1]["memory/peak_device_gib"] > 0.0 == series["cpu"][-1]["memory/peak_device_gib"]
    of_device = {"throughput/mfu", *(f"device/memory_{kind}_gib" for kind in MEMORY)}
    assert of_device <= set(series["npu"][-1]) and not of_device & set(series["cpu"][-1])
    assert series["npu"][-1]["device/memory_used_gib"] >= series["npu"][-1]["device/memory_reserved_gib"] > 0.0
    for own, expected in zip(series["npu"], series["cpu"], strict=True):
        for name in ("sft/loss", "sft/grad_norm"):
            assert own[name] == pytest.approx(expected[name], rel=FLOAT32)
