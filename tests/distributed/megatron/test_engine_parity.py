"""The Megatron engine equals transformers: a layout is one line of ``CASES``, a launch takes one number of ranks.

Compared in float32 for every family, once with the supervised loss and once with advantages, an entropy bonus, a
temperature and, for mixtures of experts, random experts that are replayed; the gradient of every element counts, at
data-parallel layouts too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict

import pytest

from tests.launching.launch import REPO, once, ranks
from tests.models.layouts import DENSE, LATENT, MIXTURE, VISION, VISION_MIXTURE, Case

CASES = (
    Case(1, families=DENSE + MIXTURE + VISION + VISION_MIXTURE),
    Case(1, max_tokens=200),
    Case(2, tensor=2),
    Case(2, tensor=2, sequence=True, families=DENSE + MIXTURE + VISION_MIXTURE),
    Case(2, tensor=2, sequence=True, recompute="full", families=VISION),
    Case(2, pipeline=2),
    Case(2, pipeline=2, virtual_pipeline=2),
    Case(2, pipeline=2, families=VISION),
    Case(2, pipeline=2, virtual_pipeline=2, families=VISION[:1]),  # DeepStack wants its layers on the first chunk
    Case(2, context=2, families=DENSE + MIXTURE + VISION),
    Case(2, context=2, context_method="ulysses", families=("qwen3", *LATENT)),
    Case(2, overlap=True, families=DENSE + MIXTURE),
    Case(2, expert=2, families=MIXTURE + VISION_MIXTURE),
    Case(2, pipeline=2, recompute="full", families=VISION_MIXTURE),
    Case(2, expert_tensor=2, families=MIXTURE),
    Case(2, context=2, families=LATENT),
    Case(2, pipeline=2, virtual_pipeline=2, families=LATENT),
    Case(4, tensor=4, families=("llama",)),
    Case(4, tensor=2),
    Case(4, tensor=2, sequence=True, pipeline=2),
    Case(4, tensor=2, sequence=True, context=2, families=DENSE + VISION[1:]),
    Case(4, tensor=2, pipeline=2, families=VISION),
    Case(4, pipeline=2, virtual_pipeline=2, overlap=True),
    Case(4, tensor=2, sequence=True, context=2, context_method="ulysses", families=("llama",)),
    Case(4, pipeline=2, context=2, overlap=True),
    Case(4, context=2),
    Case(4, tensor=2, sequence=True, expert=2, expert_tensor=1, families=MIXTURE + VISION_MIXTURE),
    Case(4, tensor=2, sequence=True, expert=2, families=MIXTURE),
    Case(4, pipeline=2, virtual_pipeline=2, expert=2, overlap=True, families=MIXTURE),
)
SCRIPT = REPO / "tests" / "distributed" / "megatron" / "run_engine_parity.py"
OBJECTIVES = ("sft", "rl")
LIMITS = {
    "logits": 1e-5,  # absolute, of logits of order 1
    "logprobs": 1e-5,  # nats
    "entropy": 1e-5,  # nats
    "loss": 1e-5,  # relative
    "norm": 1e-5,  # relative
    "gradients": 1e-5,  # relative to the largest of the tensor
    "weights": 1e-5,  # absolute, after 3 steps of 1e-3
}

Errors = dict[str, tuple[float, str]]  # figure -> (largest error over all ranks, where it is)


@pytest.fixture(scope="module")
def errors_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[tuple[str, str, str], Errors]]:
    """Number of ranks -> (layout, family, objective) -> errors, from one launch each."""

    @once
    def launch(num_ranks: int) -> dict[tuple[str, str, str], Errors]:
        cases = json.dumps([asdict(case) for case in CASES if case.num_ranks == num_ranks])
        directory = tmp_path_factory.mktemp("models")
        launched = ranks(SCRIPT, "--cases", cases, "--dir", directory, nproc=num_ranks).check()
        lines = [json.loads(x.removeprefix("PARITY ")) for x in launched.stdout.splitlines() if x.startswith("PARITY ")]
        return {(line["layout"], line["family"], line["objective"]): line["errors"] for line in lines}

    return launch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "family"),
    [pytest.param(case, family, id=f"{case.name}-{family}") for case in CASES for family in case.families],
)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_engine_equals_transformers(errors_of: Callable, case: Case, family: str, objective: str) -> None:
    errors = errors_of(case.num_ranks)[case.name, family, objective]
    assert set(errors) == set(LIMITS) - ({"logits"} if case.pipeline > 1 else set())
    assert {name: error for name, error in errors.items() if not error[0] <= LIMITS[name]} == {}
