"""What a platform must answer. Everything that differs between CPU, CUDA and NPU is asked here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from mega_rl.config.schema.device import MindSpeedConfig
from mega_rl.platform.operators.torch_kernels import TorchOperators


@dataclass(frozen=True)
class MemoryStats:
    """Memory of this rank, in bytes; device figures are 0 if there is no device of its own."""

    device_allocated_bytes: int  # bytes in tensors now
    device_reserved_bytes: int  # held by torch's cache, tensors included, now
    device_peak_bytes: int  # most in tensors since the last ``reset_peak_memory``
    device_total_bytes: int  # what the device has
    host_peak_bytes: int


@dataclass(frozen=True)
class DeviceLoad:
    """What the driver says of the device at this moment, all processes that use it together."""

    busy: float | None  # share of the driver's last sampling period in which a kernel ran, 0 to 1; None: it cannot tell
    used_bytes: int


@dataclass(frozen=True)
class ProcessRole:
    """What a process is for, as far as its environment depends on it."""

    trains: bool = True
    samples: bool = False  # a rollout engine lives in it
    engine_sleeps: bool = False  # that engine gives its memory back while the trainer works
    replays_graphs: bool = False  # that engine captures graphs of its kernels
    may_share_device: bool = False  # processes of the same run on the same host may have been given its device
    is_deterministic: bool = False


@dataclass(frozen=True)
class Setting:
    """An environment variable that a platform wants; a user's own value wins."""

    variable: str
    value: str
    why: str


class Platform(Protocol):
    name: str  # "cpu" | "cuda" | "npu": also the torch device type
    backend: str  # what torch.distributed.init_process_group is given; always able to move CPU tensors
    has_own_memory: bool  # whether moving a tensor to the host frees device memory: not so where the two are one
    repeats_itself: bool  # whether the same forward pass gives the same bits without deterministic algorithms
    visible_devices_variable: str | None  # the environment variable that masks devices
    actor_options: Mapping[str, Any]  # what a Ray actor with one device of this platform asks for
    operators: TorchOperators  # what ``platform.dispatch`` computes with

    def absence(self) -> str | None:
        """Why this platform cannot be used here, with the fix; None if it can.

        Raises:
            InputError: it is installed and broken, so that choosing another one would hide a mistake.
        """

    def environment(self, role: ProcessRole) -> Sequence[Setting]:
        """Environment defaults of a process, to be set before anything of the platform is imported."""

    def check_environment(self, role: ProcessRole, environ: Mapping[str, str]) -> Sequence[str]:
        """Sentences about variables that do not do what they were set for.

        Raises:
            InputError: a value with which the run would fail or be wrong.
        """

    def prepare(self, mindspeed: MindSpeedConfig | None = None) -> Sequence[str]:
        """Make this process ready for Megatron-core; must run before anything imports ``megatron``.

        Returns:
            What was done to Megatron, as lines for the log.

        Raises:
            InputError: software that is required is missing or does not fit.
        """

    def actor_device(self, assigned: Mapping[str, Sequence[str]], environ: Mapping[str, str]) -> int:
        """What ``set_device`` takes in a Ray actor with ``actor_options``.

        Args:
            assigned: the ids of the devices that Ray gave to the actor, by resource name.
            environ: of the actor.

        Raises:
            InputError: a device that the actor cannot see.
        """

    def num_devices(self) -> int:
        """How many devices of this host a process can see; 1 where the device is the host itself."""

    def set_device(self, local_rank: int) -> torch.device:
        """Bind this process to its device."""

    def device_kind(self, local_rank: int) -> str:
        """What the device is, in the words of its driver: on devices of one kind the same kernels are chosen."""

    def synchronize(self) -> None:
        """Wait for the device."""

    def empty_cache(self) -> None:
        """Give cached device memory back."""

    def memory(self) -> MemoryStats:
        """What is taken now, and the peaks since the last ``reset_peak_memory``."""

    def reset_peak_memory(self) -> bool:
        """Start a new peak on device and host; False if the host's stays that of the whole process."""

    def load(self) -> DeviceLoad | None:
        """What the device does now, asked of the driver without waiting for it; None if there is no device of its own.

        Any thread may call it after ``set_device``.
        """

    def peak_flops(self) -> float | None:
        """Operations per second that the device reaches at most, in bfloat16 matrix products; None: not known."""

    def recorded(self, directory: Path) -> AbstractContextManager[None]:
        """Records operators and kernels of the block; afterwards a trace of them is in ``directory``."""

    def seed(self, seed: int) -> None:
        """Seed torch's generators, the device's included."""

    def rng_state(self) -> dict[str, Any]:
        """The state of every torch generator of this rank, for a checkpoint."""

    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        """Put ``rng_state`` back."""
