"""In the place of torch_npu where it is not installed: the stand-ins under their operators' names, every call noted.

Autograd goes through the stand-ins' own torch operators, but only where the real operator has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.npu.stand_ins import COMPOSED, STAND_INS

OPERATORS = STAND_INS | COMPOSED
WITHOUT_GRADIENT = {"npu_grouped_matmul", "npu_add_rms_norm"}


@dataclass(frozen=True)
class Call:
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class RecordingTorchNpu:
    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if f"npu::{name}" not in OPERATORS:
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(Call(name, args, kwargs))
            with torch.set_grad_enabled(torch.is_grad_enabled() and name not in WITHOUT_GRADIENT):
                return OPERATORS[f"npu::{name}"](*args, **kwargs)

        return call
