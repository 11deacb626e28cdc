"""The trainer's weights into the store of a node, version by version; engines fetch them from there when they want."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from mega_rl import platform
from mega_rl.bridge.mapping.adapter import MergedSeries, frozen, merged_series
from mega_rl.bridge.reshard.deposit import Deposit, Digest, HashedWrite
from mega_rl.bridge.reshard.execute import Read, Transfer, TransferCount, Write, write_into
from mega_rl.bridge.reshard.plan import Layout, compile_plan
from mega_rl.bridge.series import Series, having, with_neighbours
from mega_rl.bridge.slices import Box
from mega_rl.fleet.tickets import held_out
from mega_rl.parallel.collectives import broadcast_object, is_first, together
from mega_rl.parallel.sending import collect_to_first
from mega_rl.rollout.remote.weight_store import Store, StoredVersion
from mega_rl.rollout.sinks import SentWeights
from mega_rl.rollout.store_form import Hashes, StoreForm

SEPARATOR = "/"  # between the number of a worker and the name of its parameter
# By worker and part, the numbers of tensors there and their hashes.
Found = Sequence[tuple[npt.NDArray[np.int32], Hashes]]


@dataclass(frozen=True)
class StorePart:
    """Moves what this rank has to give; collective or not, as its plan is."""

    move: Callable[[Read, Write], TransferCount]
    is_collective: bool


class StoreSink:
    """A ``WeightSink`` whose engines fetch their weights; every method is collective over the trainer's ranks.

    The store is on the node of rank 0. If all ranks are there, each writes what it holds, every byte once, and nothing
    is sent; else the ranks of that node receive what the others hold, and write it. An update has ended when the
    version is whole in the store: no engine is waited for. Of weights that engines add adapters to, the factors are
    written, and all ranks hash the sums.
    """

    inspect = None  # every load is proved by its digest, in the engine
    keeps_versions = True

    def __init__(
        self,
        weights: SentWeights,
        engine_size: int,
        num_slots: int,
        num_here: int | None = None,
        has_validation: bool = False,
    ) -> None:
        """
        Args:
            engine_size: workers of one engine.
            num_slots: versions that engines may ask for, and one that is being written.
            num_here: trainer ranks on rank 0's node, the first ones; None: as the launcher says.
            has_validation: there is a place for the weights of validations, without which there can be none.

        Raises:
            InputError: on every rank, if that node has not so much memory.
        """
        self._weights, self._version = weights, 0
        world = dist.get_world_size() if dist.is_initialized() else 1
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        here = min(world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))  # other nodes may have more or fewer
        self._num_here = num_here or broadcast_object(here)
        self._world = world
        salt = broadcast_object(int.from_bytes(os.urandom(7), "big"))
        self.form = form_of(weights, engine_size, num_slots, salt, has_validation)
        self._store: Store | None = None
        with together("taking the memory of the weight store"):
            if is_first():
                self._store = Store(self.form)
        location = broadcast_object(self._store and self._store.location)
        with together("finding the weight store"):
            if self._rank < self._num_here:
                self._store = self._store or Store(self.form, location)
        self._whole: StorePart | None = None
        self._changing: StorePart | None = None  # what can differ from one update to the next
        self._sums: Deposit | None = None  # weights that engines add adapters to, which nobody writes
        self._num_updates = 0
        self._hashes: list[tuple[Hashes, Hashes]] = []  # by worker, of what no version changes, and of the newest slot
        self.stored: dict[int, StoredVersion] = {}  # by number of the weights, what engines may ask for; on rank 0 only

    @property
    def store(self) -> Store | None:
        """Of this rank's node; None on the other nodes."""
        return self._store

    @property
    def weight_version(self) -> int:
        return self._version

    def layout(self) -> list[list[Series]]:
        return [list(series) for series in self.form.workers]

    def connect(self, sources: Layout) -> None:
        """Plan every update; no engine takes part."""
        workers = range(len(self.form.workers))
        with_adapters = [self.form.with_adapters(worker) for worker in workers]
        names = {one.hf_name for of_worker in with_adapters for one in of_worker}
        every = [
            [*held, *(frozen(one) for one in held if isinstance(one, Series) and one.hf_name in names)]
            for held in sources
        ]
        self._whole = self._changing = self._plan(every, [self.form.first(worker) for worker in workers])
        if self.form.changing is not None:
            self._changing = self._plan(every, [self.form.later(worker) for worker in workers])
        if names:
            self._sums = self._deposit(sources, with_adapters)

    def update(self, read: Read, version: int, is_validation: bool = False) -> TransferCount:
        """Write a version over the oldest one, or a validation's over the last: nobody may ask for that any more."""
        assert self._whole is not None and self._changing is not None, "an update before connect"
        number = held_out(version) if is_validation else version
        part = self._changing if self._num_updates else self._whole
        self._num_updates += 1
        for old in [old for old in self.stored if self.form.is_over(old, number)]:
            del self.stored[old]
        if self._store is not None:  # whoever still reads what was there can see that it is over
            self._store.stamp(self.form.slot(number), 2 * self._num_updates - 1)
        write = HashedWrite(write_into(self._memory(number)), self.form.salt)
        with torch.no_grad(), nullcontext() if part.is_collective else together("writing into the weight store"):
            window = part.move(read, write)
        found = [] if self._store is None else [self._found(write.digest())]
        found += self._hash_sums(read)
        parts = collect_to_first(found, range(self._num_here if self._sums is None else self._world))
        self._version = version
        if is_first():
            self._publish(number, [one for of_rank in parts for one in of_rank])
        return window

    def begin_sampling(self) -> None:
        """Do nothing: engines fetch the weights when they want."""

    def make_room(self) -> None:
        """Do nothing: the engines have devices of their own."""

    def _hash_sums(self, read: Read) -> list[Found]:
        """Of this rank's part of the weights that engines add adapters to, with the adapters added."""
        if self._sums is None:
            return []
        hashed = HashedWrite(_write_nothing, self.form.salt)
        with torch.no_grad(), together("hashing weights with their adapters"):
            self._sums.run(read, hashed, self._weights.dtype)
        return [self._found(hashed.digest())]

    def _found(self, digest: Digest) -> Found:
        """What a digest says of an engine's tensors: frozen weights and factors are none of these."""
        plans = self.form.plans
        numbers: list[list[int]] = [[] for _ in range(2 * len(plans))]
        values: list[list[int]] = [[] for _ in numbers]
        for (name, hf_name), value in digest.items():
            worker, local_name = name.split(SEPARATOR)
            parts = plans[int(worker)].parts
            for index, part in enumerate(parts):
                if (number := part.numbers.get((local_name, hf_name))) is not None:
                    numbers[2 * int(worker) + index].append(number)
                    values[2 * int(worker) + index].append(value)
        pairs = zip(numbers, values, strict=True)
        return [(np.array(number, np.int32), np.array(value, np.uint64)) for number, value in pairs]

    def _publish(self, number: int, found: Sequence[Found]) -> None:
        """``found``: of the parts of all ranks."""
        assert self._store is not None, "rank 0 has the store"
        anew = [tuple(np.zeros(len(part.numbers), np.uint64) for part in plan.parts) for plan in self.form.plans]
        for of_rank in found:
            for index, (numbers, values) in enumerate(of_rank):
                np.add.at(anew[index // 2][index % 2], numbers, values)
        fixed = [of_parts[0] for of_parts in (anew if self._num_updates == 1 else self._hashes)]
        self._hashes = list(zip(fixed, (of_parts[1] for of_parts in anew), strict=True))
        self.stored[number] = self._store.seal(number, 2 * self._num_updates, self._hashes)

    def _memory(self, number: int) -> dict[str, torch.Tensor]:
        """The slot of these weights, by the names of ``_of_worker``; nothing on a rank without a store."""
        if self._store is None:
            return {}
        parameters = (self._store.parameters(worker, number) for worker in range(len(self.form.workers)))
        return {
            f"{worker}{SEPARATOR}{name}": tensor
            for worker, named in enumerate(parameters)
            for name, tensor in named.items()
        }

    def _plan(self, sources: Layout, of_workers: Sequence[Sequence[Series]]) -> StorePart:
        dtype = self._weights.dtype
        if self._num_here == self._world:
            deposit = self._deposit(sources, of_workers)
            return StorePart(lambda read, write: deposit.run(read, write, dtype), is_collective=False)
        destinations: list[list[Series]] = [[] for _ in sources]
        for worker, series in enumerate(_by_worker(of_workers)):
            destinations[worker % self._num_here] += series
        transfer = Transfer(
            compile_plan(sources, destinations),
            self._rank,
            self._world,
            None,
            self._weights.bucket_bytes,
            self._weights.device,
            platform.current().synchronize,
        )
        return StorePart(lambda read, write: transfer.run(read, write, dtype), is_collective=True)

    def _deposit(self, sources: Layout, of_workers: Sequence[Sequence[Series]]) -> Deposit:
        everything = [series for of_worker in _by_worker(of_workers) for series in of_worker]
        return Deposit(compile_plan([*sources, []], [*([] for _ in sources), everything]), self._rank)


def form_of(weights: SentWeights, engine_size: int, num_slots: int, salt: int, has_validation: bool) -> StoreForm:
    """The form of a store for engines of so many workers, which are sent these weights."""
    series = tuple(tuple(weights.worker_layout(engine_size, worker)) for worker in range(engine_size))

    def form(names: frozenset[str] | None, merged: tuple[tuple[MergedSeries, ...], ...] = ()) -> StoreForm:
        changing = None
        if names is not None:
            changing = tuple(tuple(with_neighbours(one, having(one, names))) for one in series)
        return StoreForm(series, weights.dtype, num_slots, salt, has_validation, changing, merged)

    if weights.merged is None or weights.changing is None:
        return form(weights.changing)
    merged = tuple(tuple(merged_series(one, weights.merged)) for one in series)
    found = form(weights.changing - weights.merged.ranks.keys(), merged)
    return form(weights.changing) if found.has_mixed else found


def _by_worker(of_workers: Sequence[Sequence[Series]]) -> list[list[Series]]:
    """The same series under names that no other worker's parameters have."""
    return [
        [replace(one, local_name=f"{worker}{SEPARATOR}{one.local_name}") for one in series]
        for worker, series in enumerate(of_workers)
    ]


def _write_nothing(local_name: str, hf_name: str, hf_box: Box, local_box: Box, piece: torch.Tensor) -> None:
    """For what is only hashed."""
