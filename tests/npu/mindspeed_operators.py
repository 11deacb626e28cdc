"""MindSpeed on pretended devices: its functions are counted, and what it compiles for CANN has stand-ins.

Called by ``imports.py`` for the modules of MindSpeed, real or pretended (``tests/pretended/mindspeed.py``). A count
stands in ``kernels.counts`` under the namespace ``mindspeed``. The stand-ins are written from MindSpeed's pages of
these functions, and call the operator of torch_npu that computes the same.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor

from tests.npu.kernels import counts


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        counts[f"mindspeed::{name}"] += 1
        return function(*args, **kwargs)

    return call


def _count(home: Any, name: str) -> None:
    setattr(home, name, _counted(name, getattr(home, name)))


def _count_forward(function: Any) -> None:
    function.forward = staticmethod(_counted(function.__name__, function.forward))


def after_attention(module: ModuleType) -> None:
    _count(module, "dot_product_attention_forward_impl")


def after_rms_norm(module: ModuleType) -> None:
    _count(module.RMSNorm, "fused_rmsnorm")


def after_swiglu(module: ModuleType) -> None:
    _count(module, "fused_swiglu")


def after_permutation(module: ModuleType) -> None:
    _count_forward(module.MoePermuteMaskMap)
    _count_forward(module.MoeUnpermuteMaskMap)


def after_adamw(module: ModuleType) -> None:
    _count(module, "adamw")


def _npu_rotary_position_embedding(x: Tensor, cos: Tensor, sin: Tensor, mode: int = 0) -> Tensor:
    assert x.dim() == cos.dim() == sin.dim() == 4 and x.shape[-1] % 2 == 0 and mode == 0 and x.is_contiguous()
    torch_npu = importlib.import_module("torch_npu")
    rotated: Tensor = torch_npu.npu_rotary_mul(x, cos, sin, rotary_mode="half")
    return rotated


def _npu_gmm(
    x: list[Tensor], weight: list[Tensor], bias: list[Tensor], group_list: Tensor, group_type: int, group_list_type: int
) -> list[Tensor]:
    assert len(group_list) > 1 and len(x) == 1 and not bias and group_type in (0, 2) and group_list_type == 0
    torch_npu = importlib.import_module("torch_npu")
    products: list[Tensor] = torch_npu.npu_grouped_matmul(
        x, weight, group_list=group_list, split_item=3, group_type=group_type, group_list_type=0
    )
    return products


COMPILED = {
    "npu_rotary_position_embedding": ("npu_rotary_position_embedding", _npu_rotary_position_embedding),
    "grouped_matmul": ("npu_gmm", _npu_gmm),
}


def after_builder(module: ModuleType) -> None:
    """What is compiled: an extension under a builder's name."""

    def load(self: Any, verbose: bool = True) -> Any:
        if self.name not in COMPILED:
            raise NotImplementedError(f"{self.name} has no stand-in")
        name, function = COMPILED[self.name]
        return SimpleNamespace(**{name: _counted(name, function)})

    module.MindSpeedOpBuilder.load = load
