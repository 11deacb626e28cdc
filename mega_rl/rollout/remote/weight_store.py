"""Weights of several versions in the host memory of one node, in the layout of the engines that will read them.

The memory belongs to one process and has no name in any file system: other processes of the same user on the node map
it through that process's open files, and it is gone when the last of them ends, however they end. Every worker of an
engine has memory of its own, which all engines of the node share: one part with the parameters that are the same in
all versions, and one slot for every version that must be there at a time. Each begins with a stamp, which changes when
it is written anew, and with the hashes of its tensors. A reader has asked for a stamp and knows the digest of the
hashes, so it tells weights that newer ones have replaced from weights that are wrong.

Weights with adapters may lie there frozen, in the part that is the same in all versions, and a slot then has the
adapters' factors: the reader adds them, and the hashes are those of the sums, which the trainer has made too.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from mega_rl.bridge.lora import Factors, merge_into
from mega_rl.bridge.mapping.live_check import difference
from mega_rl.bridge.slices import extents, indices
from mega_rl.errors import InputError
from mega_rl.fleet.tickets import named
from mega_rl.platform.transfers import HostCopies
from mega_rl.rollout.store_form import Hashes, StoreForm, WorkerPlan

FIXED_STAMP = 2  # of what no version changes, once it is there
PROOF_BYTES = 16  # of the digest of a part's hashes
LIMIT_OF_CONTAINER = Path("/sys/fs/cgroup/memory.max")


class Location(NamedTuple):
    """How processes of a node find its store, and a version in it."""

    process: int
    files: tuple[int, ...]  # of that process, by worker
    slot: int = 0


class WantedVersion(NamedTuple):
    """What one worker of an engine is to load."""

    version: int
    stamp: int
    proofs: tuple[bytes, bytes]  # digests of the hashes of what no version changes, and of the slot


class StoredVersion(NamedTuple):
    """A version that is whole."""

    version: int
    stamp: int
    proofs: tuple[tuple[bytes, bytes], ...]  # by worker

    def of(self, worker: int) -> WantedVersion:
        return WantedVersion(self.version, self.stamp, self.proofs[worker])


class RewrittenError(Exception):
    """Newer weights have taken the place of those that were being read: the reader holds some of both."""


class Store:
    """The store of this node, in the process that owns it or in one that has attached to it."""

    def __init__(self, form: StoreForm, location: Location | None = None, num_slots: int | None = None) -> None:
        """Take the memory, or attach to what another process of this node has taken.

        Args:
            num_slots: of a store whose memory is taken here; None: those of the trainer's node.

        Raises:
            InputError: the host has not so much memory.
            OSError: the other process is gone.
        """
        self.form = form
        self._own: list[int] = []
        if location is None:
            num_slots = form.all_slots if num_slots is None else num_slots
            check_room(form, available_bytes(), num_slots)
            self._own = [_new_file(worker, plan.num_bytes(num_slots)) for worker, plan in enumerate(form.plans)]
            location = Location(os.getpid(), tuple(self._own))
        self.location = location
        self._memory: dict[int, torch.Tensor] = {}  # by worker, all of it, uint8

    def location_of(self, version: int) -> Location:
        """Of a version on the trainer's node."""
        return self.location._replace(slot=self.form.slot(version))

    def memory(self, worker: int, slot: int | None) -> torch.Tensor:
        """A slot as bytes, or what no version changes (None); who has attached writes at its own risk."""
        plan = self.form.plan(worker)
        if worker not in self._memory:
            self._memory[worker] = self._map(worker)
        if slot is None:
            return self._memory[worker][: plan.fixed.num_bytes]
        start = plan.num_bytes(slot)
        return self._memory[worker][start : start + plan.slot.num_bytes]

    def parameters(self, worker: int, version: int) -> dict[str, torch.Tensor]:
        """Every parameter of the worker as a version has it, by the engine's names; on the trainer's node."""
        fixed, slot = self.form.plan(worker).parts
        in_slot = slot.parameters(self.memory(worker, self.form.slot(version)))
        return fixed.parameters(self.memory(worker, None)) | in_slot

    def stamp(self, slot: int | None, value: int) -> None:
        """Say of a slot, in all workers' memory, what is in it from now on; an odd number: something half written."""
        for worker in range(len(self.form.workers)):
            self.memory(worker, slot)[:8].view(torch.int64)[0] = value

    def stamp_of(self, worker: int, slot: int | None) -> int:
        return int(self.memory(worker, slot)[:8].view(torch.int64)[0])

    def seal(self, version: int, stamp: int, hashes: Iterable[tuple[Hashes, Hashes]]) -> StoredVersion:
        """A version has been written, whose hashes by worker these are; on the trainer's node."""
        slot, proofs = self.form.slot(version), []
        for worker, of_parts in enumerate(hashes):
            for part, number, found in zip(self.form.plan(worker).parts, (None, slot), of_parts, strict=True):
                part.hashes_in(self.memory(worker, number))[:] = found
            proofs.append((_proof(of_parts[0]), _proof(of_parts[1])))
        self.stamp(None, FIXED_STAMP)
        self.stamp(slot, stamp)
        return StoredVersion(version, stamp, tuple(proofs))

    def close(self) -> None:
        """Give the memory back as soon as nobody has it mapped."""
        self._memory.clear()
        for file in self._own:
            os.close(file)
        self._own = []

    def _map(self, worker: int) -> torch.Tensor:
        file = os.open(f"/proc/{self.location.process}/fd/{self.location.files[worker]}", os.O_RDWR)
        try:
            return torch.frombuffer(mmap.mmap(file, os.fstat(file).st_size), dtype=torch.uint8)
        finally:
            os.close(file)


def take(
    store: Store,
    worker: int,
    slot: int,
    wanted: WantedVersion,
    live: Mapping[str, torch.Tensor],
    has_fixed: bool = False,
    copies: HostCopies | None = None,
) -> int:
    """Copy a version into the live parameters of an engine's worker, add adapters, and prove what it has then.

    Args:
        slot: that the version is in.
        has_fixed: they hold what no version changes already, proved.
        copies: ways to their device; None: they are on the host.

    Returns:
        The bytes that were copied.

    Raises:
        InputError: the parameters are not those that the store is for.
        RewrittenError: the version has been replaced meanwhile.
        RuntimeError: they hold something else than the trainer has put there.
    """
    form, plan, copies = store.form, store.form.plan(worker), copies or HostCopies(torch.device("cpu"))
    if not has_fixed and (words := difference(live, [*plan.fixed.slices, *plan.slot.slices], form.dtype)):
        raise InputError(f"{named(wanted.version)} cannot be written in place: {words}")
    num_bytes = 0
    for part, number, proof in zip(plan.parts, (None, slot), wanted.proofs, strict=True):
        if part is plan.fixed and has_fixed:
            continue
        memory = store.memory(worker, number)
        with torch.no_grad():
            for name, tensor in part.parameters(memory).items():
                if name in part.names and name not in plan.merges:
                    copies.copy(live[name][tuple(slice(extent) for extent in tensor.shape)], tensor)
                    num_bytes += tensor.nbytes
            if part is plan.slot:
                num_bytes += _merge(plan, store.memory(worker, None), memory, live, copies)
            copies.finish()
        found = part.hashes_of(live, form.salt)
        if _proof(found) == proof:
            continue
        if store.stamp_of(worker, slot) != wanted.stamp:
            raise RewrittenError
        wrong = sorted({hf for (_, hf), i in part.numbers.items() if found[i] != part.hashes_in(memory)[i]})
        what = wrong[0] if wrong else "set of hashes"
        raise RuntimeError(
            f"the engine holds another {what} than {named(wanted.version)} of the trainer, which it has just taken "
            f"from the store ({len(wrong)} tensors differ)"
        )
    return num_bytes


def _merge(
    plan: WorkerPlan, fixed: torch.Tensor, slot: torch.Tensor, live: Mapping[str, torch.Tensor], copies: HostCopies
) -> int:
    """Copy the frozen weights and add the adapters of a slot to them, as ``bridge.lora.merged``; returns the bytes."""
    if not plan.merges:
        return 0
    weights, factors, num_bytes = plan.fixed.parameters(fixed), plan.slot.parameters(slot), 0
    for name, merges in plan.merges.items():
        copies.copy(live[name], weights[name])
        num_bytes += weights[name].nbytes
        for piece, a, b, scale in merges:
            weight = live[name][indices(piece.local_box)].view(extents(piece.hf_box))
            merge_into(weight, Factors(factors[a], factors[b], scale))
            num_bytes += factors[a].nbytes + factors[b].nbytes
    return num_bytes


def _proof(hashes: Hashes) -> bytes:
    return hashlib.sha256(hashes.tobytes()).digest()[:PROOF_BYTES]


def check_room(form: StoreForm, available: int, num_slots: int) -> None:
    """Raise InputError if a node has not the memory of a store with so many slots."""
    needed = sum(plan.num_bytes(num_slots) for plan in form.plans)
    if needed <= available:
        return
    of_slot = sum(plan.slot.num_bytes for plan in form.plans)
    fixed = needed - num_slots * of_slot
    beside = f" and {fixed / 1e9:.1f} GB that no step changes" if form.changing is not None else ""
    is_trainers = num_slots == form.all_slots
    fewer = "lower rollout.max_staleness, " if is_trainers else ""
    fewer += "set data.val_files to [], " if is_trainers and form.has_validation else ""
    raise InputError(
        f"the weight store takes {needed / 1e9:.1f} GB of this node's host memory "
        f"({num_slots} versions of {of_slot / 1e9:.1f} GB{beside}), and this host has "
        f"{available / 1e9:.1f} GB left: {fewer}set rollout.dtype to bfloat16, or use hosts with more memory"
    )


def available_bytes() -> int:
    """Host memory that this process may still take, as far as it can be known."""
    found = psutil.virtual_memory().available
    limit = LIMIT_OF_CONTAINER.read_text().strip() if LIMIT_OF_CONTAINER.exists() else "max"
    if limit == "max":
        return found
    used = LIMIT_OF_CONTAINER.with_name("memory.current")
    return min(found, int(limit) - (int(used.read_text()) if used.exists() else 0))


def _new_file(worker: int, size: int) -> int:
    """Memory without a name, open in this process, of a size that nobody can change."""
    file = os.memfd_create(f"mega_rl_weights_{worker}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return file
