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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, TypeVar

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from mega_rl.bridge.reshard.execute import Read
from mega_rl.bridge.reshard.held_pieces import LARGEST, HeldPieces, Numbers, lowest, total
from mega_rl.bridge.series import Series, slices_of
from mega_rl.bridge.slices import Box, Slice, carry_over, extents, indices, intersect, num_elements
from mega_rl.parallel.collectives import together

SAMPLE_SYNCS = 16  # `bridge.verify=sample` comes round to every tensor within so many syncs
# Digits of a piece that are hashed at a time. On a processor their products stay in its cache; a device is told so
# seldom what to do that it is not kept waiting, and the products take 128 MiB of it.
CHUNK_DIGITS = 1 << 18
CHUNK_DIGITS_ON_DEVICE = 1 << 24
NUM_KEPT_KEYS = 32  # ranges of rows or columns whose keys are kept on the device

Hashes = list[int]  # the hashes of a rank's cells, in the order of the cells
# Calls function(live parameters, *arguments[worker]) in every engine worker. Collective; returns worker -> answer, of
# those that answer this rank: over all ranks every worker once.
Inspect = Callable[[Callable[..., Any], Sequence[tuple[Any, ...]]], dict[int, Any]]
Sizes = Mapping[str, tuple[int, ...]]  # the sizes of the HF tensors
Answer = TypeVar("Answer")


class EngineDiffers(RuntimeError):
    """An engine worker holds another tensor than the trainer; ``hf_name`` is the first of ``num_tensors`` such."""

    def __init__(self, version: int, rank: int, hf_name: str, num_tensors: int) -> None:
        super().__init__(
            f"after the sync of weight version {version} the engine on rank {rank} holds another {hf_name} than the "
            f"trainer ({num_tensors} tensors differ)"
        )
        self.rank, self.hf_name, self.num_tensors = rank, hf_name, num_tensors


def part_of(piece: Slice, box: Box) -> Slice | None:
    """What of the piece lies in a box of the same tensor; None: nothing."""
    cell = intersect(piece.hf_box, box)
    if cell is None:
        return None
    return Slice(piece.hf_name, cell, piece.local_name, carry_over(cell, piece.hf_box, piece.local_box))


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
    row_keys = _keys(piece.device, salt, 0, *rows)
    column_keys = _keys(piece.device, salt, 1, columns[0] * per_element, columns[1] * per_element)
    chunk = CHUNK_DIGITS if piece.device.type == "cpu" else CHUNK_DIGITS_ON_DEVICE
    step = max(1, chunk // max(1, digits.shape[1]))
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

    def inspect(function: Callable[..., Answer], arguments: Sequence[tuple[Any, ...]]) -> dict[int, Answer]:
        with together("hashing the engine's weights"):
            found = function(parameters, *arguments[rank])
        return {rank: found}

    return inspect


class EnginePieces:
    """The distinct pieces (tensor and box) of one engine, numbered; all engines of a run hold the same ones.

    Attributes:
        workers: what each worker of an engine holds.
        boxes: tensor -> its pieces' boxes -> their numbers.
        of_worker: for each worker, the numbers of its slices.
    """

    def __init__(self, sizes: Sizes, workers: Sequence[Sequence[Series]]) -> None:
        self.workers, self._sizes = workers, sizes
        self.boxes: dict[str, dict[Box, int]] = {name: {} for name in sizes}
        self.of_worker: list[Numbers] = []
        tensors: list[int] = []
        index = {name: i for i, name in enumerate(sizes)}
        for series in workers:
            numbers = []
            for piece in slices_of(series):
                number = self.boxes[piece.hf_name].setdefault(piece.hf_box, len(tensors))
                if number == len(tensors):
                    tensors.append(index[piece.hf_name])
                numbers.append(number)
            self.of_worker.append(numpy.array(numbers, dtype=numpy.int64))
        self.tensors = numpy.array(tensors, dtype=numpy.int64)  # of each piece

    def incomplete(self, names: Iterable[str]) -> str | None:
        """The first of these tensors of which an engine does not hold the whole."""
        return next((n for n in names if sum(map(num_elements, self.boxes[n])) != prod(self._sizes[n])), None)


class Difference(NamedTuple):
    """What is wrong in one engine worker."""

    num_tensors: int
    hf_name: str  # of the first; "" if there is none


def differing(
    parameters: Mapping[str, Tensor], layout: Sequence[Series], asked: Numbers | None, expected: Numbers, salt: int
) -> Difference:
    """Compare an engine worker's live parameters with hashes; runs in the worker.

    Args:
        layout: what the worker holds.
        asked: the numbers of its slices that are compared; None: all.
        expected: their hashes.
        salt: with which these were made.
    """
    cells = slices_of(layout)
    if asked is not None:
        cells = [cells[i] for i in asked]
    found = live_hashes(parameters, cells, salt)
    pairs = zip(cells, found, expected.tolist(), strict=True)
    wrong = dict.fromkeys(cell.hf_name for cell, value, known in pairs if value != known)
    return Difference(len(wrong), next(iter(wrong), ""))


class ExpectedHashes:
    """The hashes that an engine's pieces must have, made of the trainer's tensors by all of its ranks.

    The hash of an engine's piece is the sum of those of the parts that the trainer's ranks hold of it: each hashes its
    own, and one sum over all ranks gives every engine's. No rank knows the layout of another one.
    """

    def __init__(self, sizes: Sizes, held: Iterable[Slice], engine: Sequence[Sequence[Series]]) -> None:
        """Collective; the arguments are as those of ``Proof``."""
        self.sizes, self.engine = sizes, EnginePieces(sizes, engine)
        self._index = {name: i for i, name in enumerate(sizes)}
        slices = [piece for piece in held if piece.hf_name in self._index]
        self._held = HeldPieces(self._index, slices)
        parts = [
            (i, self._index[piece.hf_name], number, cell)
            for i, piece in enumerate(slices)
            for box, number in self.engine.boxes[piece.hf_name].items()
            if (cell := part_of(piece, box)) is not None
        ]
        self._cells = [cell for *_, cell in parts]
        # Of each cell: the slice it is of, its tensor, and the engine's piece that it is a part of.
        self._slices, self._tensors, self._pieces = numpy.array([p[:3] for p in parts], numpy.int64).reshape(-1, 3).T

    def hashes(self, read: Read, salt: int, version: int, names: Collection[str] | None = None) -> Numbers:
        """[number of the engine's pieces]: their hashes. Collective.

        Args:
            read: gives what this rank's trainer holds, as the engines have to hold it; no collective.
            version: of the weights, for the sentence.
            names: of the tensors that are hashed; None: all.

        Raises:
            RuntimeError: a side that does not hold a tensor whole, trainer ranks whose copies differ, or a ``read``
                that failed.
        """
        asked = self._asked(names)
        which = numpy.flatnonzero(asked[self._tensors])
        with together("hashing the trainer's weights"), torch.no_grad():
            cells = [self._cells[i] for i in which]
            sent = (read(c.local_name, c.hf_name, c.hf_box, c.local_box) for c in cells)
            found = numpy.array(cell_hashes(cells, sent, salt), dtype=numpy.int64)
        slices, pieces = self._slices[which], self._pieces[which]
        copies = numpy.zeros(len(self._held.numbers), dtype=numpy.int64)
        numpy.add.at(copies, slices, found)
        if (unequal := self._held.unequal(copies, asked)) is not None:
            tensor, *ranks = unequal
            raise RuntimeError(
                f"weight version {version}: trainer ranks {ranks[0]} and {ranks[1]} hold different copies of "
                f"{list(self.sizes)[tensor]}, so that no engine could be equal to both"
            )
        self._check_whole(asked, version)
        own = self._held.is_own[slices]
        return total(pieces[own], found[own], len(self.engine.tensors))

    def question(
        self, hashes: Numbers, salt: int, worker: int, names: Collection[str] | None = None
    ) -> tuple[Sequence[Series], Numbers | None, Numbers, int]:
        """The arguments of ``differing`` for a worker of an engine.

        Args:
            hashes: of the engine's pieces, with this salt.
            worker: its number in the engine.
            names: as of ``hashes``.
        """
        layout, pieces = self.engine.workers[worker], self.engine.of_worker[worker]
        if names is None:
            return layout, None, hashes[pieces], salt
        which = numpy.flatnonzero(self._asked(names)[self.engine.tensors[pieces]])
        return layout, which, hashes[pieces[which]], salt

    def _asked(self, names: Collection[str] | None) -> NDArray[numpy.bool_]:
        """By tensor, whether it is compared."""
        asked = numpy.full(len(self.sizes), names is None)
        asked[[self._index[name] for name in names or ()]] = True
        return asked

    def _check_whole(self, asked: NDArray[numpy.bool_], version: int) -> None:
        names = [name for name, is_asked in zip(self.sizes, asked, strict=True) if is_asked]
        elements = zip(names, self._held.elements[asked].tolist(), strict=True)
        lacking = next((name for name, number in elements if number != prod(self.sizes[name])), None)
        who = "the trainer"
        if lacking is None:
            lacking, who = self.engine.incomplete(names), "the engine on rank 0"
        if lacking is not None:
            raise RuntimeError(f"weight version {version}: {who} does not hold the whole of {lacking}")


def first_difference(answers: Mapping[int, Difference]) -> tuple[int, Difference] | None:
    """The first worker that holds another tensor, with its first such tensor and the number of those of all workers."""
    workers = sorted(worker for worker, answer in answers.items() if answer.num_tensors)
    if not workers:
        return None
    return workers[0], Difference(sum(answers[one].num_tensors for one in workers), answers[workers[0]].hf_name)


def first_of_ranks(answers: Mapping[int, Difference], names: Sequence[str]) -> tuple[int, Difference] | None:
    """``first_difference`` of the answers of all ranks. Collective; while all agree the ranks exchange one number.

    Args:
        answers: worker -> its answer, of those that answered this rank.
        names: of all tensors, the same on every rank.
    """
    found = first_difference(answers)
    own = numpy.array([] if found is None else [found[0]], dtype=numpy.int64)
    first = int(lowest(numpy.zeros_like(own), own, 1)[0])
    if first == LARGEST:
        return None
    parts = numpy.zeros(2, dtype=numpy.int64)  # how many tensors differ, and which is the first
    if found is not None:
        parts[:] = found[1].num_tensors, names.index(found[1].hf_name) * (found[0] == first)
    num_tensors, name = total(numpy.arange(2), parts, 2)
    return first, Difference(int(num_tensors), names[int(name)])


class Proof:
    """Compares the trainer's Hugging Face view with live engine weights; every rank of the default group takes part."""

    def __init__(
        self,
        sizes: Sizes,
        held: Iterable[Slice],
        engine: Sequence[Sequence[Series]],
        num_workers: int,
        is_sample: bool,
        seed: int,
    ) -> None:
        """Collective.

        Args:
            sizes: of every HF tensor that the engines must hold.
            held: what this trainer rank holds of them.
            engine: what each worker of an engine holds of them; consecutive workers form one engine, all alike.
            num_workers: of all engines.
            is_sample: check one part in ``SAMPLE_SYNCS`` of the tensors at a time; ``seed`` chooses which.
        """
        self.num_workers, self.is_sample, self.seed = num_workers, is_sample, seed
        self.expected = ExpectedHashes(sizes, held, engine)
        self.num_syncs = 0

    def check(self, read: Read, inspect: Inspect, version: int) -> int:
        """Prove one sync; collective.

        Args:
            read: as the transfer's: gives what this rank's trainer sends, casts and noise included; no collective.
            inspect: looks into the live parameters of all engine workers, wherever they are.

        Returns:
            The number of tensors compared.

        Raises:
            EngineDiffers: names the first tensor that differs, and the rank.
            RuntimeError: on every rank, as ``ExpectedHashes.hashes``, or where ``inspect`` failed on one.
        """
        sizes = self.expected.sizes
        names = sampled_names(sizes, self.num_syncs, self.seed) if self.is_sample else None
        salt = (self.seed << 32) + self.num_syncs
        self.num_syncs += 1
        hashes = self.expected.hashes(read, salt, version, names)
        size = len(self.expected.engine.workers)
        questions = [self.expected.question(hashes, salt, worker, names) for worker in range(size)]
        answers = inspect(differing, [questions[i % size] for i in range(self.num_workers)])
        found = first_of_ranks(answers, list(sizes))
        if found is not None:
            rank, difference = found
            raise EngineDiffers(version, rank, difference.hf_name, difference.num_tensors)
        return len(sizes if names is None else names)


class LoadProof:
    """Compares what engines have loaded by themselves with the trainer's tensors of the same directory; writes nothing.

    It shows what shapes cannot: an engine that rearranges a weight once it is loaded, for its kernels. The trainer's
    tensors are hashed when this is made, so that they need not be on the device beside an engine. Collective.
    """

    def __init__(
        self,
        sizes: Sizes,
        held: Iterable[Slice],
        engine: Sequence[Sequence[Series]],
        num_loading: int,
        read: Read,
    ) -> None:
        """
        Args:
            sizes: of every HF tensor that the engines must hold.
            held: what this trainer rank holds of them.
            engine: what each worker of an engine loads of them; consecutive workers form one engine, all alike.
            num_loading: how many engines load by themselves; these are the first ones.
            read: gives this rank's trainer's tensors as the engines have to hold them; no collective.
        """
        salt = 0
        expected = ExpectedHashes(sizes, held, engine)
        hashes = expected.hashes(read, salt, version=0)
        self._num_loading, self._names = num_loading * len(engine), list(sizes)
        # For ``differing``, by worker of an engine.
        self.questions = [expected.question(hashes, salt, worker) for worker in range(len(engine))]

    def difference(self, inspect: Inspect, num_workers: int) -> str | None:
        """The first tensor that an engine has loaded otherwise, in words that follow "cannot write"; None: all agree.

        Collective.

        Args:
            inspect: looks into the live parameters of all ``num_workers`` engine workers.
        """
        nothing = (), None, numpy.zeros(0, dtype=numpy.int64), 0
        size = len(self.questions)
        asked = [self.questions[i % size] if i < self._num_loading else nothing for i in range(num_workers)]
        found = first_of_ranks(inspect(differing, asked), self._names)
        return None if found is None else loaded_otherwise(f"the engine on rank {found[0]}", found[1])


def loaded_otherwise(who: str, difference: Difference) -> str:
    """Words about an engine's own load."""
    return (
        f"{difference.hf_name}, of which {who} holds other values than model.path once it is loaded "
        f"({difference.num_tensors} tensors differ)"
    )


@lru_cache(maxsize=NUM_KEPT_KEYS)
def _keys(device: torch.device, salt: int, axis: int, start: int, end: int) -> Tensor:
    """Odd 64-bit keys of the positions ``start`` to ``end`` of one axis: SplitMix64 (Steele et al., 2014) of each."""
    state = random.Random(f"{salt}|{axis}").getrandbits(64)
    z = numpy.arange(start, end, dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15) + numpy.uint64(state)
    z = (z ^ (z >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((z ^ (z >> numpy.uint64(31))) | numpy.uint64(1)).view(numpy.int64)).to(device)
