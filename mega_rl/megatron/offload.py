"""Weights, gradients and optimizer state on the host while the engine samples, and back, bit for bit.

Whole storages are copied and then emptied in place, so that every view of them (parameters, the optimizer's shards,
communication buckets) stays the tensor it was and is valid again afterwards. Megatron's own
``optimizer.offload_to_cpu`` gives tensors new storages instead, which for a float32 model leaves the optimizer stepping
on weights that are no longer the model's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from mega_rl import platform
from mega_rl.config.schema import MemoryConfig
from mega_rl.megatron.optimizer import chained

PARTS = ("weights", "gradients", "optimizer")


class HostStorages:
    """The storages under some tensors, moved between device and host."""

    def __init__(self) -> None:
        self._away: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._spare: dict[int, list[Tensor]] = defaultdict(list)  # bytes -> pinned memory, which takes long to get

    @property
    def is_away(self) -> bool:
        return bool(self._away)

    def to_host(self, tensors: Iterable[Tensor]) -> None:
        """Copy the storages under the tensors to the host and empty them."""
        assert not self._away, "these storages are on the host already"
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        self._away = [(storage, self._host_copy(storage)) for storage in storages.values() if storage.nbytes()]
        platform.current().synchronize()
        for storage, _ in self._away:
            storage.resize_(0)

    def to_device(self) -> None:
        """Fill the storages again; does nothing if they are on the device."""
        for storage, copy in self._away:
            storage.resize_(copy.numel())
            _bytes_of(storage).copy_(copy, non_blocking=True)
        platform.current().synchronize()
        for _, copy in self._away:
            self._spare[copy.numel()].append(copy)
        self._away = []

    def _host_copy(self, storage: torch.UntypedStorage) -> Tensor:
        spare = self._spare[storage.nbytes()]
        pinned = platform.current().has_own_memory
        copy = spare.pop() if spare else torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
        return copy.copy_(_bytes_of(storage), non_blocking=True)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class TrainerOffload:
    """The parts of the actor that may leave the device.

    Args:
        settings: ``offload`` names the parts that do.
        models: the data-parallel wrappers of this rank's model chunks.
        optimizer: whose state goes with "optimizer", float32 master weights included.
        is_active: false makes every call do nothing.
    """

    def __init__(
        self,
        settings: MemoryConfig,
        models: Sequence[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        is_active: bool,
    ) -> None:
        self._parts = frozenset(settings.offload) if is_active else frozenset()
        self._models, self._optimizer = models, optimizer
        self._storages = {"weights": HostStorages(), "optimizer": HostStorages()}
        self._has_gradients = True

    @property
    def is_complete(self) -> bool:
        """Whether everything is on the device."""
        return self._has_gradients and not any(storages.is_away for storages in self._storages.values())

    def to_host(self, *parts: str) -> None:
        """Move those of the named parts that ``settings`` names to the host; gradients are dropped, not kept."""
        assert set(parts) <= set(PARTS), parts
        wanted = self._parts.intersection(parts)
        if "gradients" in wanted and self._has_gradients:
            for model in self._models:
                model.offload_grad_buffers(synchronize=False, empty_cache=False)
            self._has_gradients = False
        for part, tensors in (("optimizer", self._optimizer_tensors), ("weights", self._weights)):
            if part in wanted and not self._storages[part].is_away:
                self._storages[part].to_host(tensors())
        if wanted:
            platform.current().empty_cache()

    def to_device(self, *parts: str) -> None:
        """Bring the named parts back, or all parts if none is named; gradients come back as zeros."""
        assert set(parts) <= set(PARTS), parts
        for part, storages in self._storages.items():
            if not parts or part in parts:
                storages.to_device()
        if not self._has_gradients and (not parts or "gradients" in parts):
            for model in self._models:
                model.restore_grad_buffers(synchronize=False)
            self._has_gradients = True

    def _weights(self) -> Iterator[Tensor]:
        return (parameter.data for model in self._models for parameter in model.parameters())

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        """Masters and moments; a float32 model's weights are their own masters and not among them."""
        weights = {tensor.untyped_storage().data_ptr() for tensor in self._weights()}
        device = next(self._models[0].parameters()).device
        for part in chained(self._optimizer):
            tensors = [p.data for group in part.optimizer.param_groups for p in group["params"]]
            tensors += [v for state in part.optimizer.state.values() for v in state.values() if torch.is_tensor(v)]
            for tensor in tensors:
                if tensor.device == device and tensor.untyped_storage().data_ptr() not in weights:
                    yield tensor
