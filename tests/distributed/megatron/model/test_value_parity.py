"""The engine with a value head equals transformers' ``*ForSequenceClassification``: values, loss, every gradient."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from tests.launching.launch import REPO, once, ranks
from tests.models.layouts import Case

SCRIPT = REPO / "tests" / "distributed" / "megatron" / "model" / "run_value_parity.py"
FAMILIES = ("qwen2", "qwen3")  # the first has tied embeddings
CASES = (
    Case(2, families=FAMILIES),
    Case(2, tensor=2, families=FAMILIES),
    Case(2, tensor=2, sequence=True, families=FAMILIES),
    Case(2, pipeline=2, families=(*FAMILIES, "deepseek_v3")),
    Case(2, pipeline=2, virtual_pipeline=2, families=("qwen2",)),
    Case(2, context=2, families=(*FAMILIES, "qwen3_moe")),
    Case(2, expert=2, families=("qwen3_moe",)),
    Case(2, tensor=2, sequence=True, expert=2, expert_tensor=1, families=("qwen3_moe", "deepseek_v3")),
)
FIGURES = {"values", "loss", "gradients", "norm"}
LIMIT = 2e-5  # absolute, of values of order 1; gradients relative to the largest of the tensor


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    @once
    def launch() -> list[str]:
        cases = json.dumps([asdict(case) for case in CASES])
        arguments = ("--cases", cases, "--dir", tmp_path_factory.mktemp("models"))
        return ranks(SCRIPT, *arguments, nproc=2).check().stdout.splitlines()

    return launch()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "family"),
    [pytest.param(case, family, id=f"{case.name}-{family}") for case in CASES for family in case.families],
)
def test_values_equal_transformers(output: list[str], case: Case, family: str) -> None:
    lines = [json.loads(line.removeprefix("VALUES ")) for line in output if line.startswith("VALUES ")]
    (errors,) = [line["errors"] for line in lines if (line["layout"], line["family"]) == (case.name, family)]
    assert set(errors) == FIGURES
    assert {name: error for name, error in errors.items() if not error[0] <= LIMIT} == {}


@pytest.mark.slow
def test_a_new_head_is_exported_for_transformers_at_every_layout(output: list[str]) -> None:
    exported = {tuple(line.split()[1:]) for line in output if line.startswith("EXPORTED ")}
    assert exported == {
        *(("qwen2", CASES[number].name) for number in (1, 2, 3)),
        *(("deepseek_v3", CASES[number].name) for number in (3, 7)),
    }
