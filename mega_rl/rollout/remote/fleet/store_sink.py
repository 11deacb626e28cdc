"""The trainer's weights into the store of a node, version by version; engines fetch them from there when they want."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from mega_rl import platform
from mega_rl.bridge.reshard.deposit import Deposit, Digest, HashedWrite, summed
from mega_rl.bridge.reshard.execute import Read, Transfer, TransferCount, Write, write_into
from mega_rl.bridge.reshard.plan import Layout, compile_plan
from mega_rl.bridge.series import Series, having
from mega_rl.fleet.tickets import held_out
from mega_rl.parallel.collectives import broadcast_object, gather_objects, is_first, together
from mega_rl.rollout.remote.weight_store import Store, StoredVersion, StoreForm
from mega_rl.rollout.sinks import SentWeights

SEPARATOR = "/"  # between the number of a worker and the name of its parameter


@dataclass(frozen=True)
class StorePart:
    """Moves what this rank has to give; collective or not, as its plan is."""

    move: Callable[[Read, Write], TransferCount]
    is_collective: bool


class StoreSink:
    """A ``WeightSink`` whose engines fetch their weights; every method is collective over the trainer's ranks.

    The store is on the node of rank 0. If all ranks are there, each writes what it holds, every byte once, and nothing
    is sent; else the ranks of that node receive what the others hold, and write it. An update has ended when the
    version is whole in the store: no engine is waited for.
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
        self._num_here = num_here or min(world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
        self._world = world
        series = tuple(tuple(weights.worker_layout(engine_size, worker)) for worker in range(engine_size))
        salt = broadcast_object(int.from_bytes(os.urandom(7), "big"))
        self.form = StoreForm(series, weights.dtype, num_slots, salt, has_validation)
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
        self._filled: set[int] = set()  # slots that hold every tensor of some version
        # by worker, of the newest version and of the newest validation; on rank 0 only
        self._digests: list[list[Digest]] = [[{} for _ in series] for _ in range(2)]
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
        wanted = [[_of_worker(one, worker) for one in series] for worker, series in enumerate(self.form.workers)]
        self._whole = self._changing = self._plan(sources, wanted)
        if (names := self._weights.changing) is not None:
            self._changing = self._plan(sources, [having(series, names) for series in wanted])

    def update(self, read: Read, version: int, is_validation: bool = False) -> TransferCount:
        """Write a version over the oldest one, or a validation's over the last: nobody may ask for that any more."""
        assert self._whole is not None and self._changing is not None, "an update before connect"
        number = held_out(version) if is_validation else version
        slot = self.form.slot(number)
        part = self._changing if slot in self._filled else self._whole
        for old in [old for old in self.stored if self.form.is_over(old, number)]:
            del self.stored[old]
        write = HashedWrite(write_into(self._memory(number)), self.form.salt)
        with torch.no_grad(), nullcontext() if part.is_collective else together("writing into the weight store"):
            window = part.move(read, write)
        parts = gather_objects(write.digest())
        self._filled.add(slot)
        self._version = version
        if is_first():
            self._publish(number, summed(parts))
        return window

    def begin_sampling(self) -> None:
        """Do nothing: engines fetch the weights when they want."""

    def make_room(self) -> None:
        """Do nothing: the engines have devices of their own."""

    def _publish(self, number: int, found: Digest) -> None:
        digests = self._digests[number < 0]
        for (name, hf_name), value in found.items():
            worker, local_name = name.split(SEPARATOR)
            digests[int(worker)][local_name, hf_name] = value
        self.stored[number] = StoredVersion(number, [dict(digest) for digest in digests])

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

    def _plan(self, sources: Layout, wanted: Sequence[Sequence[Series]]) -> StorePart:
        dtype = self._weights.dtype
        if self._num_here == self._world:
            everything = [series for of_worker in wanted for series in of_worker]
            deposit = Deposit(compile_plan([*sources, []], [*([] for _ in sources), everything]), self._rank)
            return StorePart(lambda read, write: deposit.run(read, write, dtype), is_collective=False)
        destinations: list[list[Series]] = [[] for _ in sources]
        for worker, series in enumerate(wanted):
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


def _of_worker(series: Series, worker: int) -> Series:
    """The same series under a name that no other worker's parameter has."""
    return replace(series, local_name=f"{worker}{SEPARATOR}{series.local_name}")
