"""The operators of the CPU, and those of Ascend over stand-ins of its kernels, against the references; refusals."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mega_rl import platform
from mega_rl.errors import InputError
from mega_rl.platform import cuda, dispatch as operators
from mega_rl.platform.cuda import FlashOperators
from mega_rl.platform.operators import npu_kernels as npu_operators, reference
from mega_rl.platform.operators.npu_kernels import AscendOperators
from mega_rl.platform.operators.torch_kernels import TorchOperators
from tests.npu.recorder import RecordingTorchNpu
from tests.operator_cases import OperatorCase, Tensors, compare, operator_cases, outcome

ALL = [(dtype, case) for dtype in (torch.float32, torch.bfloat16) for case in operator_cases(dtype)]
IDS = [f"{case.name}-{str(dtype).removeprefix('torch.')}" for dtype, case in ALL]
OPERATORS = [name for name in vars(TorchOperators) if not name.startswith("_")]


@pytest.fixture
def on_ascend(monkeypatch: pytest.MonkeyPatch) -> RecordingTorchNpu:
    recorder = RecordingTorchNpu()
    monkeypatch.setattr(npu_operators.importlib, "import_module", lambda name: {"torch_npu": recorder}[name])
    monkeypatch.setattr(platform, "current", lambda: types.SimpleNamespace(operators=AscendOperators()))
    return recorder


@pytest.mark.parametrize(("dtype", "case"), ALL, ids=IDS)
def test_cpu_equals_the_reference(dtype: torch.dtype, case: OperatorCase) -> None:
    compare(case, dtype)


@pytest.mark.parametrize(("dtype", "case"), ALL, ids=IDS)
def test_ascend_equals_the_reference(on_ascend: RecordingTorchNpu, dtype: torch.dtype, case: OperatorCase) -> None:
    compare(case, dtype)
    own = [name for name in case.npu_operators if not name.endswith(("_grad", "_backward"))]
    assert {call.name for call in on_ascend.calls} >= {name.removeprefix("_") for name in own}


def test_every_operator_has_a_case_and_a_kernel_of_ascend() -> None:
    names = {name.rsplit("_attention")[0] for name in OPERATORS}
    cases = " ".join(case.name for _, case in ALL)
    assert all(name.removesuffix("_tokens") in cases for name in names), names
    assert {name for name in vars(AscendOperators) if not name.startswith("_")} == set(OPERATORS)
    assert all(callable(getattr(operators, name)) for name in OPERATORS), "one public name each"


@pytest.mark.parametrize(("dtype", "case"), ALL, ids=IDS)
def test_the_result_has_the_dtype_of_the_input(dtype: torch.dtype, case: OperatorCase) -> None:
    with torch.no_grad():
        assert case.own(case.inputs).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_references_are_torchs_own_operators(dtype: torch.dtype) -> None:
    """They are written out here, so they are held against implementations that are not ours."""
    cases = {case.name: case.inputs for case in operator_cases(dtype)}
    close = {"atol": 1e-5, "rtol": 1e-5}
    x = {name: x.float() for name, x in cases["rms_norm"].items()}
    theirs = F.rms_norm(x["x"], x["weight"].shape, x["weight"], 1e-5)
    torch.testing.assert_close(reference.rms_norm(x["x"], x["weight"], 1e-5), theirs, **close)
    x = cases["varlen_causal"]
    q, k, v = (x[name][:9].float() for name in "qkv")
    mask = (torch.arange(9)[:, None] + torch.arange(9)) % 3 != 0
    heads_first = (x.transpose(0, 1) for x in (q, k, v))
    theirs = F.scaled_dot_product_attention(*heads_first, mask, scale=0.3, enable_gqa=True).transpose(0, 1)
    ours = reference.attention(q, k, v, softmax_scale=0.3, is_visible_QP=mask)
    torch.testing.assert_close(ours, theirs, **close)


def test_the_weighted_gradient_is_float32_to_its_last_step() -> None:
    """Experts' outputs are weighted in float32 whatever the model computes in."""
    (case,) = (case for case in operator_cases(torch.bfloat16) if case.name == "swiglu_weighted")
    own = outcome(case.own, case)
    expected = outcome(case.expected, case)
    rounded = {name: g.to(case.inputs[name].dtype).double() for name, g in expected.gradients.items()}
    torch.testing.assert_close(own.gradients["x"], rounded["x"], atol=1e-3, rtol=8e-3)  # one rounding of 8 bits


def test_experts_of_a_list_are_given_one_by_one_where_the_operator_takes_it(on_ascend: RecordingTorchNpu) -> None:
    """Stacking them would copy every weight at every call."""

    def shapes(dtype: torch.dtype, num_experts: int) -> list[list[list[int]]]:
        on_ascend.calls.clear()
        weights = [torch.zeros(3, 2, dtype=dtype) for _ in range(num_experts)]
        operators.grouped_matmul(torch.zeros(num_experts, 2, dtype=dtype), weights, torch.arange(1, num_experts + 1))
        return [[list(weight.shape) for weight in call.args[1]] for call in on_ascend.calls]

    assert shapes(torch.bfloat16, 128) == [[[2, 3]] * 128]
    assert shapes(torch.bfloat16, 129) == [[[129, 2, 3]]]
    assert shapes(torch.float32, 4) == [[[4, 2, 3]]], "float32 is taken as single tensors only"


class SharedPlaces(TorchDispatchMode):
    """Refuses sums into places that several addends share: on CUDA their order varies from run to run."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.rstrip("_")
        is_sum = name.startswith("scatter") or ("index_put" in name and len(args) > 3 and args[3])
        assert not is_sum, name
        if name == "index_add":
            assert len(args[2].unique()) == len(args[2]), "rows are added to one place in any order"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("counts", [(4, 0, 7, 1), (0, 0, 12, 0), (12, 0, 0, 0)])
def test_experts_are_one_product_on_cuda(monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...]) -> None:
    """torch's grouped product has a kernel for CPUs too; experts without rows get a gradient of zero."""
    calls = []
    grouped_mm = F.grouped_mm
    monkeypatch.setattr(cuda.F, "grouped_mm", lambda *args, **kwargs: calls.append(1) or grouped_mm(*args, **kwargs))
    generator = torch.Generator().manual_seed(0)
    inputs = {"x": torch.randn(12, 16, generator=generator).bfloat16(), "ends": torch.tensor(counts).cumsum(0)}
    inputs |= {f"weight{i}": torch.randn(8, 16, generator=generator).bfloat16() for i in range(4)}

    def product(x: Tensors) -> Tensor:
        return FlashOperators().grouped_matmul(x["x"], [x[f"weight{i}"] for i in range(4)], x["ends"])

    def expected(x: Tensors) -> Tensor:
        return reference.grouped_matmul(x["x"], [x[f"weight{i}"] for i in range(4)], counts)

    compare(OperatorCase("grouped_matmul", inputs, product, expected, ()), torch.bfloat16)
    assert len(calls) == 3, "one product, with two gradients"
    odd = [torch.ones(3, 16, dtype=torch.bfloat16)] * 4
    assert FlashOperators().grouped_matmul(inputs["x"], odd, inputs["ends"]).shape == (12, 3) and len(calls) == 3


def test_tokens_are_summed_in_one_order() -> None:
    """Forward and backward pass, so that the same batch gives the same bits on CUDA too."""
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(64, 8, generator=generator).requires_grad_()
    chosen_TK = torch.rand(64, 16, generator=generator).topk(4).indices
    is_routed_TE = torch.zeros(64, 16, dtype=torch.bool).scatter(1, chosen_TK, True)
    with SharedPlaces():
        rows_ND, order_N = operators.permute_tokens(x_TD, is_routed_TE, 4)
        summed_TD = operators.unpermute_tokens(rows_ND, order_N, is_routed_TE)
        summed_TD.backward(torch.ones_like(x_TD))
    assert (
        torch.equal(summed_TD, 4 * x_TD) and x_TD.grad is not None and torch.equal(x_TD.grad, torch.full_like(x_TD, 4))
    )


def test_frozen_experts_cost_no_gradient(on_ascend: RecordingTorchNpu) -> None:
    x, weights = torch.ones(3, 2, requires_grad=True), [torch.ones(4, 2), torch.ones(4, 2)]
    operators.grouped_matmul(x, weights, torch.tensor([1, 3])).sum().backward()
    assert len(on_ascend.calls) == 2 and torch.equal(x.grad, torch.full((3, 2), 4.0))


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


GOOD: dict[str, dict[str, Any]] = {
    "rms_norm": {"x": zeros(3, 8), "weight_D": zeros(8), "epsilon": 1e-6},
    "add_rms_norm": {"x": zeros(3, 8), "residual": zeros(3, 8), "weight_D": zeros(8), "epsilon": 1e-6},
    "swiglu": {"gate_and_up": zeros(3, 8), "weights_T": zeros(3)},
    "rotary": {"x_THD": zeros(3, 2, 8), "cos_TD": zeros(3, 8), "sin_TD": zeros(3, 8)},
    "grouped_matmul": {"x_ND": zeros(3, 8), "weights_FD": [zeros(4, 8), zeros(4, 8)], "ends_E": torch.tensor([1, 3])},
    "permute_tokens": {
        "x_TD": zeros(2, 8),
        "is_routed_TE": torch.tensor([[True, False, True], [False, True, True]]),
        "experts_per_token": 2,
    },
    "unpermute_tokens": {
        "rows_ND": zeros(4, 8),
        "order_N": torch.tensor([0, 1, 1, 0]),
        "is_routed_TE": torch.ones(2, 3, dtype=torch.bool),
    },
}
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("rms_norm", {"weight_D": zeros(7)}, r"a weight \[D\]"),
    ("rms_norm", {"weight_D": zeros(8, dtype=torch.bfloat16)}, "of the same dtype"),
    ("rms_norm", {"epsilon": 0.0}, "epsilon above 0"),
    ("add_rms_norm", {"weight_D": zeros(7)}, r"add_rms_norm takes .* a weight \[D\]"),
    ("add_rms_norm", {"epsilon": 0.0}, "add_rms_norm needs an epsilon above 0"),
    ("add_rms_norm", {"residual": zeros(2, 8)}, "two summands of one shape"),
    ("add_rms_norm", {"residual": zeros(3, 8, dtype=torch.bfloat16)}, "two summands of one shape and dtype"),
    ("swiglu", {"gate_and_up": zeros(3, 7)}, "as wide an input"),
    ("swiglu", {"weights_T": zeros(2)}, "one weight for each row"),
    ("rotary", {"x_THD": zeros(1, 3, 2, 8)}, r"takes \[tokens, heads"),
    ("rotary", {"x_THD": zeros(3, 2, 7)}, "an even width"),
    ("rotary", {"cos_TD": zeros(3, 4)}, r"tables \[3, 8\]"),
    ("rotary", {"sin_TD": zeros(3, 8, dtype=torch.bfloat16)}, r"tables \[3, 8\] like x"),
    ("rotary", {"cos_TD": zeros(3, 8).requires_grad_()}, "no gradient for its angles"),
    ("grouped_matmul", {"ends_E": torch.tensor([1, 2])}, "from 0 or more to 3, the number of rows"),
    ("grouped_matmul", {"ends_E": torch.tensor([4, 3])}, "must rise"),
    ("grouped_matmul", {"ends_E": torch.tensor([3])}, "one end for each of 2 weights"),
    ("grouped_matmul", {"ends_E": torch.tensor([1, 3], dtype=torch.int32)}, "in int64"),
    ("grouped_matmul", {"weights_FD": [zeros(4, 8), zeros(3, 8)]}, "one shape and dtype"),
    ("grouped_matmul", {"weights_FD": [zeros(8, 4), zeros(8, 4)]}, "weights .F, D. of its dtype"),
    ("permute_tokens", {"experts_per_token": 1}, "must hold 1 experts"),
    ("permute_tokens", {"experts_per_token": 4}, "4 experts for every token, of 3"),
    ("permute_tokens", {"is_routed_TE": zeros(2, 3)}, "their routing bool"),
    ("permute_tokens", {"x_TD": zeros(3, 8)}, "one row of the routing map for each token"),
    ("unpermute_tokens", {"order_N": torch.arange(3)}, r"an order \[N\]"),
    ("unpermute_tokens", {"is_routed_TE": torch.ones(3, 3).bool()}, "no whole number"),
]


@pytest.mark.parametrize("name", GOOD)
def test_right_arguments_are_taken(name: str) -> None:
    getattr(operators, name)(**GOOD[name])


@pytest.mark.parametrize(("name", "wrong", "sentence"), WRONG, ids=[f"{n}-{next(iter(w))}-{s}" for n, w, s in WRONG])
def test_wrong_arguments_are_refused(name: str, wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        getattr(operators, name)(**(GOOD[name] | wrong))


def _attend(num_heads: int, width: int, value_width: int) -> None:
    q, v, one = zeros(1, num_heads, width), zeros(1, num_heads, value_width), torch.tensor([0, 1], dtype=torch.int32)
    operators.varlen_attention(q, q, v, one, one, 1, 1, softmax_scale=1.0, causal=True)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: _attend(1, 769, 8), "769 wide"),
        (lambda: _attend(1, 8, 16), "values are 16 wide"),
        (lambda: _attend(257, 8, 8), "at most 256 heads"),
        (lambda: operators.rotary(zeros(1, 1, 896), zeros(1, 896), zeros(1, 896)), "width 894"),
        (lambda: operators.rotary(zeros(1, 1000, 2), zeros(1, 2), zeros(1, 2)), "at most 999 heads"),
    ],
)
def test_limits_of_ascend_are_refused_there(
    on_ascend: RecordingTorchNpu, call: Callable[[], None], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        call()
    assert on_ascend.calls == []
