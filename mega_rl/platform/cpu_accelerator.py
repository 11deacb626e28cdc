"""Lets the real Megatron-core run over gloo on a host without an accelerator.

Megatron-core asks ``torch.cuda`` for devices, streams, events and generators. Every call replaced here raises "Torch
not compiled with CUDA enabled" on such a host, or (generator states) is queued and silently never carried out, so no
call that works changes its meaning. ``Tensor.type()`` keeps its value and only also compares equal to its
``torch.cuda.`` spelling. Checked with megatron-core 0.16.1 and torch 2.13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._device

CPU = torch.device("cpu")


class _Event(torch.cpu.Event):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


class _Stream(torch.cpu.Stream):
    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        super().__init__()

    def synchronize(self) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        # torch.cpu.Stream returns None here; Megatron's MoE dispatcher waits on what it gets.
        return event or _Event()


class _StreamContext(torch.cpu.StreamContext):
    pass


class _TypeName(str):
    """'torch.FloatTensor', equal to 'torch.cuda.FloatTensor' too: Megatron's optimizers know only the latter."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and str(self) == other.replace("torch.cuda.", "torch.")

    def __ne__(self, other: object) -> bool:
        return not self == other


def _devices() -> None:
    # New functions, not aliases of torch.cpu.*: dynamo refuses two handlers for one function object.
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.set_device = lambda device: None


def _streams() -> None:
    default = _Stream()
    torch.cuda.Stream, torch.cuda.Event, torch.cuda.StreamContext = _Stream, _Event, _StreamContext  # type: ignore[misc, assignment]
    torch.cuda.current_stream = lambda device=None: default  # type: ignore[assignment, return-value]
    torch.cuda.default_stream = lambda device=None: default  # type: ignore[assignment, return-value]
    torch.cuda.stream = lambda stream: _StreamContext(stream)  # type: ignore[assignment, return-value]


def _constructors() -> None:
    """The optimizer, clipping and schedules build their scalars with device="cuda"."""

    def on_host(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(function)
        def constructor(*args: Any, **kwargs: Any) -> torch.Tensor:
            device = kwargs.get("device")
            if device is not None and torch.device(device).type == "cuda":
                kwargs["device"] = CPU
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
            return function(*args, **kwargs)

        return constructor

    # ``with torch.device(...)`` knows constructors by identity: it must list the real ones before they are wrapped.
    # Else models made on "meta" are not, and transformers leaves their rotary frequencies uninitialised.
    torch.utils._device._device_constructors()
    for name in ("tensor", "zeros", "ones", "empty", "empty_like"):
        setattr(torch, name, on_host(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign, assignment]


def _generators() -> None:
    torch.cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)  # type: ignore[assignment, return-value]
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()  # type: ignore[assignment, misc]
    torch.cuda.set_rng_state = torch.cuda.random.set_rng_state = (  # type: ignore[assignment]
        lambda new_state, device="cuda": torch.set_rng_state(new_state)
    )


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


@functools.cache
def install() -> None:
    """Replace the calls, once per process."""
    for patch in (_devices, _streams, _constructors, _generators, _tensor_type, _uneven_gather):
        patch()
