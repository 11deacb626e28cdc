"""Norms, SwiGLU and rotary embedding fused: by ``torch.compile`` of their formulas, or the Liger library's kernels.

Compiled ones are ``reference``'s formulas, computed in float32 within a kernel and rounded once. Liger
(https://github.com/linkedin/Liger-Kernel) has kernels in Triton for the norms and SwiGLU; its rotary embedding writes
into queries and keys together, so that one stays compiled.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mega_rl.config.schema.device import Kernels, Layers
from mega_rl.errors import InputError
from mega_rl.platform.operators import reference
from mega_rl.platform.operators.torch_kernels import TorchOperators


def _rms_norm(x: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    return reference.rms_norm(x, weight_D, epsilon).to(x.dtype)


def _add_rms_norm(x: Tensor, residual: Tensor, weight_D: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    normed, total = reference.add_rms_norm(x, residual, weight_D, epsilon)
    return normed.to(x.dtype), total.to(x.dtype)


def _swiglu(gate_and_up: Tensor) -> Tensor:
    return reference.swiglu(gate_and_up).to(gate_and_up.dtype)


def _rotary(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    return reference.rotary(x_THD, cos_TD, sin_TD).to(x_THD.dtype)


@functools.cache
def _compiled(formula: Callable[..., Any]) -> Callable[..., Any]:
    """One kernel for every number of rows; widths are compiled apart, a few in a model."""
    compiled: Callable[..., Any] = torch.compile(formula, dynamic=True)
    return compiled


def _rows(x: Tensor) -> Tensor:
    """[rows, width], of which only the number of rows is left open to the compiler."""
    rows = x.flatten(0, -2)
    torch._dynamo.mark_static(rows, 1)
    return rows


@functools.cache
def _liger(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name)


# What a value needs: its module, the package that has it, and how that is installed.
PACKAGES = {
    "compiled": ("triton", "triton", "pip install triton"),
    "liger": ("liger_kernel", "liger-kernel", "pip install 'liger-kernel>=0.6.1'"),
    "transformer_engine": (
        "transformer_engine",
        "transformer-engine[pytorch]",
        "pip install --no-build-isolation 'transformer-engine[pytorch]'",
    ),
}
YOUNGEST = {"liger": "ops/fused_add_rms_norm.py"}  # of what is called, the file that older releases lack


def check_kernels(kind: Kernels, platform: str) -> None:
    """InputError if ``platform.kernels`` asks for what this platform or its installation does not have."""
    _check("platform.kernels", kind, "torch", platform)


def check_layers(kind: Layers, platform: str) -> None:
    """InputError if ``platform.layers`` asks for what this platform or its installation does not have."""
    _check("platform.layers", kind, "local", platform)


def _check(key: str, value: str, default: str, platform: str) -> None:
    if value == default:
        return
    if platform != "cuda":
        raise InputError(f"{key} is {value!r}, which is for CUDA; this is {platform}: set it to {default}")
    module, package, install = PACKAGES[value]
    spec = importlib.util.find_spec(module)
    if spec is None:
        raise InputError(f"{key} is {value!r}, but {package} is not installed: {install}, or set the key to {default}")
    file, folders = YOUNGEST.get(value), spec.submodule_search_locations or ()
    if file is not None and not any(Path(folder, file).is_file() for folder in folders):  # importing it needs a device
        sentence = f"{key} is {value!r}, but the installed {package} is too old, it lacks {module}/{file}"
        raise InputError(f"{sentence}: {install}, or set the key to {default}")


def fused(operators: TorchOperators, kind: Kernels) -> TorchOperators:
    """The operators of a platform with fused ones in the place of four.

    Args:
        kind: what ``check_kernels`` has not refused.
    """
    if kind == "torch":
        return operators
    own = type(operators)

    class Fused(own):  # type: ignore[misc, valid-type]
        def rms_norm(self, x: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
            if kind == "liger":
                # without in_place: the gradient that comes in is the residual's too
                function = _liger("rms_norm", "LigerRMSNormFunction")
                result: Tensor = function.apply(x, weight_D, epsilon, 0.0, "gemma", False)
                return result
            rows: Tensor = _compiled(_rms_norm)(_rows(x), weight_D, epsilon)
            return rows.view(x.shape)

        def add_rms_norm(self, x: Tensor, residual: Tensor, weight_D: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
            if kind == "liger":
                function = _liger("fused_add_rms_norm", "LigerFusedAddRMSNormFunction")
                normed, total = function.apply(x, residual, weight_D, epsilon, 0.0, "gemma", False)
                return normed, total
            normed, total = _compiled(_add_rms_norm)(_rows(x), _rows(residual), weight_D, epsilon)
            return normed.view(x.shape), total.view(x.shape)

        def swiglu(self, gate_and_up: Tensor) -> Tensor:
            if kind == "liger":
                result: Tensor = _liger("swiglu", "LigerSiLUMulFunction").apply(*gate_and_up.chunk(2, -1))
                return result
            product: Tensor = _compiled(_swiglu)(_rows(gate_and_up))
            return product.view(*gate_and_up.shape[:-1], -1)

        def rotary(self, x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
            rotated: Tensor = _compiled(_rotary)(x_THD, cos_TD, sin_TD)
            return rotated

    return Fused()
