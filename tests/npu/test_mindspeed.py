"""MindSpeed's operators against torch_npu's called directly: one by one, and in training steps of two ranks.

``make test-npu MINDSPEED=CHECKOUT`` runs it with the real MindSpeed, whose adaptor patches Megatron-core too and whose
Adam then makes the steps. Otherwise a package stands in that has its operators' names and arguments
(``tests/pretended/mindspeed.py``): what is shown then is that mega_rl finds, calls and counts them rightly. What both
compute comes from the same stand-ins of kernels.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launching.launch import run
from tests.models import tiny_models
from tests.models.layouts import Case
from tests.npu.figures import NUM_STEPS, Figures
from tests.npu.platforms import HAS_MINDSPEED, NEEDS_MINDSPEED, on_npu
from tests.npu.test_training import NUM_LAYERS, PER_LAYER, largest_difference
from tests.pretended import mindspeed as pretended

HERE = Path(__file__).parent
LIMIT = 1e-6  # float32; losses, norms relative
# A function of MindSpeed -> the operator of torch_npu that it calls.
KERNELS = {
    "dot_product_attention_forward_impl": "npu_fusion_attention",
    "fused_rmsnorm": "npu_rms_norm",
    "fused_swiglu": "npu_swiglu",
    "npu_rotary_position_embedding": "npu_rotary_mul",
    "npu_gmm": "npu_grouped_matmul",
    "MoePermuteMaskMap": "npu_moe_token_permute_with_routing_map",
    "MoeUnpermuteMaskMap": "_npu_moe_token_unpermute_with_routing_map",
}
LAYOUTS = {
    "tp2": Case(2, tensor=2, sequence=True, families=("qwen3",)),
    "ep2": Case(2, expert=2, families=("qwen3_moe",)),
    "pp2": Case(2, pipeline=2, families=("qwen2",)),
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1250)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a process in which MindSpeed can be imported."""
    own = [] if HAS_MINDSPEED else [str(pretended.write(tmp_path_factory.mktemp("packages")))]
    return os.pathsep.join(filter(None, (*own, os.environ.get("PYTHONPATH"))))


def of(counts: dict[str, int], namespace: str) -> dict[str, int]:
    start = f"{namespace}::"
    return {name.removeprefix(start): count for name, count in counts.items() if name.startswith(start) and count}


def test_each_operator_by_mindspeed_is_the_direct_one(path: str) -> None:
    argv = (sys.executable, "-m", "tests.npu.run_mindspeed_operators")
    launched = run(argv, timeout=500, env={"PYTHONPATH": path, "MEGA_RL_PLATFORM": "npu"}).check()
    (line,) = [line for line in launched.stdout.splitlines() if line.startswith('{"lines"')]
    found: dict[str, Any] = json.loads(line)
    assert sum(" by MindSpeed (" in line for line in found["lines"]) == 6 and len(found["cases"]) == 31
    called: set[str] = set()
    for name, case in found["cases"].items():
        assert case["difference"] <= (LIMIT if name.endswith("float32") else 0.0), name
        direct, own = of(case["direct"], "npu"), of(case["mindspeed"], "mindspeed")
        assert of(case["mindspeed"], "npu") == direct and not of(case["direct"], "mindspeed"), name
        if not name.startswith("grouped_matmul_of_one"):  # which MindSpeed does not take
            assert own == {function: direct[kernel] for function, kernel in KERNELS.items() if kernel in direct}, name
        called |= own.keys()
    assert called == KERNELS.keys()


@dataclass(frozen=True)
class Steps:
    layout: str
    direct: Figures
    mindspeed: Figures


@pytest.fixture(scope="module", params=LAYOUTS)
def steps(request: pytest.FixtureRequest, path: str, tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """Training in float32 by two ranks, once for each way to the operators."""
    case, directory, found = LAYOUTS[request.param], tmp_path_factory.mktemp(request.param), {}
    (family,) = case.families
    tiny_models.make(family, NUM_LAYERS).save_pretrained(directory / family)
    without = os.pathsep.join(entry for entry in path.split(os.pathsep) if not Path(entry, "mindspeed").is_dir())
    for name, own_path in (("direct", without), ("mindspeed", path)):
        out = directory / f"{name}.pt"
        arguments = ("--models", directory, "--out", out, "--case", json.dumps(asdict(case)))
        on_npu(HERE / "run_training.py", *arguments, nproc=case.num_ranks, env={"PYTHONPATH": own_path}).check()
        found[name] = Figures(**torch.load(out)[family, "float32"])
    return Steps(request.param, found["direct"], found["mindspeed"])


def test_steps_by_mindspeed_are_those_by_direct_calls(steps: Steps) -> None:
    own, expected = steps.mindspeed, steps.direct
    assert own.has_mindspeed and not expected.has_mindspeed
    assert len(own.losses) == len(own.norms) == NUM_STEPS
    assert own.losses == pytest.approx(expected.losses, rel=LIMIT)
    assert own.norms == pytest.approx(expected.norms, rel=LIMIT)
    assert own.losses[-1] < own.losses[0] - 0.5, "the model learns"
    for ours, theirs in zip(own.logprobs, expected.logprobs, strict=True):
        assert not theirs or largest_difference(ours, theirs) <= LIMIT
    for ours, theirs in zip(own.weights, expected.weights, strict=True):
        assert ours.keys() == theirs.keys()
        assert largest_difference(list(ours.values()), list(theirs.values())) <= LIMIT


def test_every_call_of_a_layer_went_through_mindspeed(steps: Steps) -> None:
    """On rank 0, in forward, backward and optimizer steps."""
    case = LAYOUTS[steps.layout]
    (family,) = case.families
    times = NUM_STEPS * steps.mindspeed.num_microbatches
    expected = {
        function: PER_LAYER[family][kernel] * NUM_LAYERS // case.pipeline * times
        for function, kernel in KERNELS.items()
        if kernel in PER_LAYER[family]
    }
    expected["fused_rmsnorm"] += times if case.pipeline == 1 else 0  # behind the last layer, which rank 0 then has
    own = of(steps.mindspeed.operators, "mindspeed")
    own.pop("adamw", None)
    assert own == expected
    assert not of(steps.direct.operators, "mindspeed")
    assert of(steps.mindspeed.operators, "npu") == of(steps.direct.operators, "npu")


@NEEDS_MINDSPEED
def test_the_steps_are_those_of_mindspeeds_adam(steps: Steps) -> None:
    """One call for each group of weights and step."""
    assert steps.mindspeed.operators["mindspeed::adamw"] >= NUM_STEPS
