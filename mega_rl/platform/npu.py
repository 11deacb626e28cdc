"""The Ascend platform: with ``npu_operators`` the one place that imports torch_npu, and MindSpeed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from typing import Any

import torch

from mega_rl.platform import accelerator
from mega_rl.platform.base import MemoryStats
from mega_rl.platform.host import host_peak_bytes, reset_host_peak
from mega_rl.platform.npu_operators import AscendOperators
from mega_rl.platform.torch_operators import TorchOperators


def _torch_npu() -> Any:
    """torch_npu, imported on first use: on other machines its import fails or takes over devices."""
    return importlib.import_module("torch_npu").npu


class NpuPlatform:
    name = "npu"
    backend = "cpu:gloo,npu:hccl"
    visible_devices_variable: str | None = "ASCEND_RT_VISIBLE_DEVICES"
    actor_options: Mapping[str, Any] = {"num_cpus": 1, "resources": {"NPU": 1}}
    operators: TorchOperators = AscendOperators()

    def is_available(self) -> bool:
        return importlib.util.find_spec("torch_npu") is not None and _torch_npu().is_available()

    def environment(self) -> Mapping[str, str]:
        return {
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron-core asserts it under this name on Ascend too
            "HCCL_CONNECT_TIMEOUT": "1800",  # seconds; the default of 120 is too short for colocated start-up
            "HCCL_EXEC_TIMEOUT": "3600",
            "HCCL_BUFFSIZE": "256",
            "HCCL_OP_EXPANSION_MODE": "AIV",
            "TASK_QUEUE_ENABLE": "2",
            "CPU_AFFINITY_CONF": "1",
            "VLLM_ASCEND_ENABLE_NZ": "0",  # weights are rewritten in place
        }

    def prepare(self) -> None:
        """Import MindSpeed's adaptor, which patches Megatron-core for Ascend; without it, answer Megatron ourselves."""
        if importlib.util.find_spec("mindspeed") is None:
            accelerator.install("npu", _torch_npu())
            return
        arguments, sys.argv = sys.argv, sys.argv[:1]  # the adaptor parses Megatron's arguments from the command line
        try:
            importlib.import_module("mindspeed.megatron_adaptor")
        finally:
            sys.argv = arguments

    def set_device(self, local_rank: int) -> torch.device:
        _torch_npu().set_device(local_rank)  # a logical index within ASCEND_RT_VISIBLE_DEVICES
        return torch.device("npu", local_rank)

    def synchronize(self) -> None:
        _torch_npu().synchronize()

    def empty_cache(self) -> None:
        _torch_npu().empty_cache()

    def memory(self) -> MemoryStats:
        npu = _torch_npu()
        total = npu.get_device_properties(npu.current_device()).total_memory
        return MemoryStats(npu.max_memory_allocated(), total, host_peak_bytes())

    def reset_peak_memory(self) -> bool:
        _torch_npu().reset_peak_memory_stats()
        return reset_host_peak()

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)
        _torch_npu().manual_seed(seed)

    def rng_state(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state(), "device": _torch_npu().get_rng_state()}

    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        _torch_npu().set_rng_state(state["device"])
