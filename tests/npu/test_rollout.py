"""Engines of vLLM-Ascend on pretended devices, alone: fresh, written in place, reloaded, asleep and awake again.

What runs is the Python of vLLM 0.23 and vllm-ascend 0.23, vllm-ascend's compiled extension with its allocator for
sleeping, and our calls of them, on torch 2.13 in the place of 2.10. The operators are stand-ins
(``rollout_operators.py``): kernels and their limits, graphs, the NZ layout, HCCL, Triton and speed are not shown.

Greedy tokens must be those of transformers. Measured in float32: log-probabilities to 1e-5 nats; bound: 1e-4
(``rollout_checks.equals_hf``).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.contract.test_rollout_schemas import RECORDED
from tests.launching.launch import run
from tests.npu import emulation
from tests.npu.platforms import CPU, NPU

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1000),
    pytest.mark.skipif(not emulation.has_rollout(), reason=emulation.missing_rollout()),
]
SCRIPT = Path(__file__).with_name("run_rollout.py")
FAMILIES = ("qwen2", "qwen3", "qwen3_moe")
DIFFERENCES = [
    *(f"{family} {what}" for family in FAMILIES for what in ("fresh", "prefix cache", "in place", "loader")),
    "qwen3_moe slept, in place",
    "qwen3_moe slept, loader",
    "several answers",
    "changed under way",
    "changed under way, kept",
]
SAMPLING = ("plain", "stop_token", "min_tokens", "several_ends", "prompt_logprobs")
NUM_LAYERS = 2
FLOAT32 = 2e-5  # nats, between the two platforms


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Platform -> what ``run_rollout.py`` wrote."""
    folder = tmp_path_factory.mktemp("rollout")

    def launch(name: str, env: Mapping[str, str]) -> dict[str, Any]:
        models, result = folder / name, folder / f"{name}.json"
        models.mkdir()
        run([sys.executable, str(SCRIPT), str(models), str(result)], timeout=900, env=env).check()
        answer: dict[str, Any] = json.loads(result.read_text())
        return answer

    with ThreadPoolExecutor() as pool:
        both = {name: pool.submit(launch, name, env) for name, env in (("npu", NPU), ("cpu", CPU))}
        return {name: launched.result() for name, launched in both.items()}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_an_engine_is_its_weights(found: dict[str, dict[str, Any]], name: str) -> None:
    """Also at temperature 0.7, where vllm-ascend by itself returns log-probabilities of before the temperature."""
    difference = found["npu"][name]
    assert isinstance(difference, float) and difference < 1e-4, difference
    print(f"{name}: {difference:.1e}")


def test_a_sleeping_engine_drops_what_the_next_update_writes(found: dict[str, dict[str, Any]]) -> None:
    """Only the experts are large enough for memory of their own; the update after it is right, see above."""
    names = found["npu"]["dropped"]
    assert names and all(".mlp.experts." in name for name in names)


@pytest.mark.parametrize("family", FAMILIES)
def test_live_parameters_are_those_of_the_mapping(found: dict[str, dict[str, Any]], family: str) -> None:
    assert found["npu"][f"{family} layout"] is None


@pytest.mark.parametrize("platform", ["npu", "cpu"])
def test_seeds_limits_and_stops_hold(found: dict[str, dict[str, Any]], platform: str) -> None:
    assert found[platform]["sampling"] is None


@pytest.mark.parametrize("name", SAMPLING)
def test_parameters_of_sampling_mean_the_same_on_both_platforms(found: dict[str, dict[str, Any]], name: str) -> None:
    own, expected = (found[platform]["answers"][name] for platform in ("npu", "cpu"))
    assert [(a["tokens"], a["ends"]) for a in own] == [(a["tokens"], a["ends"]) for a in expected]
    for ours, theirs in zip(own, expected, strict=True):
        assert ours["logprobs"] == [pytest.approx(row, abs=FLOAT32) for row in theirs["logprobs"]]
        assert ours["prompt"] == pytest.approx(theirs["prompt"], abs=FLOAT32)


def test_the_parameters_of_sampling_have_an_effect(found: dict[str, dict[str, Any]]) -> None:
    answers = found["npu"]["answers"]
    lengths = {name: [len(answer["tokens"][0]) for answer in answers[name]] for name in SAMPLING}
    assert lengths["stop_token"][0] < lengths["min_tokens"][0] and lengths["several_ends"][1] < 12
    assert all(answer["prompt"] for answer in answers["prompt_logprobs"])


def test_the_dispatcher_knows_the_schemas_of_the_record(found: dict[str, dict[str, Any]]) -> None:
    assert found["npu"]["schemas"] == RECORDED


def test_the_operators_of_ascend_ran(
    found: dict[str, dict[str, Any]], report_operators: Callable[[str, Mapping[str, int]], None]
) -> None:
    """As often in each layer as one pass asks for: where one ran less, torch's own operators took its place."""
    counts = found["npu"]["operators"]
    own = {name: count for name, count in counts.items() if not name.startswith(("aten::", "c10d::")) and count}
    layers, experts = own["npu::npu_swiglu"], own["_C_ascend::moe_gating_top_k"]
    num_engines = len(FAMILIES) + 1  # and one that keeps keys and values
    warmed_up = NUM_LAYERS * num_engines  # without a cache: an engine measures its memory with one pass
    norms_of_heads = own.pop("npu::npu_rms_norm") - layers // NUM_LAYERS  # beside each pass' first
    assert 0 < norms_of_heads < 2 * layers  # of two families
    assert own == {
        "npu::npu_swiglu": layers,
        "atb::_npu_rotary_embedding": layers,
        "_C_ascend::npu_add_rms_norm_bias": 2 * layers,
        "atb::_npu_reshape_and_cache": layers - warmed_up,
        "npu::npu_fused_infer_attention_score": layers - warmed_up,
        "_C_ascend::moe_gating_top_k": experts,
        "_C_ascend::npu_moe_init_routing_custom": experts,
        "npu::npu_grouped_matmul": 2 * experts,
        "npu::npu_moe_token_unpermute": experts,
        "atb::_npu_matmul_add_fp32": num_engines,  # once where an engine warms up
    }
    report_operators("engines of vllm-ascend, alone", counts)
