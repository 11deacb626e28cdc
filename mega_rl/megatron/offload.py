"""Weights, gradients and optimizer state on the host while the engine samples, and back, bit for bit.

Whole storages are copied and then emptied in place, so that every view of them (parameters, the optimizer's shards,
communication buckets) stays the tensor it was and is valid again afterwards. Megatron's own
``optimizer.offload_to_cpu`` gives tensors new storages instead, which for a float32 model leaves the optimizer stepping
on weights that are no longer the model's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from mega_rl import platform
from mega_rl.config.schema.sections import MemoryConfig
from mega_rl.megatron.optim.optimizer import chained

PARTS = ("weights", "gradients", "optimizer")


SMALLEST_PIECE = 1 << 20  # bytes of pinned memory
ALIGNMENT = 512  # bytes; where the copy of a storage begins


class HostMemory:
    """Pinned bytes in one address range as far as its user sees.

    torch takes pinned memory in powers of two, whatever is asked for: up to twice the bytes. So the range is made of
    pieces that are powers of two, as many as the binary digits of its length say; less than ``SMALLEST_PIECE`` is lost.
    """

    def __init__(self, num_bytes: int, is_pinned: bool) -> None:
        self.num_bytes = num_bytes
        self._pieces: list[tuple[int, Tensor]] = []  # where each begins
        start = 0
        for size in piece_sizes(num_bytes) if is_pinned else [num_bytes]:
            self._pieces.append((start, torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)))
            start += size

    def parts(self, start: int, num_bytes: int) -> Iterator[tuple[slice, Tensor]]:
        """The bytes from ``start`` on, in order: where each part stands in what is copied, and its memory."""
        for first, piece in self._pieces:
            begin, end = max(start, first), min(start + num_bytes, first + piece.numel())
            if begin < end:
                yield slice(begin - start, end - start), piece[begin - first : end - first]


def piece_sizes(num_bytes: int) -> list[int]:
    """Powers of two, descending, that add up to ``num_bytes`` rounded up to a multiple of ``SMALLEST_PIECE``."""
    rounded = -(-num_bytes // SMALLEST_PIECE) * SMALLEST_PIECE
    return [1 << bit for bit in reversed(range(rounded.bit_length())) if rounded >> bit & 1]


class HostStorages:
    """The storages under some tensors, moved between device and host."""

    def __init__(self) -> None:
        self._away: list[tuple[torch.UntypedStorage, int, int]] = []  # storage, its place on the host, its bytes
        self._memory = HostMemory(0, is_pinned=False)  # kept: pinned memory takes long to get

    @property
    def is_away(self) -> bool:
        return bool(self._away)

    def to_host(self, tensors: Iterable[Tensor]) -> None:
        """Copy the storages under the tensors to the host and empty them."""
        assert not self._away, "these storages are on the host already"
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        end = 0
        for storage in storages.values():
            if storage.nbytes():
                self._away.append((storage, end, storage.nbytes()))
                end += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        if end > self._memory.num_bytes:
            self._memory = HostMemory(end, is_pinned=platform.current().has_own_memory)
        for storage, start, num_bytes in self._away:
            for place, memory in self._memory.parts(start, num_bytes):
                memory.copy_(_bytes_of(storage)[place], non_blocking=True)
        platform.current().synchronize()
        for storage, _, _ in self._away:
            storage.resize_(0)

    def to_device(self) -> None:
        """Fill the storages again; does nothing if they are on the device."""
        for storage, start, num_bytes in self._away:
            storage.resize_(num_bytes)
            for place, memory in self._memory.parts(start, num_bytes):
                _bytes_of(storage)[place].copy_(memory, non_blocking=True)
        platform.current().synchronize()
        self._away = []


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class TrainerOffload:
    """The parts of the actor that may leave the device.

    Args:
        settings: ``offload`` names the parts that do.
        models: the data-parallel wrappers of this rank's model chunks.
        optimizer: whose state goes with "optimizer", float32 master weights included.
        is_active: false makes every call do nothing.
        shares_frozen: whether what is not trained is another model's, which alone moves it.
    """

    def __init__(
        self,
        settings: MemoryConfig,
        models: Sequence[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        is_active: bool,
        shares_frozen: bool = False,
    ) -> None:
        self._shares_frozen = shares_frozen
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
        own = (parameter for model in self._models for parameter in model.parameters())
        return (parameter.data for parameter in own if parameter.requires_grad or not self._shares_frozen)

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
