"""CPU kernels for device npu where the device is pretended: its memory is the host's, so a CPU tensor can share it.

Every kernel that torch_npu registers for PrivateUse1 is replaced by one that runs the operator's CPU kernel, or for an
operator of Ascend's own the given stand-in, on CPU tensors over the same memory. Autograd, allocation, views, streams
and the allocator's statistics stay torch_npu's. Collectives (namespace c10d) are replaced too: they find CPU tensors
and therefore take the CPU's backend, so with ``cpu:gloo,npu:hccl`` gloo carries what HCCL would; HCCL never runs.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

NAMESPACES = ("aten", "npu", "c10d")
# Kernels of torch_npu that only look at a tensor's form or its memory, and work as they are; so do all that make views.
KEPT = {
    "aten::_has_compatible_shallow_copy_type",
    "aten::_local_scalar_dense",
    "aten::_pin_memory",
    "aten::_resize_output_",
    "aten::empty.memory_format",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::is_pinned",
    "aten::lift_fresh",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::record_stream",
    "aten::resize_",
    "aten::resize_as_",
    "aten::set_",
    "aten::set_.source_Storage",
    "aten::set_.source_Storage_storage_offset",
    "aten::set_.source_Tensor",
}

counts: Counter[str] = Counter()  # operator, as "npu::npu_rms_norm" -> how often it ran since ``counts.clear()``
_libraries: dict[str, torch.library.Library] = {}


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the memory of a tensor of a pretended device, which it keeps alive."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    view = torch.empty(0, dtype=tensor.dtype, device="cpu")
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    view.set_(whole.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    view._device_tensor = tensor  # type: ignore[attr-defined]
    return view


def _is_npu(device: object) -> bool:
    return device is not None and torch.device(device).type == "npu"  # type: ignore[arg-type]


def _host_generator(given: torch.Generator | None, device: torch.device) -> torch.Generator:
    """A CPU generator that the device's generator determines, which moves on as a kernel of the device makes it.

    The numbers are not those of a device; that they depend on its generator's seed and offset alone is the same.
    """
    own = given if given is not None else torch.npu.default_generators[device.index]
    host = torch.Generator().manual_seed((own.initial_seed() * 1_000_003 + own.get_offset()) % 2**63)
    own.set_offset(own.get_offset() + 4)
    return host


def _kernel(name: str, run: Callable[..., Any], is_random: bool) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        originals: dict[int, torch.Tensor] = {}  # id of what the operator is given -> what the caller gave
        device = None

        def to_host(value: Any) -> Any:
            nonlocal device
            if isinstance(value, torch.device):
                return torch.device("cpu") if value.type == "npu" else value
            if not isinstance(value, torch.Tensor):
                return value
            given = value
            if value.device.type == "npu":
                device = value.device
                given = host_view(value)
            originals[id(given)] = value
            return given

        host_args, host_kwargs = tree_map(to_host, (args, kwargs))
        asked = kwargs.get("device")
        if asked is not None and not _is_npu(asked):
            device = None
        elif device is None:
            device = torch.device("npu", torch.npu.current_device())

        if is_random and device is not None:
            host_kwargs["generator"] = _host_generator(kwargs.get("generator"), device)

        def from_host(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or device is None:
                return value
            if id(value) in originals:
                return originals[id(value)]
            assert value.untyped_storage().data_ptr() not in memory or not value.numel(), (
                f"{name} made a view: it must keep its kernel"
            )
            result = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
            host_view(result).copy_(value)
            return result

        memory = {tensor.untyped_storage().data_ptr() for tensor in originals.values()}
        return tree_map(from_host, run(*host_args, **host_kwargs))

    return kernel


def _library(namespace: str, kind: str = "IMPL") -> torch.library.Library:
    """What is registered through it stays as long as it does."""
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, kind)
    return _libraries[namespace]


def replace(namespace: str, stand_ins: Mapping[str, Callable[..., Any]]) -> None:
    """Make stand-ins of one namespace the kernels of device npu, once its operators are known."""
    library = _library(namespace)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is replaced is what is wanted
        for name, run in stand_ins.items():
            if name.startswith(f"{namespace}::"):
                kernel = _kernel(name, run, is_random=False)
                library.impl(name.removeprefix(f"{namespace}::"), kernel, "PrivateUse1", allow_override=True)


def define(namespace: str, schemas: Sequence[str]) -> None:
    """Make operators of a namespace known that nothing defines here, and nothing calls."""
    library = _library(namespace, "DEF")
    for schema in schemas:
        library.define(schema)


def install(stand_ins: Mapping[str, Callable[..., Any]]) -> int:
    """Replace the kernels, once per process after ``import torch_npu``; returns how many.

    Args:
        stand_ins: "npu::name" -> what runs on CPU tensors in its place, with the operator's own arguments. Operators of
            Ascend's own without one keep torch_npu's kernel, which raises.
    """
    assert not _libraries, "the kernels are installed already"
    number = 0
    known = torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1")
    left = sorted(set(stand_ins) - set(known))
    assert not left, f"torch_npu has no operators {', '.join(left)}"
    runs = {**stand_ins, "aten::matmul_backward": _matmul_backward}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is replaced is what is wanted
        for name in known:
            namespace, _, rest = name.partition("::")
            if namespace not in NAMESPACES or name in KEPT or (namespace == "npu" and name not in stand_ins):
                continue
            base, _, overload = rest.partition(".")
            packet = getattr(getattr(torch.ops, namespace), base, None)
            operator = getattr(packet, overload or "default", None)
            if operator is None or operator.is_view:
                continue
            is_random = any(argument.name == "generator" for argument in operator._schema.arguments)
            _library(namespace).impl(
                rest, _kernel(name, runs.get(name, operator), is_random), "PrivateUse1", allow_override=True
            )
            number += 1
    return number


def _matmul_backward(
    grad: torch.Tensor, own: torch.Tensor, other: torch.Tensor, mask: Sequence[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """torch itself has this operator for nested tensors only; torch_npu has it for all of its own."""
    assert other.dim() == 2 <= own.dim(), "not used"
    rows, above = own.flatten(0, -2), grad.flatten(0, -2)
    return (grad @ other.t() if mask[0] else None), (rows.t() @ above if mask[1] else None)


def send_one_by_one() -> None:
    """Messages between pipeline stages are sent by the operators of c10d, as a backend without batches has them.

    torch_npu asks HCCL itself for a batch of them, beneath all operators.
    """
    import torch.distributed as dist

    def batch_isend_irecv(p2p_op_list: Sequence[Any]) -> list[Any]:
        works = []
        for message in p2p_op_list:
            peer = {"group_dst" if message.op is dist.isend else "group_src": message.group_peer}
            works.append(message.op(message.tensor, group=message.group, tag=message.tag, **peer))
        return [work for work in works if work is not None]

    for module in (dist, dist.distributed_c10d):
        module.batch_isend_irecv = batch_isend_irecv  # type: ignore[attr-defined]


def keep_counts(folder: Path) -> None:
    """In a file of this process, at its end and every second before: Ray kills its workers."""
    atexit.register(_write_counts, folder)

    def write_often() -> None:
        while True:
            time.sleep(1)
            _write_counts(folder)

    threading.Thread(target=write_often, daemon=True).start()


def _write_counts(folder: Path) -> None:
    file = folder / f"{os.getpid()}.json"
    partial = file.with_suffix(f".{threading.get_ident()}")
    partial.write_text(json.dumps(dict(counts)))
    partial.rename(file)
