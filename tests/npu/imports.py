"""Prepares modules of others for pretended devices as soon as they are imported, in whatever process does it.

``site/sitecustomize.py`` installs this at the start of a process; nothing is imported earlier than the program asks
for it, so that the order in which it chooses its platform and environment stays its own.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

# Module -> the function of ``tests.npu`` that is called with it once it is imported.
AFTER = {
    "torch_npu": "emulation.after_torch_npu",
    "torch_npu.op_plugin.atb._atb_ops": "rollout.after_atb",
    "vllm_ascend.vllm_ascend_C": "rollout.after_extension",
    "vllm.model_executor.models.registry": "rollout.after_registry",
    "vllm.v1.worker.block_table": "rollout.after_block_table",
    "mega_rl.platform.contract.versions": "rollout.after_versions",
    "mindspeed.core.transformer.flash_attention.flash_attention.adaptor": "mindspeed_operators.after_attention",
    "mindspeed.core.fusions.fused_rms_norm": "mindspeed_operators.after_rms_norm",
    "mindspeed.core.fusions.fused_bias_swiglu": "mindspeed_operators.after_swiglu",
    "mindspeed.te.pytorch.permutation": "mindspeed_operators.after_permutation",
    "mindspeed.core.optimizer.adamw": "mindspeed_operators.after_adamw",
    "mindspeed.op_builder.builder": "mindspeed_operators.after_builder",
}
# What only an NPU compiles for: kernels of triton-ascend, and graphs. It can be imported, and not called.
UNCOMPILED = ("mindspeed.ops.triton.", "torch_npu.dynamo.torchair", "torchair.")


class UncompiledKernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands for MindSpeed's own Triton kernels: they can be imported, and not called."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith(UNCOMPILED) else None

    def exec_module(self, module: ModuleType) -> None:
        def missing(name: str) -> Callable[..., Any]:
            if name.startswith("__"):
                raise AttributeError(name)
            return partial(_refuse, f"{module.__name__}.{name}")

        module.__getattr__ = missing  # type: ignore[method-assign]


def _refuse(name: str, *args: Any, **options: Any) -> Any:
    """What is called at import all the same: decorators, and questions about the chip."""
    if name.rpartition(".")[2].startswith("register_"):
        return lambda function: function
    if len(args) == 1 and callable(args[0]) and not options:
        return args[0]
    if name.rpartition(".")[2].startswith("is_"):
        return False
    raise NotImplementedError(f"{name} is a Triton kernel, which pretended devices do not run")


class Preparation(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self._looking_for: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in AFTER or name in self._looking_for:
            return None
        self._looking_for.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking_for.remove(name)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(_execute, AFTER[name], spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _execute(after: str, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    execute(module)
    home, _, function = after.partition(".")
    getattr(importlib.import_module(f"tests.npu.{home}"), function)(module)


def install() -> None:
    """Once per process, before any of these modules is imported."""
    sys.meta_path[:0] = [Preparation(), UncompiledKernels()]
