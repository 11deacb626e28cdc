"""The CPU platform: gloo, host memory, and what Megatron-core needs to run where there is no accelerator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mega_rl.platform import accelerator
from mega_rl.platform.base import MemoryStats
from mega_rl.platform.host import host_peak_bytes, reset_host_peak
from mega_rl.platform.torch_operators import TorchOperators


class CpuPlatform:
    name = "cpu"
    backend = "gloo"
    visible_devices_variable: str | None = None
    actor_options: Mapping[str, Any] = {"num_cpus": 1}
    operators: TorchOperators = TorchOperators()

    def is_available(self) -> bool:
        return True

    def environment(self) -> Mapping[str, str]:
        # Megatron-core asserts the first for sequence parallelism, whatever the device is.
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCHDYNAMO_DISABLE": "1"}

    def prepare(self) -> None:
        accelerator.install("cpu", accelerator.HostDevice())

    def set_device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")

    def synchronize(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def memory(self) -> MemoryStats:
        return MemoryStats(device_peak_bytes=0, device_total_bytes=0, host_peak_bytes=host_peak_bytes())

    def reset_peak_memory(self) -> bool:
        return reset_host_peak()

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def rng_state(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state()}

    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
