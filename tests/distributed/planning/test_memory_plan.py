"""What ``mega_rl.planning`` says of the trainer's memory against the bytes that Megatron holds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.launching.launch import ranks

ACTIVATIONS = {"kept": 0.08, "peak": 0.15, "forward": 0.25}  # largest relative error
STATES = {"weights", "reference", "gradients", "masters", "moments"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("memory") / "result.json"
    ranks("benchmarks/training/memory.py", "--quick", "--json", path).check()
    found: list[dict[str, Any]] = json.loads(path.read_text())["results"]
    return found


@pytest.mark.slow
def test_every_axis_is_measured(results: list[dict[str, Any]]) -> None:
    keys = [result["keys"] for result in results]
    for axis in ("tensor", "sequence", "pipeline", "virtual_pipeline", "context", "expert"):
        assert any(f"parallel.{axis}" in key for key in keys), axis
    assert {key.get("memory.recompute", "none") for key in keys} == {"none", "selective", "full"}
    assert {key.get("model.dtype", "float32") for key in keys} == {"float32", "bfloat16"}


@pytest.mark.slow
def test_state_is_exact_on_every_rank(results: list[dict[str, Any]]) -> None:
    for result in results:
        for rank in result["ranks"]:
            assert rank["planned"].keys() >= STATES
            for name in STATES:
                assert rank["planned"][name] == rank["measured"][name], (result["case"], name)
        assert sum(rank["measured"]["moments"] for rank in result["ranks"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("figure", ACTIVATIONS)
def test_activations_are_close_on_every_rank(results: list[dict[str, Any]], figure: str) -> None:
    num_compared = 0
    for result in results:
        for rank in result["ranks"]:
            if figure in rank["measured"]:
                ratio = rank["planned"][figure] / rank["measured"][figure]
                assert abs(ratio - 1) <= ACTIVATIONS[figure], (result["case"], ratio)
                num_compared += 1
    assert num_compared >= 8
