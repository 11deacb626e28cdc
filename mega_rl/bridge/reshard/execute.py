"""A plan carried out over a process group, bucket by bucket, with a count of what was moved."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mega_rl.bridge.reshard.buckets import Bucket, Schedule, schedule
from mega_rl.bridge.reshard.plan import ReshardPlan
from mega_rl.bridge.reshard.runs import Move
from mega_rl.bridge.slices import Box, extents, indices, num_elements
from mega_rl.observe.heartbeat import HEART

Read = Callable[[str, str, Box, Box], torch.Tensor]  # (local_name, hf_name, hf_box, local_box) -> [extents of the box]
Write = Callable[[str, str, Box, Box, torch.Tensor], None]  # the same names and boxes of the destination, and the piece


def write_into(parameters: Mapping[str, torch.Tensor]) -> Write:
    """A ``Write`` that copies every piece to its place in these parameters, by local name."""

    def write(local_name: str, hf_name: str, hf_box: Box, local_box: Box, piece: torch.Tensor) -> None:
        parameters[local_name][indices(local_box)].copy_(piece)

    return write


def _do_not_wait() -> None:
    """Stands for a device that never works behind the host's back."""


@dataclass(frozen=True)
class TransferCount:
    """What one rank moved in one run, and where its time went.

    The device is waited for at both ends of the run, so that ``seconds`` is true everywhere. Between them it is not, or
    nothing would overlap: if the device works behind the host's back, its time counts when the host waits for it next.
    """

    bytes_local: int  # copied within this rank
    bytes_sent: int
    bytes_received: int
    bytes_minimum: int  # distinct bytes that this rank had to receive; equal to bytes_received
    seconds: float
    num_buckets: int  # collective exchanges, the same on every rank
    pack_s: float = 0.0  # pieces into send buffers, a cast or noise included
    transfer_s: float = 0.0  # waiting for exchanges: what packing and writing did not hide
    write_s: float = 0.0  # local copies, and received pieces into place


class Transfer:
    """Carries out one plan; every rank of the group constructs it and calls the same methods in the same order."""

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        world_size: int,
        group: dist.ProcessGroup | None,
        bucket_bytes: int,
        device: torch.device | str = "cpu",
        synchronize: Callable[[], None] = _do_not_wait,
    ) -> None:
        """
        Args:
            rank: this process in the plan and in the group.
            bucket_bytes: limit for the send and receive buffers of the two exchanges that are under way at a time.
            device: where the buffers of the group lie.
            synchronize: waits for that device; ``run`` calls it at both ends. A CPU needs none.
        """
        assert world_size == plan.num_ranks, f"the plan is for {plan.num_ranks} ranks, the group has {world_size}"
        self.plan, self.rank, self.world_size, self.group = plan, rank, world_size, group
        self.bucket_bytes, self.device, self._synchronize = bucket_bytes, torch.device(device), synchronize
        self._volume = plan.volume(rank)
        self._schedules: dict[int, Schedule] = {}  # element size -> the schedule of the whole plan

    def run(self, read: Read, write: Write, dtype: torch.dtype) -> TransferCount:
        """Moves every piece of the plan; collective.

        ``read`` returns tensors of ``dtype``: a cast or noise is applied once, by the source. The tensor that ``write``
        gets is valid only during the call.
        """
        self._synchronize()
        start = time.perf_counter()
        if dtype.itemsize not in self._schedules:
            self._schedules[dtype.itemsize] = self._schedule(self.plan, dtype.itemsize)
        whole = self._schedules[dtype.itemsize]
        clock = self._move(whole, read, write, dtype)
        self._synchronize()
        v, size = self._volume, dtype.itemsize
        return TransferCount(
            bytes_local=size * v.local,
            bytes_sent=size * v.sent,
            bytes_received=size * v.received,
            bytes_minimum=size * v.minimum,
            seconds=time.perf_counter() - start,
            num_buckets=whole.num_buckets,
            **clock.seconds,
        )

    def stream(self, read: Read, hf_names: Sequence[str], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole HF tensors one at a time in the order given; collective: every rank must exhaust the iterator.

        For plans whose destinations are ``full_series``. A rank that is no destination takes part and is given nothing.
        Holds at most ``bucket_bytes`` of whole tensors, or the largest one, and one exchange.
        """
        sizes = {name: self.plan.wanted_box(name) for name in hf_names}
        group: list[str] = []
        for i, name in enumerate(hf_names):
            group.append(name)
            following = hf_names[i + 1] if i + 1 < len(hf_names) else None
            total = sum(num_elements(sizes[n]) for n in group) * dtype.itemsize
            if following is None or total + num_elements(sizes[following]) * dtype.itemsize > self.bucket_bytes:
                yield from self._gather(read, group, sizes, dtype)
                group = []

    def _gather(
        self, read: Read, names: Sequence[str], sizes: dict[str, Box], dtype: torch.dtype
    ) -> Iterator[tuple[str, torch.Tensor]]:
        plan = self.plan.select(names)
        here = {name for run in plan.runs_of(self.rank) if run.dst_rank == self.rank for name in run.hf_names()}
        wanted = [name for name in names if name in here]
        full = {name: torch.empty(extents(sizes[name]), dtype=dtype, device=self.device) for name in wanted}

        def write(local_name: str, hf_name: str, hf_box: Box, local_box: Box, piece: torch.Tensor) -> None:
            full[hf_name][indices(local_box)].copy_(piece)

        self._move(self._schedule(plan, dtype.itemsize), read, write, dtype)
        for name in wanted:
            yield name, full.pop(name)

    def _schedule(self, plan: ReshardPlan, element_size: int) -> Schedule:
        # Half of the memory: one bucket is packed while another is under way.
        return schedule(plan, self.rank, max(1, self.bucket_bytes // (2 * element_size)))

    def _move(self, whole: Schedule, read: Read, write: Write, dtype: torch.dtype) -> _Clock:
        """Packs the next exchange while one is under way, and writes what came while the next one is."""
        clock = _Clock()
        buckets = whole.buckets()
        sizes = [sum((*b.send_sizes().values(), *b.receive_sizes().values())) for b in buckets]
        memory = [torch.empty(max(sizes[i::2], default=0), dtype=dtype, device=self.device) for i in range(2)]
        copies = (move for run in whole.copies for move in run.moves())
        before: _Exchange | None = None
        for i, bucket in enumerate(buckets):
            HEART.mark()
            with clock("pack_s"):
                exchange = _Exchange(bucket, memory[i % 2], self.world_size)
                exchange.pack(read, dtype)
            if before is not None:
                with clock("transfer_s"):
                    before.wait()
            exchange.start(self.group)
            with clock("write_s"):
                if before is None:
                    _copy_local(copies, read, write, dtype)
                else:
                    before.write(write)
            before = exchange
        if before is None:
            with clock("write_s"):
                _copy_local(copies, read, write, dtype)
            return clock
        with clock("transfer_s"):
            before.wait()
        with clock("write_s"):
            before.write(write)
        return clock


class _Exchange:
    """One bucket between its packing and its writing, in memory that is reused by the exchange after the next."""

    def __init__(self, bucket: Bucket, memory: torch.Tensor, world_size: int) -> None:
        self.bucket = bucket
        sent, received = bucket.send_sizes(), bucket.receive_sizes()
        self.send_sizes = [sent.get(rank, 0) for rank in range(world_size)]
        self.receive_sizes = [received.get(rank, 0) for rank in range(world_size)]
        num_sent, num_received = sum(self.send_sizes), sum(self.receive_sizes)
        self.outgoing, self.incoming = memory[: num_sent + num_received].split([num_sent, num_received])
        self._work: dist.Work | None = None

    def pack(self, read: Read, dtype: torch.dtype) -> None:
        for p, part in _parts(self.outgoing, self.bucket.sends()):
            part.copy_(checked_read(read, p, dtype))

    def start(self, group: dist.ProcessGroup | None) -> None:
        sizes = self.receive_sizes, self.send_sizes
        self._work = dist.all_to_all_single(self.incoming, self.outgoing, *sizes, group=group, async_op=True)

    def wait(self) -> None:
        assert self._work is not None, "an exchange that has not begun"
        self._work.wait()

    def write(self, write: Write) -> None:
        for p, part in _parts(self.incoming, self.bucket.receives()):
            write(p.dst_name, p.hf_name, p.hf_box, p.dst_box, part)


class _Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds = {"pack_s": 0.0, "transfer_s": 0.0, "write_s": 0.0}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start


def _copy_local(copies: Iterable[Move], read: Read, write: Write, dtype: torch.dtype) -> None:
    for p in copies:
        write(p.dst_name, p.hf_name, p.hf_box, p.dst_box, checked_read(read, p, dtype))


def _parts(flat: torch.Tensor, pieces: Iterable[Move]) -> Iterator[tuple[Move, torch.Tensor]]:
    """Every piece with its view of the flat buffer, in its extents; together they are the whole buffer."""
    start = 0
    for p in pieces:
        end = start + p.num_elements
        yield p, flat[start:end].view(extents(p.hf_box))
        start = end
    assert start == flat.numel(), f"pieces of {start} elements in a buffer of {flat.numel()}"


def checked_read(read: Read, p: Move, dtype: torch.dtype) -> torch.Tensor:
    """One piece, of the shape and dtype that the plan says."""
    tensor = read(p.src_name, p.hf_name, p.hf_box, p.src_box)
    assert tensor.shape == extents(p.hf_box) and tensor.dtype == dtype, (
        f"{p.hf_name}: the source gave {tuple(tensor.shape)} {tensor.dtype}, not {extents(p.hf_box)} {dtype}"
    )
    return tensor
