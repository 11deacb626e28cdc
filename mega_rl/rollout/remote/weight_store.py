"""Weights of several versions in the host memory of one node, in the layout of the engines that will read them.

The memory belongs to one process and has no name in any file system: other processes of the same user on the node map
it through that process's open files, and it is gone when the last of them ends, however they end. Every worker of an
engine has a part of its own, which all engines of the node share; a part has one slot per version that must be there at
a time. A slot is written anew for a later version, so a reader proves what it has read by its digest.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from mega_rl.bridge.mapping.live_check import difference
from mega_rl.bridge.reshard.deposit import Digest, summed
from mega_rl.bridge.reshard.proof import live_hashes
from mega_rl.bridge.series import Series, slices_of
from mega_rl.bridge.slices import Slice
from mega_rl.errors import InputError
from mega_rl.fleet.tickets import named

ALIGNMENT = 4096  # of every parameter, bytes: a page
LIMIT_OF_CONTAINER = Path("/sys/fs/cgroup/memory.max")


class SlotPlace(NamedTuple):
    """Where one parameter of a worker lies in its slot."""

    start: int  # bytes
    size: tuple[int, ...]


@dataclass(frozen=True)
class StoreForm:
    """What the stores of a run hold; the same on every node."""

    workers: tuple[tuple[Series, ...], ...]  # of one engine, by tensor rank: all that it holds
    dtype: torch.dtype
    num_slots: int  # versions that are there at a time
    salt: int  # of all digests
    has_validation: bool = False  # one more slot, for the weights of validations, whose numbers are negative

    @cached_property
    def slices(self) -> list[list[Slice]]:
        """By worker."""
        return [slices_of(series) for series in self.workers]

    @cached_property
    def places(self) -> list[dict[str, SlotPlace]]:
        """By worker, of every parameter; no larger than the slices say: rows of padding are left out."""
        return [_places(slices, self.dtype) for slices in self.slices]

    @cached_property
    def slot_bytes(self) -> list[int]:
        """By worker."""
        return [max(map(self._end, places.values()), default=0) for places in self.places]

    def _end(self, place: SlotPlace) -> int:
        return _aligned(place.start + prod(place.size) * self.dtype.itemsize)

    @property
    def total_bytes(self) -> int:
        return self.all_slots * sum(self.slot_bytes)

    @property
    def all_slots(self) -> int:
        return self.num_slots + self.has_validation

    def slot(self, version: int) -> int:
        assert version >= 0 or self.has_validation, f"a store without a place for validations has none for {version}"
        return version % self.num_slots if version >= 0 else self.num_slots

    def is_over(self, old: int, new: int) -> bool:
        """Whether the place of an old version has been taken when a new one is there; numbers of validations fall."""
        return old >= 0 and new - self.num_slots >= old if new >= 0 else new < old < 0


class Location(NamedTuple):
    """How processes of a node find its store."""

    process: int
    files: tuple[int, ...]  # of that process, by worker


class StoredVersion(NamedTuple):
    """A version that is whole."""

    version: int
    digests: list[Digest]  # by worker


class Store:
    """The store of this node, in the process that owns it or in one that has attached to it."""

    def __init__(self, form: StoreForm, location: Location | None = None) -> None:
        """Take the memory, or attach to what another process of this node has taken.

        Raises:
            InputError: the host has not so much memory.
            OSError: the other process is gone.
        """
        self.form = form
        self._own: list[int] = []
        if location is None:
            check_room(form, available_bytes())
            self._own = [_new_file(worker, form.all_slots * size) for worker, size in enumerate(form.slot_bytes)]
            location = Location(os.getpid(), tuple(self._own))
        self.location = location
        self._memory: dict[int, torch.Tensor] = {}  # by worker, of all its slots, uint8

    def slot(self, worker: int, version: int) -> torch.Tensor:
        """The slot that is the version's, as bytes; who has attached writes at its own risk."""
        size = self.form.slot_bytes[worker]
        if worker not in self._memory:
            self._memory[worker] = self._map(worker, size * self.form.all_slots)
        start = self.form.slot(version) * size
        return self._memory[worker][start : start + size]

    def parameters(self, worker: int, version: int) -> dict[str, torch.Tensor]:
        """Every parameter of the worker in that slot, by the engine's names."""
        memory, form = self.slot(worker, version), self.form
        return {
            name: memory[start : start + prod(size) * form.dtype.itemsize].view(form.dtype).view(size)
            for name, (start, size) in form.places[worker].items()
        }

    def close(self) -> None:
        """Give the memory back as soon as nobody has it mapped."""
        self._memory.clear()
        for file in self._own:
            os.close(file)
        self._own = []

    def _map(self, worker: int, size: int) -> torch.Tensor:
        file = os.open(f"/proc/{self.location.process}/fd/{self.location.files[worker]}", os.O_RDWR)
        try:
            return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
        finally:
            os.close(file)


def take(store: Store, worker: int, stored: StoredVersion, live: Mapping[str, torch.Tensor]) -> None:
    """Copy a version into the live parameters of an engine's worker, and prove what has been written.

    Raises:
        InputError: the parameters are not those that the store is for.
        RuntimeError: they hold something else than the trainer has put there.
    """
    form = store.form
    if words := difference(live, form.slices[worker], form.dtype):
        raise InputError(f"{named(stored.version)} cannot be written in place: {words}")
    with torch.no_grad():
        for name, tensor in store.parameters(worker, stored.version).items():
            live[name][tuple(slice(extent) for extent in tensor.shape)].copy_(tensor)
    wrong = _differing(live, form.slices[worker], form.salt, stored.digests[worker])
    if wrong:
        raise RuntimeError(
            f"the engine holds another {wrong[0]} than {named(stored.version)} of the trainer, which it has just taken "
            f"from the store ({len(wrong)} tensors differ)"
        )


def _differing(live: Mapping[str, torch.Tensor], slices: Sequence[Slice], salt: int, expected: Digest) -> list[str]:
    """The tensors of a worker with another digest."""
    hashes = live_hashes(live, slices, salt)
    found = summed({(s.local_name, s.hf_name): value} for s, value in zip(slices, hashes, strict=True))
    return sorted(hf_name for _, hf_name in (key for key in {*found, *expected} if found.get(key) != expected.get(key)))


def check_room(form: StoreForm, available: int) -> None:
    """Raise InputError if a node has not the memory of a store."""
    if form.total_bytes > available:
        raise InputError(
            f"the weight store takes {form.total_bytes / 1e9:.1f} GB of each node's host memory "
            f"({form.all_slots} versions of {sum(form.slot_bytes) / 1e9:.1f} GB), and this host has "
            f"{available / 1e9:.1f} GB left: lower rollout.max_staleness, set rollout.dtype to bfloat16, "
            f"{'set data.val_files to [], ' if form.has_validation else ''}or use hosts with more memory"
        )


def available_bytes() -> int:
    """Host memory that this process may still take, as far as it can be known."""
    found = psutil.virtual_memory().available
    limit = LIMIT_OF_CONTAINER.read_text().strip() if LIMIT_OF_CONTAINER.exists() else "max"
    if limit == "max":
        return found
    used = LIMIT_OF_CONTAINER.with_name("memory.current")
    return min(found, int(limit) - (int(used.read_text()) if used.exists() else 0))


def _places(slices: Sequence[Slice], dtype: torch.dtype) -> dict[str, SlotPlace]:
    sizes: dict[str, tuple[int, ...]] = {}
    for piece in slices:
        ends = tuple(end for _, end in piece.local_box)
        sizes[piece.local_name] = tuple(map(max, sizes.get(piece.local_name, ends), ends))
    places, start = {}, 0
    for name, size in sizes.items():
        places[name] = SlotPlace(start, size)
        start = _aligned(start + prod(size) * dtype.itemsize)
    return places


def _aligned(number: int) -> int:
    return -(-number // ALIGNMENT) * ALIGNMENT


def _new_file(worker: int, size: int) -> int:
    """Memory without a name, open in this process, of a size that nobody can change."""
    file = os.memfd_create(f"mega_rl_weights_{worker}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return file
