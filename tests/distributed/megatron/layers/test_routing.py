"""Replayed experts: those that the trainer recorded, at every layout; and those of a real engine."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from tests.launching.launch import ENGINE, REPO, once, ranks
from tests.models.layouts import Case, recomputations

SCRIPT = REPO / "tests" / "distributed" / "megatron" / "layers" / "run_routing.py"
ENGINE_SCRIPT = REPO / "tests" / "distributed" / "megatron" / "layers" / "run_routing_engine.py"
CASES = (
    Case(2, tensor=2, sequence=True),
    Case(2, pipeline=2, virtual_pipeline=2),
    Case(2, context=2),
    Case(2, expert=2),
)


@once
def recorded(directory: str) -> str:
    cases = json.dumps([asdict(case) for case in CASES])
    return ranks(SCRIPT, "--cases", cases, "--dir", directory).check().stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "recomputation"),
    [pytest.param(case, name, id=f"{case.name}-{name}") for case in CASES for name in recomputations(case)],
)
def test_experts_of_the_pass_before_the_update_are_replayed_after_it(
    case: Case, recomputation: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.getbasetemp() / "routing"
    assert f"ROUTING {case.name} {recomputation} ok" in recorded(str(directory))


@once
def figures(directory: str) -> dict[str, dict[str, dict[str, float]]]:
    """dtype -> replayed or free -> figure."""
    stdout = ranks(ENGINE_SCRIPT, directory, modules=ENGINE).check().stdout
    lines = [json.loads(x.removeprefix("FIGURES ")) for x in stdout.splitlines() if x.startswith("FIGURES ")]
    return {line.pop("dtype"): line for line in lines}


@pytest.fixture
def of_dtype(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, float]]]:
    return figures(str(tmp_path_factory.getbasetemp() / "routing_engine"))


@pytest.mark.slow
def test_log_probabilities_agree_in_float32(of_dtype: dict[str, dict[str, dict[str, float]]]) -> None:
    replayed = of_dtype["float32"]["replayed"]
    assert replayed["largest"] <= 1e-5 and replayed["differing"] == 0, replayed


@pytest.mark.slow
def test_experts_agree_in_bfloat16_only_with_replay(of_dtype: dict[str, dict[str, dict[str, float]]]) -> None:
    replayed, free = of_dtype["bfloat16"]["replayed"], of_dtype["bfloat16"]["free"]
    assert replayed["differing"] == 0 < free["differing"], (replayed, free)
    assert replayed["mean"] < free["mean"], (replayed, free)
