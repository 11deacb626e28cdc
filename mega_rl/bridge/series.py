"""One description for all the tensors that differ only in their layer and expert number.

A model of 94 layers with 128 experts has 37,000 tensors but some twenty kinds of them. Layouts and plans speak of kinds
and expand a kind into its tensors only for the rank that moves them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from mega_rl.bridge.slices import Box, Slice, carry_over

LAYER, EXPERT = "{layer}", "{expert}"  # stand for the numbers in the names of a series
Number = tuple[int, int]  # the layer and the expert of a tensor; 0 if its name has none

_NUMBERED = re.compile(r"(?P<layers>\.layers\.)(?P<layer>\d+)|(?P<experts>\.experts\.)(?P<expert>\d+)")


@dataclass(frozen=True, slots=True)
class Series:
    """The same piece of every tensor with one of ``layers`` and one of ``experts`` in its name.

    ``{layer}`` and ``{expert}`` stand in ``hf_name`` for the model's numbers, and in ``local_name`` for what is counted
    from ``first_layer`` and ``first_expert`` on. With ``is_stacked`` the local parameter holds all experts: its first
    dimension, which ``local_box`` leaves out, is the local number of the expert.

    Example: ``Series("model.layers.{layer}.input_layernorm.weight", ((0, 64),),
    "decoder.layers.{layer}.input_layernorm.weight", ((0, 64),), layers=(4, 5), first_layer=4)``
    """

    hf_name: str
    hf_box: Box
    local_name: str
    local_box: Box
    layers: Sequence[int] = (0,)
    experts: Sequence[int] = (0,)
    first_layer: int = 0
    first_expert: int = 0
    is_stacked: bool = False

    def local_name_of(self, number: Number) -> str:
        layer, expert = number
        return self.local_name.format(layer=layer - self.first_layer, expert=expert - self.first_expert)

    def place(self, hf_box: Box) -> Box:
        """Where a part of ``hf_box`` lies in the local parameter, but for the number of the expert in a stack."""
        return carry_over(hf_box, self.hf_box, self.local_box)

    def local_box_of(self, number: Number, place: Box) -> Box:
        if not self.is_stacked:
            return place
        expert = number[1] - self.first_expert
        return ((expert, expert + 1), *place)

    def slice_of(self, number: Number) -> Slice:
        box = self.local_box_of(number, self.local_box)
        return Slice(hf_name_of(self.hf_name, number), self.hf_box, self.local_name_of(number), box)


@dataclass(frozen=True)
class Numbers:
    """The layer and expert numbers of a series, as in ``Series``."""

    layers: Sequence[int] = (0,)
    first_layer: int = 0
    experts: Sequence[int] = (0,)
    first_expert: int = 0


def numbered(patterns: Iterable[Slice], numbers: Numbers | None = None, is_stacked: bool = False) -> list[Series]:
    """The series of slices whose names are patterns; without numbers each is of one tensor."""
    n = numbers or Numbers()
    counts = n.layers, n.experts, n.first_layer, n.first_expert
    return [Series(p.hf_name, p.hf_box, p.local_name, p.local_box, *counts, is_stacked) for p in patterns]


def hf_name_of(pattern: str, number: Number) -> str:
    return pattern.format(layer=number[0], expert=number[1])


def from_slice(piece: Slice) -> Series:
    """The series of one tensor, its numbers taken from its name."""
    numbers = {"layer": 0, "expert": 0}

    def hide(match: re.Match[str]) -> str:
        kind = "layer" if match["layer"] else "expert"
        numbers[kind] = int(match[kind])
        return f"{match['layers'] or match['experts']}{{{kind}}}"

    hf_name = _NUMBERED.sub(hide, piece.hf_name)
    numbered = (numbers["layer"],), (numbers["expert"],)
    return Series(hf_name, piece.hf_box, piece.local_name, piece.local_box, *numbered)


def slices_of(layout: Iterable[Series]) -> list[Slice]:
    """Every tensor's piece, layer by layer within consecutive series of the same layers."""
    return list(_expand(layout))


def having(layout: Iterable[Series], names: Collection[str]) -> list[Series]:
    """The series that hold one of these tensors or several, whole."""
    return [series for series in layout if any(name in names for name in _names_of(series))]


def with_neighbours(layout: Sequence[Series], chosen: Collection[Series]) -> list[Series]:
    """The chosen series, and all others that share a parameter with one of them, directly or through others."""
    parameters = [{series.local_name_of((a, b)) for a in series.layers for b in series.experts} for series in layout]
    is_in, names = [series in chosen for series in layout], set[str]()
    while True:
        names.update(*(found for found, one in zip(parameters, is_in, strict=True) if one))
        found = [not names.isdisjoint(of_series) for of_series in parameters]
        if found == is_in:
            return [series for series, one in zip(layout, is_in, strict=True) if one]
        is_in = found


def _names_of(series: Series) -> Iterator[str]:
    return (hf_name_of(series.hf_name, (layer, expert)) for layer in series.layers for expert in series.experts)


def _expand(layout: Iterable[Series]) -> Iterator[Slice]:
    for layers, group in groupby(layout, lambda series: series.layers):
        together = list(group)
        for layer in layers:
            for series in together:
                yield from (series.slice_of((layer, expert)) for expert in series.experts)
