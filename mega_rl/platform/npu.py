"""The Ascend platform: the one place that imports torch_npu."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mega_rl.config.schema import MindSpeedConfig
from mega_rl.platform import accelerator, ascend_devices, ascend_environment, ascend_install, versions
from mega_rl.platform import mindspeed as mindspeed_adaptor
from mega_rl.platform.attention import VarlenPacking, once_per_tensor, read_borders
from mega_rl.platform.base import MemoryStats, ProcessRole, Setting
from mega_rl.platform.host import host_peak_bytes, reset_host_peak
from mega_rl.types import InputError

FUSED_MAX_SEQUENCES = 1000  # of one npu_fusion_attention call in the layout TND
FUSED_MAX_WIDTH = 768  # of a head


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


@functools.cache
def _causal_mask(device: torch.device) -> Tensor:
    """What sparse modes 2 to 4 take for sequences of any length; True is hidden."""
    return torch.ones(2048, 2048, dtype=torch.bool).triu(1).to(device)


@once_per_tensor
def _fused_calls(cu_seqlens: Tensor) -> list[tuple[slice, list[int]]]:
    """For each call the tokens it takes, and where its sequences end among them."""
    positions = read_borders(cu_seqlens).positions
    calls = []
    for first in range(0, len(positions) - 1, FUSED_MAX_SEQUENCES):
        start, *ends = positions[first : first + FUSED_MAX_SEQUENCES + 1]
        calls.append((slice(start, ends[-1]), [end - start for end in ends]))
    return calls


class NpuPlatform:
    name = "npu"
    backend = "cpu:gloo,npu:hccl"
    visible_devices_variable: str | None = "ASCEND_RT_VISIBLE_DEVICES"
    actor_options: Mapping[str, Any] = {"num_cpus": 1, "resources": {"NPU": 1}}

    def absence(self) -> str | None:
        if importlib.util.find_spec("torch_npu") is None:
            return "torch_npu is not installed: install the one that belongs to your torch, or choose cpu"
        refused = versions.refusals(self.name, versions.installed())
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
        if mindspeed_adaptor.is_used(settings):
            return mindspeed_adaptor.enable(settings)
        accelerator.install(self.name, _torch_npu())
        return mindspeed_adaptor.without(settings)

    def actor_device(self, assigned: Mapping[str, Sequence[str]], environ: Mapping[str, str]) -> int:
        return ascend_devices.ray_device(assigned["NPU"], environ)

    def set_device(self, local_rank: int) -> torch.device:
        ascend_devices.check_local_rank(local_rank, _num_visible(), ascend_devices.read_mask(os.environ))
        _torch_npu().set_device(local_rank)  # a logical id within the mask
        return torch.device("npu", local_rank)

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

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)
        _torch_npu().manual_seed(seed)

    def rng_state(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state(), "device": _torch_npu().get_rng_state()}

    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        _torch_npu().set_rng_state(state["device"])

    def packed_attention(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, packing: VarlenPacking, *, softmax_scale: float, causal: bool
    ) -> Tensor:
        if q_THD.shape[-1] > FUSED_MAX_WIDTH:
            raise InputError(f"heads are {q_THD.shape[-1]} wide; attention on Ascend takes at most {FUSED_MAX_WIDTH}")
        outputs = [
            importlib.import_module("torch_npu").npu_fusion_attention(
                q_THD[queries],
                k_SKD[keys],
                v_SKD[keys],
                head_num=q_THD.shape[1],
                input_layout="TND",
                atten_mask=_causal_mask(q_THD.device) if causal else None,  # without one every key is seen
                scale=softmax_scale,
                keep_prob=1.0,
                actual_seq_qlen=query_ends,
                actual_seq_kvlen=key_ends,
                sparse_mode=3 if causal else 0,  # 3: causal, aligned at the last query and the last key
            )[0]
            for (queries, query_ends), (keys, key_ends) in zip(
                _fused_calls(packing.cu_seqlens_q), _fused_calls(packing.cu_seqlens_k), strict=True
            )
        ]
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]
