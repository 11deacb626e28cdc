"""Frozen layers and adapters equal transformers with merged weights: a layout is one line of ``tuning_cases``.

Every case also resumes the checkpoint that the first one of its variant wrote, at another layout, and holds gradients
and optimizer of what it trains in exactly the bytes of the memory plan.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.distributed.megatron.tuning.tuning_cases import FOUR, TWO, TuningCase
from tests.launching.launch import REPO, once, ranks

SCRIPT = REPO / "tests" / "distributed" / "megatron" / "tuning" / "run_tuning_parity.py"
LIMITS = {
    "base": 1e-5,  # nats; B is zero
    "logprobs": 2e-5,  # nats
    "gradients": 5e-5,  # relative to the largest of the tensor
    "norm": 1e-5,  # relative
    "weights": 1e-5,  # absolute, after each of two steps of 1e-3
    "resumed": 1e-5,  # absolute
    "merged": 0.0,  # W + scale * B A in float32
}
ROUGH = {"base": 0.1, "logprobs": 0.5, "gradients": 0.5, "norm": 0.05, "weights": 0.01, "resumed": 0.01, "merged": 0.05}
Errors = dict[str, tuple[float, str]]


@pytest.fixture(scope="module")
def errors_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Errors]]:
    """Number of ranks -> case -> errors, from one launch each."""

    @once
    def launch(num_ranks: int) -> dict[str, Errors]:
        directory = tmp_path_factory.mktemp("models")
        launched = ranks(SCRIPT, "--dir", directory, nproc=num_ranks).check()
        lines = [json.loads(x.removeprefix("TUNED ")) for x in launched.stdout.splitlines() if x.startswith("TUNED ")]
        return {line["case"]: line["errors"] for line in lines}

    return launch


@pytest.mark.slow
@pytest.mark.parametrize("tuned", [*TWO, *FOUR], ids=lambda tuned: tuned.name)
def test_tuned_engine_equals_transformers(errors_of: Callable, tuned: TuningCase) -> None:
    errors = errors_of(tuned.case.num_ranks)[tuned.name]
    assert set(LIMITS) - set(errors) <= {"merged"}  # without adapters there is nothing to merge
    limits = LIMITS if tuned.dtype == "float32" else ROUGH
    assert {name: error for name, error in errors.items() if not error[0] <= limits[name]} == {}
