"""Sequences to packed micro-batches of this data-parallel rank, and metric sums back from all of them.

Letters: T packed tokens of a micro-batch, L predictions of one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mega_rl.algorithms.reduce import Denominators
from mega_rl.data.packing import pack
from mega_rl.parallel.collectives import gather_objects
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.parallel.schedule import balance
from mega_rl.types import Figures, Microbatch, Sequence


@dataclass(frozen=True)
class BatchShare:
    """This rank's share of every batch: which sequences, packed how, and whether its sums count."""

    layout: ParallelLayout
    rank: int
    max_tokens: int  # of a micro-batch
    pad_multiple: int  # the number of tokens of a micro-batch is padded to a multiple of it
    pad_token_id: int
    attention_slope: float = 0.0  # see `models.flops`; 0: a sequence costs what its tokens cost

    @property
    def is_counted(self) -> bool:
        """Whether a sum over ranks includes this one: one rank per pipeline stage, of those with the same sequences."""
        return self.layout.is_counted(self.rank)

    @property
    def is_last_stage(self) -> bool:
        return self.layout.coordinates(self.rank).pipeline == self.layout.pipeline - 1


def pack_for_rank(share: BatchShare, sequences: list[Sequence], unit: int = 1) -> list[Microbatch]:
    """This data-parallel rank's share of a global list of sequences; every rank gets equally many micro-batches.

    Args:
        unit: so many sequences in a row, such as the two answers of a pair, share a micro-batch and keep their order.
    """
    lengths = [sum(s.loss_mask.numel() for s in sequences[i : i + unit]) for i in range(0, len(sequences), unit)]
    layout = share.layout
    # An interleaved pipeline goes round in groups of as many micro-batches as it has stages.
    group = layout.pipeline if layout.num_chunks > 1 else 1
    plan = balance(lengths, layout.data, share.max_tokens, group, share.attention_slope)
    own = plan[layout.coordinates(share.rank).data]
    places = [[unit * index + k for index in indices for k in range(unit)] for indices in own]
    return [pack(sequences, indices, share.pad_multiple, share.pad_token_id) for indices in places]


def denominators_of(sequences: list[Sequence], max_response_tokens: int) -> Denominators:
    """What the losses of one optimizer step are divided by, over all ranks."""
    num_tokens = int(sum(float(sequence.loss_mask.sum()) for sequence in sequences))
    return Denominators(num_tokens=num_tokens, num_sequences=len(sequences), max_response_tokens=max_response_tokens)


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
    own, total = Totals(), Totals()
    if share.is_counted:
        for report in reports:
            own.include(report)
    for part in gather_objects(own):
        total.include(part)
    return total
