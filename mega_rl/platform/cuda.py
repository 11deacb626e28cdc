"""The CUDA platform: the one place that imports flash_attn."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity

from mega_rl.config.schema.device import MindSpeedConfig
from mega_rl.errors import InputError
from mega_rl.platform.contract.base import DeviceLoad, MemoryStats, ProcessRole, Setting
from mega_rl.platform.contract.host import host_peak_bytes, reset_host_peak
from mega_rl.platform.contract.peaks import cuda_peak
from mega_rl.platform.contract.trace import recorded
from mega_rl.platform.operators.attention import VarlenPacking
from mega_rl.platform.operators.torch_kernels import GroupedMatmul, TorchOperators

FLASH_MAX_WIDTH = 256  # widest head that flash-attention takes
TORCH_WIDTH_MULTIPLE = 8  # of a head's width, for torch's own flash-attention
FLASH_MIN_CAPABILITY = (8, 0)  # of the device, for torch's own: A100 and newer
MAX_MASK = 1 << 26  # of queries x keys: 8,192 of each
GROUPED_MULTIPLE = 8  # of the sizes of bfloat16 weights in a grouped product: whole lots of 16 bytes
_ENVIRONMENT = (
    Setting("CUDA_DEVICE_MAX_CONNECTIONS", "1", "Megatron-core's order of kernels and collectives relies on it"),
    Setting("TORCH_NCCL_AVOID_RECORD_STREAMS", "1", "buffers of collectives are freed sooner"),
)
_WORKSPACE = Setting("CUBLAS_WORKSPACE_CONFIG", ":4096:8", "platform.deterministic: a fixed workspace for matmuls")
_DETERMINISTIC = (
    _WORKSPACE,
    Setting("NCCL_ALGO", "^NVLS", "platform.deterministic: no reduction in the switch, whose order varies"),
    Setting("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0", "platform.deterministic: TransformerEngine's kernels too"),
)


@functools.cache
def flash_attention() -> Callable[..., Tensor] | None:
    """None if flash_attn is not installed; one that is installed but does not load raises."""
    if importlib.util.find_spec("flash_attn") is None:
        return None
    return importlib.import_module("flash_attn").flash_attn_varlen_func


@functools.cache
def torch_attention() -> Callable[..., Tensor] | None:
    """torch's own flash-attention for packed sequences in flash_attn's terms; None before torch 2.11.

    Its causality, like flash_attn's, is aligned at the last key. torch.use_deterministic_algorithms reaches its
    backward pass.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    if not {"scale", "window_size"} <= set(known):
        return None
    # torch 2.11 takes fewer heads of keys unasked.
    others: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in known else {}

    def attend(q: Tensor, k: Tensor, v: Tensor, *borders: Any, softmax_scale: float, causal: bool, **_: Any) -> Tensor:
        window = (-1, 0) if causal else (-1, -1)
        result = varlen_attn(q, k, v, *borders, scale=softmax_scale, window_size=window, **others)
        assert isinstance(result, Tensor)  # not with the log-sum-exp
        return result

    return attend


def attention_backend() -> str:
    """What computes attention, for the user."""
    if flash_attention() is not None:
        return "attention in half precision: flash_attn"
    if torch_attention() is not None:
        return "attention in half precision: torch's own flash-attention for packed sequences"
    return "attention: torch's SDPA, one sequence after another, since torch is older than 2.11 and has no flash_attn"


def _packed_attention(q_THD: Tensor, v_SKD: Tensor) -> Callable[..., Tensor] | None:
    """A fused kernel for all sequences at once, if one takes these tensors."""
    width = q_THD.shape[-1]
    is_half = q_THD.dtype in (torch.float16, torch.bfloat16)
    if not is_half or v_SKD.shape[-1] != width or width > FLASH_MAX_WIDTH:
        return None
    if flash_attention() is not None:
        return flash_attention()
    if width % TORCH_WIDTH_MULTIPLE or _capability(q_THD.device) < FLASH_MIN_CAPABILITY:
        return None
    return torch_attention()


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _refuse_large_masks(packing: VarlenPacking, causal: bool) -> None:
    """torch takes other lengths of queries than of keys by a mask only, and then has no fused kernel for them."""
    queries, keys = packing.borders_q.lengths, packing.borders_k.lengths
    num_masked = max((q * k for q, k in zip(queries, keys, strict=True) if q != k), default=0)
    if causal and num_masked > MAX_MASK:
        raise InputError(
            f"attention of one part of a sequence would take a mask of {num_masked:,} numbers and torch's slow kernel, "
            "since no flash-attention does it here: set model.dtype to bfloat16, or parallel.context_method to "
            "ulysses, or parallel.context to 1, or take torch 2.11 or newer or flash_attn"
        )


class FlashOperators(TorchOperators):
    """torch's operators, which have CUDA kernels; for packed sequences flash_attn if it is installed, else torch's."""

    def varlen_attention(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, packing: VarlenPacking, *, softmax_scale: float, causal: bool
    ) -> Tensor:
        packed = _packed_attention(q_THD, v_SKD)
        if packed is None:
            _refuse_large_masks(packing, causal)
            return super().varlen_attention(q_THD, k_SKD, v_SKD, packing, softmax_scale=softmax_scale, causal=causal)
        return packed(
            q_THD,
            k_SKD,
            v_SKD,
            packing.cu_seqlens_q,
            packing.cu_seqlens_k,
            packing.max_seqlen_q,
            packing.max_seqlen_k,
            softmax_scale=softmax_scale,
            causal=causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )

    def grouped_matmul(self, x_ND: Tensor, weights_FD: Sequence[Tensor], ends_E: Tensor) -> Tensor:
        is_aligned = all(size % GROUPED_MULTIPLE == 0 for size in weights_FD[0].shape)
        if x_ND.dtype != torch.bfloat16 or not is_aligned or not hasattr(F, "grouped_mm"):
            return super().grouped_matmul(x_ND, weights_FD, ends_E)
        return GroupedMatmul.apply(_Products(), x_ND.contiguous(), ends_E, *weights_FD)


class _Products:
    """``GroupedProducts`` by torch's grouped product, which takes the weights of all experts as one tensor."""

    def rows(self, x_ND: Tensor, weights_FD: Sequence[Tensor], ends_E: Tensor, is_transposed: bool) -> Tensor:
        weights_EFD = torch.stack(list(weights_FD))
        return F.grouped_mm(x_ND, weights_EFD.transpose(1, 2) if is_transposed else weights_EFD, offs=ends_E.int())

    def sums(self, grad_NF: Tensor, x_ND: Tensor, ends_E: Tensor) -> Tensor:
        return F.grouped_mm(grad_NF.t(), x_ND, offs=ends_E.int())


class CudaPlatform:
    name = "cuda"
    backend = "cpu:gloo,cuda:nccl"
    has_own_memory = True
    repeats_itself = False
    visible_devices_variable: str | None = "CUDA_VISIBLE_DEVICES"
    actor_options: Mapping[str, Any] = {"num_cpus": 1, "num_gpus": 1}
    operators: TorchOperators = FlashOperators()
    _device = torch.device("cuda", 0)  # of this process; a new thread begins with the first one

    def absence(self) -> str | None:
        return None if torch.cuda.is_available() else "no such device is usable here: install its driver, or choose cpu"

    def environment(self, role: ProcessRole) -> Sequence[Setting]:
        return (*_ENVIRONMENT, *(_DETERMINISTIC if role.is_deterministic else ()))

    def check_environment(self, role: ProcessRole, environ: Mapping[str, str]) -> Sequence[str]:
        workspace = environ.get(_WORKSPACE.variable, _WORKSPACE.value)
        if role.is_deterministic and workspace not in (_WORKSPACE.value, ":16:8"):
            raise InputError(
                f"{_WORKSPACE.variable} is {workspace!r}, but platform.deterministic is true: unset it, or set "
                "platform.deterministic to false"
            )
        return ()

    def prepare(self, mindspeed: MindSpeedConfig | None = None) -> Sequence[str]:
        return (attention_backend(),)

    def actor_device(self, assigned: Mapping[str, Sequence[str]], environ: Mapping[str, str]) -> int:
        return 0  # Ray shows an actor only its own device

    def num_devices(self) -> int:
        return torch.cuda.device_count()

    def set_device(self, local_rank: int) -> torch.device:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        self._device = device
        return device

    def device_kind(self, local_rank: int) -> str:
        major, minor = torch.cuda.get_device_capability(local_rank)
        return f"{torch.cuda.get_device_name(local_rank)} {major}.{minor}"

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def memory(self) -> MemoryStats:
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        peak = torch.cuda.max_memory_allocated()
        return MemoryStats(torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), peak, total, host_peak_bytes())

    def reset_peak_memory(self) -> bool:
        torch.cuda.reset_peak_memory_stats()
        return reset_host_peak()

    def load(self) -> DeviceLoad | None:
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        try:
            busy = torch.cuda.utilization(self._device) / 100
        except Exception:  # noqa: BLE001 - no nvidia-ml-py, a part of a device, a driver that does not tell: a metric less
            busy = None
        return DeviceLoad(busy, total_bytes - free_bytes)

    def peak_flops(self) -> float | None:
        return cuda_peak(torch.cuda.get_device_name(self._device))

    def recorded(self, directory: Path) -> AbstractContextManager[None]:
        return recorded(directory, [ProfilerActivity.CPU, ProfilerActivity.CUDA])

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def rng_state(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state(), "device": torch.cuda.get_rng_state()}

    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        torch.cuda.set_rng_state(state["device"])
