"""The three matrix products of a linear layer, on a CPU by the faster of the two libraries that torch carries.

torch gives float32 products to MKL, whose kernels do not use the width of AVX-512 on processors of other makers than
Intel. oneDNN's do, and are about twice as fast on an AMD EPYC (``benchmarks/training/products.py``). torch itself calls
them in its compiler only, by the same operator as here.

Both add in float32, in different orders. None of these functions has a gradient of its own.

Letters: T rows (tokens), D inputs, F outputs of a layer.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

MIN_ROWS = 16  # for fewer, as in the last steps of sampling, the call itself takes most of the time
MIN_WEIGHT = 1 << 16  # elements; oneDNN makes a kernel for each new shape, which costs more than a small product
ROWS_AT_ONCE = 1024  # of a weight's gradient, a sum over rows: a longer one leaves the cache, and rounds more


@functools.cache
def is_onednn_faster() -> bool:
    """Whether this processor has AVX-512 and is of another maker than Intel."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkl.is_available():
        return False
    try:
        processor = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return torch.backends.mkldnn.is_available() and "GenuineIntel" not in processor


def _is_for_onednn(num_rows: int, weight_size: int, *operands: Tensor) -> bool:
    return (
        num_rows >= MIN_ROWS
        and weight_size >= MIN_WEIGHT
        and is_onednn_faster()
        and all(
            x.dtype is torch.float32 and x.device.type == "cpu" and (x.is_contiguous() or x.t().is_contiguous())
            for x in operands
        )
    )


def _onednn(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """``left @ right`` of two matrices, plus a vector."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(left, right.t(), bias, "none", [], "")
    return product


def outputs(x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None, *, out_TF: Tensor | None = None) -> Tensor:
    """``x @ weight.t() + bias``: [T, F].

    Args:
        out_TF: memory that the result takes where torch makes it; without a bias only.
    """
    if _is_for_onednn(len(x_TD), weight_FD.numel(), x_TD, weight_FD):
        return _onednn(x_TD, weight_FD.t(), bias_F)
    if bias_F is not None:
        return F.linear(x_TD, weight_FD, bias_F)
    return torch.mm(x_TD, weight_FD.t(), out=out_TF)


def input_gradient(grad_TF: Tensor, weight_FD: Tensor, total_TD: Tensor | None = None) -> Tensor:
    """``grad @ weight``: [T, D]; added to the total if one is given, which is returned."""
    if _is_for_onednn(len(grad_TF), weight_FD.numel(), grad_TF, weight_FD):
        product_TD = _onednn(grad_TF, weight_FD)
        return product_TD if total_TD is None else total_TD.add_(product_TD)
    return _product(grad_TF, weight_FD, total_TD)


def weight_gradient(grad_TF: Tensor, x_TD: Tensor, total_FD: Tensor | None = None) -> Tensor:
    """``grad.t() @ x``: [F, D]; added to the total if one is given, which is returned."""
    if not _is_for_onednn(len(x_TD), grad_TF.shape[1] * x_TD.shape[1], grad_TF, x_TD):
        return _product(grad_TF.t(), x_TD, total_FD)
    for grad, x in zip(grad_TF.split(ROWS_AT_ONCE), x_TD.split(ROWS_AT_ONCE), strict=True):
        product_FD = _onednn(grad.t(), x)
        total_FD = product_FD if total_FD is None else total_FD.add_(product_FD)
    assert total_FD is not None
    return total_FD


def _product(left: Tensor, right: Tensor, total: Tensor | None) -> Tensor:
    """``total + left @ right`` by torch's own choice, in one operation where the types allow it."""
    if total is None:
        return left @ right
    if total.dtype == left.dtype:
        return total.addmm_(left, right)
    return total.add_(left @ right)
