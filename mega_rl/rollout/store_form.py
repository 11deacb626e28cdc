"""How weights lie in the stores of a run: what every version shares, and what a version has of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from mega_rl.bridge.mapping.adapter import MergedSeries, frozen
from mega_rl.bridge.reshard.proof import live_hashes
from mega_rl.bridge.series import Series, slices_of, with_neighbours
from mega_rl.bridge.slices import Slice

ALIGNMENT = 4096  # of every parameter, bytes: a page

Hashes = npt.NDArray[np.uint64]  # of the tensors of a part, in its order


class PartPlace(NamedTuple):
    """Where one parameter of a worker lies in its part of the store."""

    start: int  # bytes
    size: tuple[int, ...]


class Part:
    """How some parameters of a worker lie together: a page with the stamp, the hashes of the tensors, the parameters.

    A parameter is no larger than the slices say: rows of padding are left out.

    Args:
        slices: what an engine holds once it has taken the part; hashed there.
        stored: what lies in the part instead; None: the same.
    """

    def __init__(self, slices: Sequence[Slice], dtype: torch.dtype, stored: Sequence[Slice] | None = None) -> None:
        self.slices, self.dtype = slices, dtype
        self.names = frozenset(piece.local_name for piece in slices)  # of the engine's parameters
        numbers: dict[tuple[str, str], int] = {}
        of_slices = [numbers.setdefault((s.local_name, s.hf_name), len(numbers)) for s in slices]
        self.numbers = numbers  # (local parameter, Hugging Face tensor) -> the tensor's place among the hashes
        self._of_slices = np.array(of_slices, dtype=np.int64)  # the tensor that each slice is of
        self.places = _places(slices if stored is None else stored, dtype, start=_aligned(ALIGNMENT + 8 * len(numbers)))
        ends = (place.start + prod(place.size) * dtype.itemsize for place in self.places.values())
        self.num_bytes = _aligned(max(ends, default=ALIGNMENT))

    def parameters(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parameters that lie in the memory of such a part, by the engine's names."""
        return {
            name: memory[start : start + prod(size) * self.dtype.itemsize].view(self.dtype).view(size)
            for name, (start, size) in self.places.items()
        }

    def hashes_in(self, memory: torch.Tensor) -> Hashes:
        """Where the hashes of the tensors lie."""
        found: Hashes = memory[ALIGNMENT : ALIGNMENT + 8 * len(self.numbers)].numpy().view(np.uint64)
        return found

    def hashes_of(self, live: Mapping[str, torch.Tensor], salt: int) -> Hashes:
        """The hashes of the same tensors in an engine's live parameters."""
        found = np.zeros(len(self.numbers), dtype=np.uint64)
        of_slices = np.array(live_hashes(live, self.slices, salt), dtype=np.int64).view(np.uint64)
        np.add.at(found, self._of_slices, of_slices)  # pieces of a tensor add up
        return found


class Merge(NamedTuple):
    """An adapter that is added to a part of a worker's parameter, and its factors in the slot."""

    piece: Slice
    a: str
    b: str
    scale: float


@dataclass(frozen=True)
class WorkerPlan:
    """How the memory of one worker is divided."""

    fixed: Part  # what no version changes, frozen weights with adapters too
    slot: Part  # what differs from version to version
    merges: Mapping[str, Sequence[Merge]] = field(default_factory=dict)  # by parameter of the frozen weights

    @property
    def parts(self) -> tuple[Part, Part]:
        return self.fixed, self.slot

    def num_bytes(self, num_slots: int) -> int:
        return self.fixed.num_bytes + num_slots * self.slot.num_bytes


@dataclass(frozen=True)
class StoreForm:
    """What the stores of a run hold; the same on every node. What follows from it does not travel with it."""

    workers: tuple[tuple[Series, ...], ...]  # of one engine, by tensor rank: all that it holds
    dtype: torch.dtype
    num_slots: int  # versions that are there at a time, on the trainer's node
    salt: int  # of all digests
    has_validation: bool = False  # one more slot, for the weights of validations, whose numbers are negative
    # By worker, series of all tensors that can differ between two versions; None: all can.
    changing: tuple[tuple[Series, ...], ...] | None = None
    merged: tuple[tuple[MergedSeries, ...], ...] = ()  # by worker, weights that it adds adapters to; ``changing`` less

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_plans"}

    @cached_property
    def _plans(self) -> dict[int, WorkerPlan]:
        return {}

    def plan(self, worker: int) -> WorkerPlan:
        if worker not in self._plans:
            names, with_adapters = self._changing_parameters(worker), self.with_adapters(worker)
            of_parts: tuple[list[Slice], list[Slice]] = [], []
            for piece in slices_of(one for one in self.workers[worker] if one not in with_adapters):
                of_parts[names is None or piece.local_name in names].append(piece)
            fixed, slot = of_parts
            weights, factors = slices_of(with_adapters), slices_of(self.factors(worker))
            parts = Part(fixed, self.dtype, fixed + weights), Part(slot + weights, self.dtype, slot + factors)
            merges: dict[str, list[Merge]] = {piece.local_name: [] for piece in weights}
            for one in self.merged[worker] if self.merged else ():
                of_series = (slices_of([series]) for series in (one.weight, one.a, one.b))
                for piece, a, b in zip(*of_series, strict=True):
                    merges[piece.local_name].append(Merge(piece, a.local_name, b.local_name, one.scale))
            self._plans[worker] = WorkerPlan(*parts, merges)
        return self._plans[worker]

    def with_adapters(self, worker: int) -> list[Series]:
        """What lies frozen in the store: weights that the worker adds adapters to, and what shares parameters."""
        if not self.merged:
            return []
        patterns, series = {one.weight.hf_name for one in self.merged[worker]}, self.workers[worker]
        return with_neighbours(series, [one for one in series if one.hf_name in patterns])

    @property
    def has_mixed(self) -> bool:
        """Whether a parameter has weights that a worker adds adapters to, and others that change."""
        return self.changing is not None and any(
            one in self.changing[worker] for worker in range(len(self.workers)) for one in self.with_adapters(worker)
        )

    def factors(self, worker: int) -> list[Series]:
        """Of the adapters that the worker adds."""
        merged = self.merged[worker] if self.merged else ()
        return list(dict.fromkeys(factor for one in merged for factor in (one.a, one.b)))

    def first(self, worker: int) -> list[Series]:
        """What the first version brings into the memory of a worker."""
        with_adapters = self.with_adapters(worker)
        weights = [frozen(one) if one in with_adapters else one for one in self.workers[worker]]
        return weights + self.factors(worker)

    def later(self, worker: int) -> list[Series]:
        """What every other version brings."""
        if self.changing is None:
            return list(self.workers[worker])
        return [*self.changing[worker], *self.factors(worker)]

    def _changing_parameters(self, worker: int) -> set[str] | None:
        """The parameters with a tensor that can differ; None: all."""
        return None if self.changing is None else {s.local_name for s in slices_of(self.changing[worker])}

    @property
    def plans(self) -> list[WorkerPlan]:
        """By worker."""
        return [self.plan(worker) for worker in range(len(self.workers))]

    @property
    def all_slots(self) -> int:
        return self.num_slots + self.has_validation

    def slot(self, version: int) -> int:
        """Of a version, on the trainer's node."""
        assert version >= 0 or self.has_validation, f"a store without a place for validations has none for {version}"
        return version % self.num_slots if version >= 0 else self.num_slots

    def is_over(self, old: int, new: int) -> bool:
        """Whether the place of an old version has been taken when a new one is there; numbers of validations fall."""
        return old >= 0 and new - self.num_slots >= old if new >= 0 else new < old < 0


def _places(slices: Sequence[Slice], dtype: torch.dtype, start: int) -> dict[str, PartPlace]:
    sizes: dict[str, tuple[int, ...]] = {}
    for piece in slices:
        ends = tuple(end for _, end in piece.local_box)
        sizes[piece.local_name] = tuple(map(max, sizes.get(piece.local_name, ends), ends))
    places = {}
    for name, size in sizes.items():
        places[name] = PartPlace(start, size)
        start = _aligned(start + prod(size) * dtype.itemsize)
    return places


def _aligned(number: int) -> int:
    return -(-number // ALIGNMENT) * ALIGNMENT
