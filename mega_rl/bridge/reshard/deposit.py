"""A plan whose destinations are memory that its sources reach: nothing is sent, everybody writes its part."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

from mega_rl.bridge.reshard.execute import Read, TransferCount, Write, checked_read
from mega_rl.bridge.reshard.plan import ReshardPlan
from mega_rl.bridge.reshard.proof import piece_hash
from mega_rl.bridge.slices import Box
from mega_rl.observe.heartbeat import HEART

# (local parameter, Hugging Face tensor) -> the sum of the hashes of the pieces of the one in the other, in [0, 2**64)
Digest = dict[tuple[str, str], int]
MODULUS = 1 << 64


class HashedWrite:
    """A ``Write`` that hands on to another one and hashes what passes.

    The hashes of disjoint pieces add up to that of their union however they are cut (see ``proof``), so the digests of
    all ranks that wrote a part of a tensor add up to its own.

    Args:
        salt: chooses the keys; the same for all that are compared.
    """

    def __init__(self, write: Write, salt: int) -> None:
        self._write, self._salt = write, salt
        self._found: list[tuple[tuple[str, str], torch.Tensor]] = []

    def __call__(self, local_name: str, hf_name: str, hf_box: Box, local_box: Box, piece: torch.Tensor) -> None:
        self._found.append(((local_name, hf_name), piece_hash(piece, hf_box, self._salt)))
        self._write(local_name, hf_name, hf_box, local_box, piece)

    def digest(self) -> Digest:
        """Of all that was written so far."""
        if not self._found:
            return {}
        values = torch.stack([value for _, value in self._found]).tolist()
        return summed({key: value} for (key, _), value in zip(self._found, values, strict=True))


def summed(digests: Iterable[Digest]) -> Digest:
    """Of tensors whose pieces are in several digests."""
    total: Digest = {}
    for digest in digests:
        for key, value in digest.items():
            total[key] = (total.get(key, 0) + value) % MODULUS
    return total


class Deposit:
    """One rank's part of a plan in which no rank both gives and takes: all that it gives, written by itself."""

    def __init__(self, plan: ReshardPlan, rank: int) -> None:
        self._runs = [run for run in plan.runs_of(rank) if run.src_rank == rank]
        self._num_elements = plan.volume(rank).sent

    def run(self, read: Read, write: Write, dtype: torch.dtype) -> TransferCount:
        """Not collective: when all ranks have returned, the destination is whole."""
        start, seconds = time.perf_counter(), {"pack_s": 0.0, "write_s": 0.0}
        for run in self._runs:
            HEART.mark()
            for move in run.moves():
                begin = time.perf_counter()
                piece = checked_read(read, move, dtype)
                middle = time.perf_counter()
                write(move.dst_name, move.hf_name, move.hf_box, move.dst_box, piece)
                seconds["pack_s"] += middle - begin
                seconds["write_s"] += time.perf_counter() - middle
        return TransferCount(
            bytes_local=self._num_elements * dtype.itemsize,
            bytes_sent=0,
            bytes_received=0,
            bytes_minimum=0,
            seconds=time.perf_counter() - start,
            num_buckets=0,
            **seconds,
        )
