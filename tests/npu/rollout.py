"""vLLM-Ascend on pretended devices: what its wheel finds in the place of CANN, NNAL and Triton.

Each function is called by ``imports.py`` when the module of its name has been imported. The Python of vLLM 0.23 and of
vllm-ascend 0.23, and the compiled extension of vllm-ascend, are those of the wheels; the kernels are the stand-ins of
``rollout_operators.py``.
"""

from __future__ import annotations

import gc
from functools import partial
from types import ModuleType

import torch

from tests.npu import kernels
from tests.npu.rollout_operators import ROLLOUT, SlotMapping


def after_atb(module: ModuleType) -> None:
    """torch_npu's operators of NNAL: their library is loaded, with functions that are not there, and replaced."""
    register = module._register_atb_extensions

    def register_and_replace() -> None:
        register()
        kernels.replace("atb", ROLLOUT)

    module._register_atb_extensions = register_and_replace


def after_extension(module: ModuleType) -> None:
    """vllm-ascend's compiled operators; its allocator for sleeping stays, over the pretended memory of a device.

    What was imported by now is kept out of the collections of garbage, eight of which each engine asks for as it
    starts: half a second each.
    """
    kernels.replace("_C_ascend", ROLLOUT)
    gc.freeze()


def after_registry(module: ModuleType) -> None:
    """vLLM looks at a model's class in a process of its own: here in the same one, which saves its imports."""
    module._run_in_subprocess = lambda function: function()


def after_block_table(module: ModuleType) -> None:
    """There is no Triton for a CPU."""
    module._compute_slot_mapping_kernel = SlotMapping()


def after_versions(module: ModuleType) -> None:
    """A run refuses vllm-ascend 0.23 beside torch 2.13, rightly: its extension is given the names of torch 2.10 here
    (``rollout_stubs.py``), so that the two load together.
    """
    required = module._required_by
    module._required_by = lambda distribution, name: (
        None if (distribution, name) == ("vllm-ascend", "torch") else required(distribution, name)
    )


def prepare_torch() -> None:
    """With torch_npu: groups over HCCL get gloo for the host's memory."""
    distributed = torch.distributed
    grouped = partial(_with_gloo, distributed.new_group)
    distributed.new_group = distributed.distributed_c10d.new_group = grouped


def _with_gloo(new_group: object, *args: object, backend: str | None = None, **kwargs: object) -> object:
    return new_group(*args, backend="cpu:gloo,npu:hccl" if backend == "hccl" else backend, **kwargs)  # type: ignore[operator]
