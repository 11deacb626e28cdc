"""Lets the real Megatron-core run on a device that is not CUDA's.

Megatron-core asks ``torch.cuda`` for devices, streams, events and generators; here this process's own device answers
under those names: the host (``HostDevice``), or ``torch.npu``. Every call replaced raises "Torch not compiled with CUDA
enabled" on such a machine, or (generator states) is queued and silently never carried out, so no call that works
changes its meaning. ``torch.cuda.is_available()`` stays False, and ``Tensor.type()`` keeps its value and only also
compares equal to its ``torch.cuda.`` spelling. Checked with megatron-core 0.16.1 and torch 2.13.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._device

# What of torch.cuda Megatron uses, by kind.
FUNCTIONS = ("set_device", "synchronize", "empty_cache", "current_stream", "default_stream", "stream")
GENERATOR_FUNCTIONS = ("manual_seed", "get_rng_state", "set_rng_state")
CLASSES = ("Stream", "Event", "StreamContext")

_installed: tuple[str, Any] | None = None  # device type, its module


class HostDevice:
    """A CPU in the form of ``torch.npu`` and its like: one device whose work is done when it is asked for."""

    class Event(torch.cpu.Event):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__()

    class Stream(torch.cpu.Stream):
        def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
            super().__init__()

        def synchronize(self) -> None:
            pass

        def record_event(self, event: Any = None) -> Any:
            # torch.cpu.Stream returns None here; Megatron's MoE dispatcher waits on what it gets.
            return event or HostDevice.Event()

    class StreamContext(torch.cpu.StreamContext):
        pass

    def __init__(self) -> None:
        self._stream = HostDevice.Stream()

    def set_device(self, device: Any) -> None:
        pass

    def synchronize(self, device: Any = None) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def current_stream(self, device: Any = None) -> HostDevice.Stream:
        return self._stream

    default_stream = current_stream

    def stream(self, stream: Any) -> HostDevice.StreamContext:
        return HostDevice.StreamContext(stream)

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(new_state)


class _TypeName(str):
    """'torch.FloatTensor' or 'torch.npu.FloatTensor', equal to 'torch.cuda.FloatTensor': optimizers know only that."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and _without_device(self) == _without_device(other)

    def __ne__(self, other: object) -> bool:
        return not self == other


def _without_device(type_name: str) -> str:
    return re.sub(r"^torch\.(cuda|npu)\.", "torch.", str(type_name))


def current_device() -> torch.device:
    """This process's device as Megatron is told it."""
    assert _installed is not None, "nothing is installed"
    device_type, module = _installed
    return torch.device("cpu") if device_type == "cpu" else torch.device(device_type, module.current_device())


def _own_device(device: Any) -> Any:
    """What this process has when "cuda" is asked for; any other device as it is."""
    return current_device() if str(device).startswith("cuda") else device


def _device_functions(module: Any) -> None:
    def answered_by(function: Callable[..., Any]) -> Callable[..., Any]:
        # A new function, not the module's: dynamo refuses two handlers for one function object.
        @functools.wraps(function)
        def answer(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return answer

    for name in (*FUNCTIONS, *GENERATOR_FUNCTIONS):
        setattr(torch.cuda, name, answered_by(getattr(module, name)))
    for name in CLASSES:
        setattr(torch.cuda, name, getattr(module, name))
    torch.cuda.current_device = current_device  # type: ignore[assignment]
    torch.cuda.random.get_rng_state = lambda device=None: module.get_rng_state()  # type: ignore[misc]
    torch.cuda.random.set_rng_state = lambda new_state, device=None: module.set_rng_state(new_state)


def _constructors(has_pinned_memory: bool) -> None:
    """The optimizer, clipping and schedules build their scalars with device="cuda"."""

    def on_own_device(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(function)
        def constructor(*args: Any, **kwargs: Any) -> torch.Tensor:
            if "device" in kwargs:
                kwargs["device"] = _own_device(kwargs["device"])
            if kwargs.get("pin_memory") and not has_pinned_memory:
                kwargs["pin_memory"] = False
            return function(*args, **kwargs)

        return constructor

    # ``with torch.device(...)`` knows constructors by identity: it must list the real ones before they are wrapped.
    # Else models made on "meta" are not, and transformers leaves their rotary frequencies uninitialised.
    torch.utils._device._device_constructors()
    for name in ("tensor", "zeros", "ones", "empty", "empty_like"):
        setattr(torch, name, on_own_device(getattr(torch, name)))

    def to_own_device(self: torch.Tensor, device: Any = None, non_blocking: bool = False, **_: Any) -> torch.Tensor:
        return self.to(current_device(), non_blocking=non_blocking)

    torch.Tensor.cuda = to_own_device  # type: ignore[method-assign, assignment]


def _tensor_type() -> None:
    original = torch.Tensor.type

    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs) if args or kwargs else _TypeName(original(self))

    torch.Tensor.type = type_  # type: ignore[method-assign, assignment]


def _uneven_gather() -> None:
    """gloo's list all_gather wants equal sizes; expert tensor parallelism gathers uneven ones."""
    original = dist.all_gather

    @functools.wraps(original)
    def all_gather(
        tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if len({t.shape for t in tensor_list}) <= 1:
            return original(tensor_list, tensor, group=group, async_op=async_op)
        own = dist.get_rank(group)
        for rank, out in enumerate(tensor_list):
            if rank == own:
                out.copy_(tensor)
            dist.broadcast(out, group=group, group_src=rank)
        return None

    dist.all_gather = all_gather


def install(device_type: str, module: Any) -> None:
    """Answer Megatron by this device from now on; again with the same one does nothing.

    Args:
        device_type: "cpu" or "npu".
        module: ``HostDevice()``, or torch's module of that device.
    """
    global _installed
    if _installed is not None:
        assert _installed[0] == device_type, f"this process already answers by {_installed[0]}"
        return
    _installed = (device_type, module)
    _device_functions(module)
    _constructors(has_pinned_memory=device_type != "cpu")
    _tensor_type()
    if device_type == "cpu":
        _uneven_gather()


def installed() -> Any:
    """The module that answers, or None if Megatron's own calls are left to the vendor: on CUDA, or to MindSpeed."""
    return _installed[1] if _installed else None
