"""What a platform must answer. Everything that differs between CPU, CUDA and NPU is asked here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mega_rl.platform.torch_operators import TorchOperators


@dataclass(frozen=True)
class MemoryStats:
    """Memory of this rank, in bytes; device figures are 0 where there is no device of its own."""

    device_peak_bytes: int
    device_total_bytes: int
    host_peak_bytes: int


class Platform(Protocol):
    name: str  # "cpu" | "cuda" | "npu": also the torch device type
    backend: str  # what torch.distributed.init_process_group is given; always able to move CPU tensors
    visible_devices_variable: str | None  # the environment variable that masks devices
    actor_options: Mapping[str, Any]  # what a Ray actor with one device of this platform asks for
    operators: TorchOperators  # what ``platform.operators`` computes with

    def is_available(self) -> bool:
        """Whether this machine has such a device and the software for it."""

    def environment(self) -> Mapping[str, str]:
        """Environment defaults of the platform; a user's own value always wins."""

    def prepare(self) -> None:
        """Make this process ready for Megatron-core; must run before anything imports ``megatron``."""

    def set_device(self, local_rank: int) -> torch.device:
        """Bind this process to its device."""

    def synchronize(self) -> None:
        """Wait for the device."""

    def empty_cache(self) -> None:
        """Give cached device memory back."""

    def memory(self) -> MemoryStats:
        """Peak memory since the last ``reset_peak_memory``."""

    def reset_peak_memory(self) -> bool:
        """Start a new peak on device and host; False where the host's stays that of the whole process."""

    def seed(self, seed: int) -> None:
        """Seed torch's generators, the device's included."""

    def rng_state(self) -> dict[str, Any]:
        """The state of every torch generator of this rank, for a checkpoint."""

    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        """Put ``rng_state`` back."""
