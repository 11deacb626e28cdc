"""The CUDA platform."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mega_rl.platform.base import MemoryStats
from mega_rl.platform.host import host_peak_bytes, reset_host_peak


class CudaPlatform:
    name = "cuda"
    backend = "cpu:gloo,cuda:nccl"
    visible_devices_variable: str | None = "CUDA_VISIBLE_DEVICES"
    actor_options: Mapping[str, Any] = {"num_cpus": 1, "num_gpus": 1}

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def environment(self) -> Mapping[str, str]:
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}

    def prepare(self) -> None:
        pass

    def set_device(self, local_rank: int) -> torch.device:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        return device

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def memory(self) -> MemoryStats:
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        return MemoryStats(torch.cuda.max_memory_allocated(), total, host_peak_bytes())

    def reset_peak_memory(self) -> bool:
        torch.cuda.reset_peak_memory_stats()
        return reset_host_peak()

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def rng_state(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state(), "device": torch.cuda.get_rng_state()}

    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        torch.cuda.set_rng_state(state["device"])
