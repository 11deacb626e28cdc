"""Proof that engines hold the trainer's weights: hashes taken where the weights lie, and only the hashes compared.

The hash of a piece is a sum over its 16-bit digits, modulo 2^64:

    sum over rows r and columns c of  row_key[r] * column_key[c] * digit[r, c]

with odd random 64-bit keys of the *position in the Hugging Face tensor* (a float32 has two digits, and two columns). So
the hashes of disjoint pieces add up to that of their union however they were cut, position matters (a swap of two
different elements changes the sum), and bytes are compared, not floats: -0 is not 0, and NaN equals itself.

Odds: one piece with any differences keeps its hash with a probability below 2^-40 over the choice of the keys. They are
drawn anew for every sync, so that what slips through once does not slip through twice. This guards against faults, not
against an adversary.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy
import torch
from torch import Tensor

from mega_rl.bridge.reshard.execute import Read
from mega_rl.bridge.slices import Box, Slice, carry_over, extents, indices, intersect, num_elements
from mega_rl.parallel.collectives import gather_objects, together

SAMPLE_SYNCS = 16  # `bridge.verify=sample` comes round to every tensor within so many syncs
CHUNK_DIGITS = 1 << 18  # digits of a piece that are hashed at a time: their products stay in the processor's cache

Hashes = list[int]  # the hashes of a rank's cells, in the order of the cells
# Calls function(live parameters, *arguments[worker]) in every engine worker; all answers, on every rank.
Inspect = Callable[[Callable[..., Hashes], Sequence[tuple[Any, ...]]], list[Hashes]]
Sizes = Mapping[str, tuple[int, ...]]  # the sizes of the HF tensors


class EngineDiffers(RuntimeError):
    """An engine worker holds another tensor than the trainer; ``hf_name`` is the first of ``num_tensors`` such."""

    def __init__(self, version: int, rank: int, hf_name: str, num_tensors: int) -> None:
        super().__init__(
            f"after the sync of weight version {version} the engine on rank {rank} holds another {hf_name} than the "
            f"trainer ({num_tensors} tensors differ)"
        )
        self.rank, self.hf_name, self.num_tensors = rank, hf_name, num_tensors


def distinct_boxes(slices: Iterable[Slice]) -> dict[str, list[Box]]:
    """How one side cuts every tensor, copies counted once."""
    boxes: dict[str, dict[Box, None]] = defaultdict(dict)  # sets that keep the order
    for piece in slices:
        boxes[piece.hf_name][piece.hf_box] = None
    return {name: list(found) for name, found in boxes.items()}


def common_cells(mine: Iterable[Slice], theirs: Mapping[str, Sequence[Box]]) -> list[Slice]:
    """``mine`` cut along the borders of ``theirs``: both sides then hash the same boxes, whatever their layouts.

    What the other side does not hold at all stays as it is.
    """
    return [
        Slice(piece.hf_name, cell, piece.local_name, carry_over(cell, piece.hf_box, piece.local_box))
        for piece in mine
        for box in theirs.get(piece.hf_name, [piece.hf_box])
        if (cell := intersect(piece.hf_box, box)) is not None
    ]


def sampled_names(names: Iterable[str], sync: int, seed: int) -> frozenset[str]:
    """The tensors that the ``sync``-th sync checks: any ``SAMPLE_SYNCS`` syncs in a row check every tensor once."""
    order = sorted(names)
    random.Random(seed).shuffle(order)
    return frozenset(order[sync % SAMPLE_SYNCS :: SAMPLE_SYNCS])


def piece_hash(piece: Tensor, hf_box: Box, salt: int) -> Tensor:
    """The hash of one piece, an int64 scalar on its device: see the top of this file.

    Args:
        piece: [extents of hf_box], of a dtype of 2 or 4 bytes; of more than two dimensions, as a vision tower's
            convolution has them, only the first may be cut.
        hf_box: where it lies in the HF tensor.
        salt: chooses the keys; the same for all that are compared.
    """
    is_cut_once = len(hf_box) <= 2 or not any(start for start, _ in hf_box[1:])
    assert piece.dim() == len(hf_box) and is_cut_once, (piece.shape, hf_box)
    assert piece.element_size() in (2, 4), piece.dtype
    if len(hf_box) > 2:
        hf_box = (hf_box[0], (0, num_elements(hf_box[1:])))
    rows, columns = hf_box if len(hf_box) == 2 else ((0, 1), hf_box[0])
    table = piece.detach().reshape(rows[1] - rows[0], columns[1] - columns[0])
    if table.stride(-1) != 1:
        table = table.contiguous()
    digits = table.view(torch.int16)
    per_element = piece.element_size() // 2
    # Vectors have keys of their own only by column: their row key is row 0's.
    row_keys = _on(piece.device, salt, 0, *rows)
    column_keys = _on(piece.device, salt, 1, columns[0] * per_element, columns[1] * per_element)
    step = max(1, CHUNK_DIGITS // max(1, digits.shape[1]))
    total = torch.zeros((), dtype=torch.int64, device=piece.device)
    for start in range(0, digits.shape[0], step):
        sums = (digits[start : start + step] * column_keys).sum(1)
        total += (sums * row_keys[start : start + step]).sum()
    return total


def cell_hashes(cells: Sequence[Slice], pieces: Iterable[Tensor], salt: int) -> Hashes:
    """The hashes of a rank's cells; ``pieces`` are their tensors, in the same order, each [extents of its hf_box]."""
    found = [piece_hash(piece, cell.hf_box, salt) for cell, piece in zip(cells, pieces, strict=True)]
    return torch.stack(found).tolist() if found else []


def live_hashes(parameters: Mapping[str, Tensor], cells: Sequence[Slice], salt: int) -> Hashes:
    """The hashes of an engine worker's cells, read from its live fused parameters."""
    live = (parameters[c.local_name][indices(c.local_box)].reshape(extents(c.hf_box)) for c in cells)
    return cell_hashes(cells, live, salt)


def colocated(parameters: Mapping[str, Tensor], rank: int) -> Inspect:
    """``inspect`` for engine workers that live in the ranks of the default group."""

    def inspect(function: Callable[..., Hashes], arguments: Sequence[tuple[Any, ...]]) -> list[Hashes]:
        with together("hashing the engine's weights"):
            found = function(parameters, *arguments[rank])
        return gather_objects(found)

    return inspect


def check_hashes(
    sizes: Sizes,
    trainer: Sequence[tuple[Sequence[Slice], Hashes]],
    engines: Sequence[tuple[Sequence[Slice], Hashes]],
    engine_size: int,
    version: int,
) -> None:
    """Compare every copy of every cell; a pure function, so that all ranks come to one verdict.

    Args:
        sizes: of the tensors that must be there, whole: a tensor that a side does not hold is a difference.
        trainer: cells and hashes of every trainer rank.
        engines: the same of every engine worker; consecutive ``engine_size`` workers are one engine.
        version: of the weights, for the sentence.

    Raises:
        EngineDiffers: names the first tensor that differs, and the rank.
        RuntimeError: a side that does not hold the whole model, or trainer ranks whose copies differ.
    """
    reference: dict[tuple[str, Box], tuple[int, int]] = {}  # cell -> rank of the first copy, its hash
    for rank, (cells, hashes) in enumerate(trainer):
        for cell, value in zip(cells, hashes, strict=True):
            first, expected = reference.setdefault((cell.hf_name, cell.hf_box), (rank, value))
            if value != expected:
                raise RuntimeError(
                    f"weight version {version}: trainer ranks {first} and {rank} hold different copies of "
                    f"{cell.hf_name}, so that no engine could be equal to both"
                )
    _check_whole(sizes, [cell for cells, _ in trainer for cell in cells], "the trainer", version)
    wrong: dict[tuple[int, str], None] = {}
    for rank, (cells, hashes) in enumerate(engines):
        for cell, value in zip(cells, hashes, strict=True):
            known = reference.get((cell.hf_name, cell.hf_box))
            if known is None or known[1] != value:
                wrong[rank, cell.hf_name] = None
    if wrong:
        raise EngineDiffers(version, *next(iter(wrong)), len(wrong))
    for start in range(0, len(engines), engine_size):
        members = engines[start : start + engine_size]
        _check_whole(sizes, [c for cells, _ in members for c in cells], f"the engine on rank {start}", version)


class Proof:
    """Compares the trainer's Hugging Face view with live engine weights; every rank of the default group takes part."""

    def __init__(
        self,
        sizes: Sizes,
        sources: Sequence[Sequence[Slice]],
        wanted: Sequence[Sequence[Slice]],
        engine_size: int,
        is_sample: bool,
        seed: int,
    ) -> None:
        """
        Args:
            sizes: of every HF tensor that the engines must hold.
            sources: what every trainer rank holds of them.
            wanted: what every engine worker holds of them.
            engine_size: consecutive workers that form one engine.
            is_sample: check one part in ``SAMPLE_SYNCS`` of the tensors at a time; ``seed`` chooses which.
        """
        self.sizes, self.engine_size, self.is_sample, self.seed = sizes, engine_size, is_sample, seed
        held, needed = (distinct_boxes(s for slices in side for s in slices) for side in (sources, wanted))
        self.trainer_cells = [common_cells(slices, needed) for slices in sources]
        self.engine_cells = [common_cells(slices, held) for slices in wanted]
        self.num_syncs = 0

    def check(self, read: Read, rank: int, inspect: Inspect, version: int) -> int:
        """Prove one sync; collective.

        Args:
            read: as the transfer's: gives what this rank's trainer sends, casts and noise included; no collective.
            rank: of this trainer.
            inspect: looks into the live parameters of all engine workers, wherever they are.

        Returns:
            The number of tensors compared.

        Raises:
            RuntimeError: on every rank, as ``check_hashes``, or where ``read`` or ``inspect`` failed on one.
        """
        names = sampled_names(self.sizes, self.num_syncs, self.seed) if self.is_sample else frozenset(self.sizes)
        salt = (self.seed << 32) + self.num_syncs
        self.num_syncs += 1
        trainer, engines = (
            [[cell for cell in cells if cell.hf_name in names] for cells in side]
            for side in (self.trainer_cells, self.engine_cells)
        )
        hashes = _sent_hashes(trainer, read, rank, salt)
        live = inspect(live_hashes, [(cells, salt) for cells in engines])
        check_hashes(
            {name: self.sizes[name] for name in names},
            list(zip(trainer, hashes, strict=True)),
            list(zip(engines, live, strict=True)),
            self.engine_size,
            version,
        )
        return len(names)


class LoadProof:
    """Compares what engines have loaded by themselves with the trainer's tensors of the same directory; writes nothing.

    It shows what shapes cannot: an engine that rearranges a weight once it is loaded, for its kernels. The trainer's
    tensors are hashed when this is made, so that they need not be on the device beside an engine. Collective.
    """

    def __init__(
        self,
        sizes: Sizes,
        sources: Sequence[Sequence[Slice]],
        loaded: Sequence[Sequence[Slice]],
        engine_size: int,
        read: Read,
        rank: int,
    ) -> None:
        """
        Args:
            sizes: of every HF tensor that the engines must hold.
            sources: what every trainer rank holds of them.
            loaded: what every worker of the engines that load by themselves holds of them; these are the first engines.
            engine_size: consecutive workers that form one engine.
            read: gives this rank's trainer's tensors as the engines have to hold them; no collective.
            rank: of this trainer.
        """
        self._sizes, self._engine_size, self._salt = sizes, engine_size, 0
        held, needed = (distinct_boxes(s for slices in side for s in slices) for side in (sources, loaded))
        trainer = [common_cells(slices, needed) for slices in sources]
        self._engine_cells = [common_cells(slices, held) for slices in loaded]
        self._trainer = list(zip(trainer, _sent_hashes(trainer, read, rank, self._salt), strict=True))

    def difference(self, inspect: Inspect, num_workers: int) -> str | None:
        """The first tensor that an engine has loaded otherwise, in words that follow "cannot write"; None: all agree.

        Args:
            inspect: looks into the live parameters of all ``num_workers`` engine workers.
        """
        others: list[list[Slice]] = [[]] * (num_workers - len(self._engine_cells))
        live = inspect(live_hashes, [(cells, self._salt) for cells in [*self._engine_cells, *others]])
        loaded = list(zip(self._engine_cells, live, strict=False))
        try:
            check_hashes(self._sizes, self._trainer, loaded, self._engine_size, version=0)
        except EngineDiffers as found:
            return (
                f"{found.hf_name}, of which the engine on rank {found.rank} holds other values than model.path once it "
                f"is loaded ({found.num_tensors} tensors differ)"
            )
        return None


def _sent_hashes(trainer: Sequence[Sequence[Slice]], read: Read, rank: int, salt: int) -> list[Hashes]:
    """The hashes of every trainer rank's cells, on every rank. Collective."""
    with together("hashing the trainer's weights"), torch.no_grad():
        sent = (read(c.local_name, c.hf_name, c.hf_box, c.local_box) for c in trainer[rank])
        own = cell_hashes(trainer[rank], sent, salt)
    return gather_objects(own)


def _check_whole(sizes: Sizes, cells: Iterable[Slice], who: str, version: int) -> None:
    covered: dict[str, int] = defaultdict(int)
    for hf_name, box in {(cell.hf_name, cell.hf_box) for cell in cells}:
        covered[hf_name] += num_elements(box)
    for name, size in sizes.items():
        if covered[name] != num_elements(tuple((0, n) for n in size)):
            raise RuntimeError(f"weight version {version}: {who} does not hold the whole of {name}")


def _on(device: torch.device, salt: int, axis: int, start: int, end: int) -> Tensor:
    return torch.from_numpy(_keys(salt, axis, start, end)).to(device)


@lru_cache(maxsize=256)
def _keys(salt: int, axis: int, start: int, end: int) -> numpy.ndarray:
    """Odd 64-bit keys of the positions ``start`` to ``end`` of one axis: SplitMix64 (Steele et al., 2014) of each."""
    state = random.Random(f"{salt}|{axis}").getrandbits(64)
    z = numpy.arange(start, end, dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15) + numpy.uint64(state)
    z = (z ^ (z >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> numpy.uint64(31))) | numpy.uint64(1)).view(numpy.int64)
