"""The CPU platform: gloo, host memory, and what Megatron-core needs to run if there is no accelerator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from platform import machine
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from mega_rl.config.schema.device import MindSpeedConfig
from mega_rl.platform import accelerator
from mega_rl.platform.contract.base import DeviceLoad, MemoryStats, ProcessRole, Setting
from mega_rl.platform.contract.host import host_peak_bytes, reset_host_peak
from mega_rl.platform.contract.trace import recorded
from mega_rl.platform.operators.torch_kernels import TorchOperators


class CpuPlatform:
    name = "cpu"
    backend = "gloo"
    has_own_memory = False
    repeats_itself = True
    visible_devices_variable: str | None = None
    actor_options: Mapping[str, Any] = {"num_cpus": 1}
    operators: TorchOperators = TorchOperators()

    def absence(self) -> str | None:
        return None

    def environment(self, role: ProcessRole) -> Sequence[Setting]:
        return (
            Setting("CUDA_DEVICE_MAX_CONNECTIONS", "1", "Megatron-core asks for it under this name on every device"),
            Setting("TORCHDYNAMO_DISABLE", "1", "nothing waits for a compiler"),
        )

    def check_environment(self, role: ProcessRole, environ: Mapping[str, str]) -> Sequence[str]:
        return ()

    def prepare(self, mindspeed: MindSpeedConfig | None = None) -> Sequence[str]:
        accelerator.install("cpu", accelerator.HostDevice())
        return ()

    def actor_device(self, assigned: Mapping[str, Sequence[str]], environ: Mapping[str, str]) -> int:
        return 0

    def num_devices(self) -> int:
        return 1

    def set_device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")

    def device_kind(self, local_rank: int) -> str:
        return f"{machine()} {torch.backends.cpu.get_cpu_capability()}"

    def synchronize(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def memory(self) -> MemoryStats:
        return MemoryStats(0, 0, 0, 0, host_peak_bytes())

    def reset_peak_memory(self) -> bool:
        return reset_host_peak()

    def load(self) -> DeviceLoad | None:
        return None

    def peak_flops(self) -> float | None:
        return None

    def recorded(self, directory: Path) -> AbstractContextManager[None]:
        return recorded(directory, [ProfilerActivity.CPU])

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def rng_state(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state()}

    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
