"""Sequences to packed micro-batches of this data-parallel rank, and metric sums back from all of them.

Letters: T packed tokens of a micro-batch, L predictions of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence as SequenceOf
from dataclasses import dataclass, field

from mega_rl.algorithms.reduce import Denominators
from mega_rl.data.packing import pack
from mega_rl.data.pictures.picture_set import PictureSet
from mega_rl.microbatch import Figures, Microbatch, Sequence
from mega_rl.parallel.collectives import is_any, numbers_to_first, reduced, told_numbers
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.parallel.schedule import balance
from mega_rl.types import TokenSource, TrajectorySummary, TrajectoryTokens

_SEPARATOR = "\n"  # between names on their way to other ranks


class AgreedNames:
    """Names that every rank has in the same order, so that values can go without them."""

    def __init__(self) -> None:
        self._names: list[str] = []

    def including(self, own: Iterable[str]) -> list[str]:
        """All of them, those of every rank's ``own`` included. Collective; new names cost further exchanges."""
        new = [name for name in own if name not in self._names]
        if is_any(bool(new)):
            parts = numbers_to_first([*_SEPARATOR.join(new).encode()])
            merged = dict.fromkeys(name for part in parts for name in _split(part) if name not in self._names)
            self._names += _split(told_numbers([*_SEPARATOR.join(merged).encode()]))
        return self._names


def _split(numbers: SequenceOf[float]) -> list[str]:
    return [name for name in bytes(map(int, numbers)).decode().split(_SEPARATOR) if name]


@dataclass(frozen=True)
class BatchShare:
    """This rank's share of every batch: which sequences, packed how, and whether its sums count."""

    layout: ParallelLayout
    rank: int
    max_tokens: int  # of a micro-batch
    pad_multiple: int  # the number of tokens of a micro-batch is padded to a multiple of it
    pad_token_id: int
    attention_slope: float = 0.0  # see `models.flops`; 0: a sequence costs what its tokens cost
    picture_set: PictureSet | None = None  # the pictures of the prompts that are learnt from; None: the model sees none
    figures: AgreedNames = field(default_factory=AgreedNames, compare=False)  # what ``totals_of`` was given so far

    @property
    def is_counted(self) -> bool:
        """Whether a sum over ranks includes this one: one rank per pipeline stage, of those with the same sequences."""
        return self.layout.is_counted(self.rank)

    @property
    def data_rank(self) -> int:
        return self.layout.coordinates(self.rank).data

    def plan(self, lengths: SequenceOf[int]) -> list[list[list[int]]]:
        """Sequences of so many tokens to data-parallel ranks and their micro-batches, as ``balance`` returns them."""
        layout = self.layout
        # An interleaved pipeline goes round in groups of as many micro-batches as it has stages.
        group = layout.pipeline if layout.num_chunks > 1 else 1
        return balance(lengths, layout.data, self.max_tokens, group, self.attention_slope)

    @property
    def is_last_stage(self) -> bool:
        return self.layout.coordinates(self.rank).pipeline == self.layout.pipeline - 1


def fits(share: BatchShare, sequences: list[Sequence], unit: int) -> bool:
    """Whether every ``unit`` sequences in a row find room in one micro-batch."""
    lengths = [sequence.loss_mask.numel() for sequence in sequences]
    return all(sum(lengths[i : i + unit]) <= share.max_tokens for i in range(0, len(lengths), unit))


def pack_for_rank(share: BatchShare, sequences: list[Sequence], unit: int = 1) -> list[Microbatch]:
    """This data-parallel rank's share of a global list of sequences; every rank gets equally many micro-batches.

    Args:
        unit: so many sequences in a row, such as the two answers of a pair, share a micro-batch and keep their order.
    """
    lengths = [sum(s.loss_mask.numel() for s in sequences[i : i + unit]) for i in range(0, len(sequences), unit)]
    own = share.plan(lengths)[share.data_rank]
    places = [[unit * index + k for index in indices for k in range(unit)] for indices in own]
    return [pack(sequences, indices, share.pad_multiple, share.pad_token_id) for indices in places]


def pack_brought(
    share: BatchShare,
    summaries: SequenceOf[TrajectorySummary],
    lengths: SequenceOf[int],
    source: TokenSource,
    sequence_of: Callable[[int, TrajectoryTokens], Sequence],
) -> list[Microbatch]:
    """The same, of trajectories whose tokens come to this rank only if they are in its share. Collective.

    Args:
        lengths: of the sequences that are made of them, as the trainer counts: one less than their tokens.
        source: has the tokens.
        sequence_of: a sequence out of its place among the summaries and its tokens.
    """
    plan = share.plan(lengths)
    parts = [[index for indices in of_rank for index in indices] for of_rank in plan]
    brought = source.bring([[summaries[index] for index in part] for part in parts])
    pairs = zip(parts[share.data_rank], brought, strict=True)
    sequences = {index: sequence_of(index, tokens) for index, tokens in pairs}
    return [pack(sequences, indices, share.pad_multiple, share.pad_token_id) for indices in plan[share.data_rank]]


def denominators_of(sequences: list[Sequence], max_response_tokens: int) -> Denominators:
    """What the losses of one optimizer step are divided by, over all ranks."""
    num_tokens = int(sum(float(sequence.loss_mask.sum()) for sequence in sequences))
    return Denominators(num_tokens=num_tokens, num_sequences=len(sequences), max_response_tokens=max_response_tokens)


_SUM, _MAXIMUM = "sum ", "max "  # before the names that ``totals_of`` agrees on


@dataclass(frozen=True)
class Totals:
    """`Figures` of several micro-batches as one: sums added up, maxima the largest."""

    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def include(self, part: Figures | Totals) -> None:
        for name, value in part.sums.items():
            self.sums[name] = self.sums[name] + float(value) if name in self.sums else float(value)
        for name, value in part.maxima.items():
            self.maxima[name] = max(self.maxima.get(name, float(value)), float(value))


def totals_of(share: BatchShare, reports: list[Figures]) -> Totals:
    """The figures over all micro-batches and data-parallel ranks, on every rank. Collective."""
    own = Totals()
    if share.is_counted:
        for report in reports:
            own.include(report)
    names = share.figures.including([*map(_SUM.__add__, own.sums), *map(_MAXIMUM.__add__, own.maxima)])

    def added(rows: list[list[float]]) -> list[float]:
        total = Totals()
        for row in rows:
            total.include(_of_row(row, names))
        return _to_row(total, names)

    return _of_row(reduced(_to_row(own, names), added, 2 * len(names)), names)


def _to_row(totals: Totals, names: SequenceOf[str]) -> list[float]:
    """Of every name whether it is there, and its value."""
    values = {_SUM + name: value for name, value in totals.sums.items()}
    values |= {_MAXIMUM + name: value for name, value in totals.maxima.items()}
    return [number for name in names for number in (float(name in values), values.get(name, 0.0))]


def _of_row(row: SequenceOf[float], names: SequenceOf[str]) -> Totals:
    found = Totals()
    for name, is_there, value in zip(names, row[::2], row[1::2], strict=True):
        if is_there:
            part = found.sums if name.startswith(_SUM) else found.maxima
            part[name.removeprefix(_SUM).removeprefix(_MAXIMUM)] = value
    return found
