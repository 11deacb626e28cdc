"""The operators of Ascend on device npu: torch_npu's own dispatch and gradients, over stand-ins of its kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import pytest
import torch

from mega_rl import platform
from tests.contract.npu_schemas import OperatorSchema, recorded_schemas
from tests.npu.stand_ins import COMPOSED, STAND_INS
from tests.operator_cases import OperatorCase, compare, operator_cases, outcome

ALL = [(dtype, case) for dtype in (torch.float32, torch.bfloat16) for case in operator_cases(dtype)]
IDS = [f"{case.name}-{str(dtype).removeprefix('torch.')}" for dtype, case in ALL]


@pytest.fixture(scope="module", autouse=True)
def on_npu() -> None:
    assert platform.select("npu").name == "npu"


@pytest.mark.parametrize(("dtype", "case"), ALL, ids=IDS)
def test_npu_equals_the_reference(operator_counts: Counter[str], dtype: torch.dtype, case: OperatorCase) -> None:
    largest = compare(case, dtype, "npu")
    ran = {name.removeprefix("npu::"): n for name, n in operator_counts.items() if name.startswith("npu::")}
    print(f"{case.name} {dtype}: largest difference {largest:.1e}, operators {ran}")
    # the call of ``unpermute`` needs an order, which ``permute`` gives
    extra = {"npu_moe_token_permute_with_routing_map"} if case.name == "unpermute" else set()
    assert ran.keys() == set(case.npu_operators) | extra


def test_calls_are_as_many_as_needed(
    operator_counts: Counter[str], report_operators: Callable[[str, Mapping[str, int]], None]
) -> None:
    for dtype, case in ALL:
        if dtype == torch.bfloat16:
            outcome(case.own, case, "npu")
    own = {name.removeprefix("npu::"): count for name, count in operator_counts.items() if name.startswith("npu::")}
    assert own == {
        "npu_fusion_attention": 4,
        "npu_fusion_attention_grad": 4,
        "npu_rms_norm": 2,
        "npu_add_rms_norm": 1,
        "npu_rms_norm_backward": 3,
        "npu_swiglu": 3,  # with weights once more for their gradient
        "npu_swiglu_backward": 2,
        "npu_rotary_mul": 1,
        "npu_rotary_mul_backward": 1,
        "npu_grouped_matmul": 6,  # two products, each with two gradients; none where there are no rows
        "npu_moe_token_permute_with_routing_map": 2,
        "npu_moe_token_permute_with_routing_map_grad": 1,
        "_npu_moe_token_unpermute_with_routing_map": 1,
        "npu_moe_token_unpermute_with_routing_map_grad": 1,
    }
    assert {f"npu::{name}" for name in own} == set(STAND_INS)
    report_operators("the operators of platform.operators, one by one", operator_counts)


def test_a_long_pack_is_split(operator_counts: Counter[str]) -> None:
    (case,) = (case for _, case in ALL if case.name == "varlen_more_than_a_call")
    outcome(case.own, case, "npu")
    assert operator_counts["npu::npu_fusion_attention"] == operator_counts["npu::npu_fusion_attention_grad"] == 2


def test_the_dispatcher_knows_the_schemas_of_the_record() -> None:
    import torch_npu

    recorded = recorded_schemas(torch_npu.__version__)
    assert recorded.keys() == {name.removeprefix("npu::") for name in STAND_INS | COMPOSED}
    for name, expected in recorded.items():
        assert isinstance(expected, OperatorSchema)
        own = torch._C.parse_schema(f"npu::{expected.schema}")
        assert own == getattr(torch.ops.npu, name).default._schema, name
        assert hasattr(torch_npu, name) == expected.is_function
