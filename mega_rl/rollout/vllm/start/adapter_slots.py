"""vLLM's slots for adapters, written like weights.

The adapter is registered once, from memory and all zero. From then on its slots are live tensors that a sync writes in
place: no file, and nothing of vLLM is patched. ``from_lora_tensors``, ``add_adapter``, ``activate_adapter`` and the
layout of the slots are the same in vLLM 0.23 and 0.32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mega_rl.bridge.mapping.vllm_slots import Slots

ADAPTER_ID, ADAPTER_NAME = 1, "policy"
IN_MEMORY = "in-memory"  # vLLM asks for a path, and does not open that of an adapter that is registered
SHOWN = "mega_rl_slots"  # of a layer: its projections with an adapter, and the adapter's rank
BASE = ".base_layer"  # in the names of what a layer with slots wraps


def open_slots(model_runner: Any, slots: Slots) -> Any:
    """Register the adapter in this worker; returns the ``LoRARequest`` that requests carry."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.request import LoRARequest

    config = {"r": slots.rank, "lora_alpha": slots.rank, "target_modules": [], "bias": "none"}  # a scale of one
    manager = model_runner.lora_manager._adapter_manager
    dtype = manager.lora_config.lora_dtype
    zeros = {name: torch.zeros(size, dtype=dtype) for name, size in slots.tensors.items()}
    helper = PEFTHelper.from_dict(config)
    manager.add_adapter(LoRAModel.from_lora_tensors(ADAPTER_ID, zeros, helper, device="cpu", dtype=dtype))
    manager.activate_adapter(ADAPTER_ID)
    shown = set()
    for name, layer in model_runner.get_model().named_modules():
        own = [index for index in range(_num_slots(layer)) if f"{name}.lora_A.{index}" in slots.names]
        shown |= {f"{name}.lora_{part}.{index}" for index in own for part in "AB"}
        if own:
            setattr(layer, SHOWN, (own, slots.rank))
    missing = sorted(slots.names - shown)
    assert not missing, f"the engine has no slot {missing[0]}"
    return LoRARequest(lora_name=ADAPTER_NAME, lora_int_id=ADAPTER_ID, lora_path=IN_MEMORY)


def live_slots(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The slots of a model for which ``open_slots`` was called, by the names of ``slot_series``: views to write to."""
    for name, layer in model.named_modules():
        indices, rank = getattr(layer, SHOWN, ((), 0))
        for index in indices:
            yield f"{name}.lora_A.{index}", layer.lora_a_stacked[index][0, 0, :rank]
            yield f"{name}.lora_B.{index}", layer.lora_b_stacked[index][0, 0, :, :rank]


def _num_slots(layer: Any) -> int:
    stacked = getattr(layer, "lora_a_stacked", ())
    return len(stacked) if isinstance(stacked, tuple) else 0
