"""The matrix products of linear layers on a CPU, by both libraries."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mega_rl.platform.operators import products

WIDE, NARROW = (192, 384), (24, 40)  # D, F: above and below ``MIN_WEIGHT``


@pytest.fixture(params=["onednn", "torch"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Products by this library, whatever processor the tests run on."""
    monkeypatch.setattr(products, "is_onednn_faster", lambda: request.param == "onednn")
    return str(request.param)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_equals(actual: Tensor, exact: Tensor) -> None:
    """Sums of standard normal products: the error grows with the root of their number, here at most 2,100."""
    torch.testing.assert_close(actual.double(), exact, atol=3e-4, rtol=1e-5)


@pytest.mark.parametrize(("D", "F"), [WIDE, NARROW])
@pytest.mark.parametrize("T", [1, 20, 2100])
def test_products_against_float64(library: str, T: int, D: int, F: int) -> None:
    x_TD, weight_FD, grad_TF = drawn(T, D, seed=0), drawn(F, D, seed=1), drawn(T, F, seed=2)
    x, weight, grad = x_TD.double(), weight_FD.double(), grad_TF.double()
    assert_equals(products.outputs(x_TD, weight_FD), x @ weight.t())
    assert_equals(products.outputs(x_TD, weight_FD, out_TF=torch.empty(T, F)), x @ weight.t())
    bias_F = drawn(F, seed=5)
    assert_equals(products.outputs(x_TD, weight_FD, bias_F), x @ weight.t() + bias_F.double())
    assert_equals(products.input_gradient(grad_TF, weight_FD), grad @ weight)
    assert_equals(products.weight_gradient(grad_TF, x_TD), grad.t() @ x)
    for given, total, expected in (
        (products.input_gradient, drawn(T, D, seed=3), grad @ weight),
        (products.weight_gradient, drawn(F, D, seed=4), grad.t() @ x),
    ):
        before, operands = total.double(), (grad_TF, weight_FD if given is products.input_gradient else x_TD)
        assert given(*operands, total) is total
        assert_equals(total, before + expected)


def test_views_of_other_strides(library: str) -> None:
    """Transposed operands, and every second row."""
    D, F = WIDE
    x_TD, weight_FD = drawn(D, 60, seed=0).t(), drawn(2 * F, D, seed=1)[::2]
    assert_equals(products.outputs(x_TD, weight_FD), x_TD.double() @ weight_FD.double().t())
    grad_TF = drawn(F, 60, seed=2).t()
    assert_equals(products.input_gradient(grad_TF, weight_FD), grad_TF.double() @ weight_FD.double())
    assert_equals(products.weight_gradient(grad_TF, x_TD), grad_TF.double().t() @ x_TD.double())


def test_onednn_computes_large_float32_products_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "is_onednn_faster", lambda: True)
    calls: list[tuple[int, ...]] = []

    def recorded(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
        calls.append(tuple(left.shape))
        return left @ right

    monkeypatch.setattr(products, "_onednn", recorded)
    D, F = WIDE
    weight_FD = drawn(F, D, seed=0)
    products.outputs(drawn(15, D, seed=1), weight_FD)
    products.outputs(drawn(64, D, seed=1).double(), weight_FD.double())
    products.outputs(drawn(64, D, seed=1).bfloat16(), weight_FD.bfloat16())
    products.outputs(drawn(64, NARROW[0], seed=1), drawn(NARROW[1], NARROW[0], seed=1))
    assert calls == []
    products.outputs(drawn(16, D, seed=1), weight_FD)
    products.weight_gradient(drawn(2100, F, seed=1), drawn(2100, D, seed=2))
    assert calls == [(16, D), (F, 1024), (F, 1024), (F, 52)]
