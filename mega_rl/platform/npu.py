"""The Ascend platform: with ``operators.npu_kernels`` the one place that imports torch_npu."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mega_rl.config.schema.device import MindSpeedConfig
from mega_rl.errors import InputError
from mega_rl.platform import accelerator
from mega_rl.platform.ascend import (
    devices as ascend_devices,
    environment as ascend_environment,
    install as ascend_install,
    mindspeed as mindspeed_adaptor,
)
from mega_rl.platform.contract import versions
from mega_rl.platform.contract.base import DeviceLoad, MemoryStats, ProcessRole, Setting
from mega_rl.platform.contract.host import host_peak_bytes, reset_host_peak
from mega_rl.platform.contract.peaks import ascend_peak
from mega_rl.platform.operators.npu_kernels import AscendOperators
from mega_rl.platform.operators.torch_kernels import TorchOperators


@functools.cache
def _torch_npu() -> Any:
    """torch_npu, imported on first use: on other machines its import fails or takes over devices.

    Raises:
        InputError: it does not load.
    """
    try:
        return importlib.import_module("torch_npu").npu
    except Exception as error:  # noqa: BLE001 - it raises a bare Exception for what is amiss in the installation
        raise InputError(f"torch_npu cannot be imported: {ascend_install.explain(str(error))}") from error


def _num_visible() -> int:
    npu = _torch_npu()
    return npu.device_count() if npu.is_available() else 0


class NpuPlatform:
    name = "npu"
    backend = "cpu:gloo,npu:hccl"
    has_own_memory = True
    repeats_itself = False
    visible_devices_variable: str | None = "ASCEND_RT_VISIBLE_DEVICES"
    actor_options: Mapping[str, Any] = {"num_cpus": 1, "resources": {"NPU": 1}}
    operators: TorchOperators = AscendOperators()
    _device = 0  # of this process; a new thread begins with the first one

    def absence(self) -> str | None:
        if importlib.util.find_spec("torch_npu") is None:
            return "torch_npu is not installed: install the one that belongs to your torch, or choose cpu"
        found = versions.installed() | {"mindspeed": None}  # which is judged when it is used
        refused = versions.refusals(self.name, found)
        if refused:
            raise InputError("; ".join(refused))
        missing = ascend_install.missing_library()
        if missing is not None:
            raise InputError(f"torch_npu is installed, but {missing}; or choose platform.name=cpu")
        num_visible = _num_visible()
        ascend_devices.check_visible(ascend_devices.read_mask(os.environ), num_visible)
        if num_visible == 0:
            return "no device is usable here: see whether `npu-smi info` lists one, or choose cpu"
        return None

    def environment(self, role: ProcessRole) -> Sequence[Setting]:
        return ascend_environment.settings(role)

    def check_environment(self, role: ProcessRole, environ: Mapping[str, str]) -> Sequence[str]:
        return ascend_environment.check(role, environ)

    def prepare(self, mindspeed: MindSpeedConfig | None = None) -> Sequence[str]:
        settings = mindspeed or MindSpeedConfig()
        fallback = mindspeed_adaptor.without(settings)
        if fallback is not None:
            accelerator.install(self.name, _torch_npu())
            return fallback
        lines, kernels = mindspeed_adaptor.enable(settings)
        self.operators = AscendOperators(kernels)
        return lines

    def actor_device(self, assigned: Mapping[str, Sequence[str]], environ: Mapping[str, str]) -> int:
        return ascend_devices.ray_device(assigned["NPU"], environ)

    def num_devices(self) -> int:
        return _num_visible()

    def set_device(self, local_rank: int) -> torch.device:
        ascend_devices.check_local_rank(local_rank, _num_visible(), ascend_devices.read_mask(os.environ))
        _torch_npu().set_device(local_rank)  # a logical id within the mask
        self._device = local_rank
        return torch.device("npu", local_rank)

    def device_kind(self, local_rank: int) -> str:
        return str(_torch_npu().get_device_name(local_rank))

    def synchronize(self) -> None:
        _torch_npu().synchronize()

    def empty_cache(self) -> None:
        _torch_npu().empty_cache()

    def memory(self) -> MemoryStats:
        npu = _torch_npu()
        total = npu.get_device_properties(npu.current_device()).total_memory
        return MemoryStats(
            npu.memory_allocated(), npu.memory_reserved(), npu.max_memory_allocated(), total, host_peak_bytes()
        )

    def reset_peak_memory(self) -> bool:
        _torch_npu().reset_peak_memory_stats()
        return reset_host_peak()

    def load(self) -> DeviceLoad | None:
        free_bytes, total_bytes = _torch_npu().mem_get_info(self._device)
        try:
            busy = _torch_npu().utilization(self._device) / 100
        except Exception:  # noqa: BLE001 - a CANN that does not tell: a metric less
            busy = None
        return DeviceLoad(busy, total_bytes - free_bytes)

    def peak_flops(self) -> float | None:
        return ascend_peak(_torch_npu().get_device_name(self._device))

    @contextmanager
    def recorded(self, directory: Path) -> Iterator[None]:
        """torch_npu writes a directory of its own, in which ``trace_view.json`` is the trace."""
        profiler = importlib.import_module("torch_npu.profiler")
        activities = [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.NPU]
        handler = profiler.tensorboard_trace_handler(str(directory))
        with profiler.profile(activities=activities, on_trace_ready=handler):
            yield

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)
        _torch_npu().manual_seed(seed)

    def rng_state(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state(), "device": _torch_npu().get_rng_state()}

    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        _torch_npu().set_rng_state(state["device"])
