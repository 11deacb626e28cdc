"""Copies between host and device that run beside the device's own work, where it can do both at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

# Elements of the optimizer's state that are on the device together while it is kept on the host.
WINDOW_ELEMENTS = 1 << 23
STAGE_BYTES = 1 << 26  # of a piece of pinned memory through which host memory that is not pinned goes to the device
NUM_SLOTS = 2  # windows that are on the device at once: one is computed on while another one comes or goes

Kinds = Mapping[str, Tensor]  # what is moved together, by name


class Windows:
    """Memory of the device through which ranges of host tensors pass, one after the other.

    While the device computes on one window the next one is fetched and the last one stored, each on a stream of its
    own. On a CPU the same steps are plain copies.

    Args:
        device: that computes.
        num_elements: of the largest window.
        dtypes: of what a window consists of, by name.
    """

    def __init__(self, device: torch.device, num_elements: int, dtypes: Mapping[str, torch.dtype]) -> None:
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._slots = [
            {name: torch.empty(num_elements, dtype=dtype, device=device) for name, dtype in dtypes.items()}
            for _ in range(NUM_SLOTS if self._module else 1)
        ]
        self._stored: list[Any] = [None] * len(self._slots)  # events: the slot may be filled anew
        self._next = 0
        self._fetch: Any = None
        self._store: Any = None
        if self._module:
            self._fetch, self._store = self._module.Stream(), self._module.Stream()
            # The memory of the slots may still be read by work that was queued before.
            self._fetch.wait_stream(self._module.current_stream())

    @contextmanager
    def on_device(self, hosts: Kinds) -> Iterator[Kinds]:
        """Copies of ranges of host tensors; what is written into them is in the host tensors after ``finish``."""
        number = self._next % len(self._slots)
        self._next += 1
        views = {name: self._slots[number][name][: host.numel()] for name, host in hosts.items()}
        with self._on(self._fetch):
            if self._stored[number] is not None:
                self._fetch.wait_event(self._stored[number])
            for name, host in hosts.items():
                views[name].copy_(host, non_blocking=True)
        if self._module:
            self._module.current_stream().wait_stream(self._fetch)
        yield views
        if self._module:
            self._store.wait_stream(self._module.current_stream())
        with self._on(self._store):
            for name, host in hosts.items():
                host.copy_(views[name], non_blocking=True)
            if self._module:
                self._stored[number] = self._store.record_event()

    def finish(self) -> None:
        """Wait until the host tensors have what was written."""
        if self._module:
            self._module.current_stream().wait_stream(self._store)
            self._store.synchronize()

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        found: AbstractContextManager[Any] = self._module.stream(stream) if self._module else nullcontext()
        return found


class HostCopies:
    """Copies of host memory that is not pinned to a device, by way of pinned memory.

    The device copies one piece while the host fills the next; by itself it would wait for the host at every piece.
    On a CPU they are plain copies.
    """

    def __init__(self, device: torch.device, num_bytes: int = STAGE_BYTES) -> None:
        """``num_bytes``: of a piece."""
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._stages = [
            torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(NUM_SLOTS if self._module else 0)
        ]
        self._free: list[Any] = [None] * len(self._stages)  # events: the piece may be filled anew
        self._next = 0

    def copy(self, into: Tensor, source: Tensor) -> None:
        """``source`` [as into], on the host, must not change before ``finish``."""
        if not self._stages or not into.is_contiguous() or not source.is_contiguous():
            into.copy_(source)
            return
        step = self._stages[0].numel() // source.element_size()
        for part, host in zip(into.view(-1).split(step), source.view(-1).split(step), strict=True):
            number = self._next % len(self._stages)
            self._next += 1
            if self._free[number] is not None:
                self._free[number].synchronize()
            stage = self._stages[number][: host.nbytes].view(host.dtype)
            stage.copy_(host)
            part.copy_(stage, non_blocking=True)
            self._free[number] = self._module.current_stream().record_event()

    def finish(self) -> None:
        """Wait until all copies have been made."""
        for event in self._free:
            if event is not None:
                event.synchronize()
