"""The adapters of a model as the bridge sees any weights: tensors with names and shapes, and which slices a rank holds.

The names are PEFT's: ``base_model.model.<module>.lora_A.weight`` [r, columns] and ``lora_B.weight`` [rows, r]. Where a
rank keeps them is derived from the series of the weights that they stand beside, so no family is named here and an
engine's series give its adapters as the trainer's do:

    weight cut by rows (q, k, v, gate, up)   A whole                 B by rows, as the weight
    weight cut by columns (o, down)          A by columns, likewise  B whole

| what is wanted | where it is |
|---|---|
| all tensors of the adapters with their full shapes | ``adapter_tensors(shape, plan.adapters)`` |
| them whole under their own names, as files have them | ``full_adapter_series(shape, plan.adapters)`` |
| what a trainer rank holds of them | ``MegatronPolicy.adapter_series_of(rank)``, i.e. ``adapter_series(rank_series)`` |
| a view of a local tensor of them | ``MegatronPolicy.local(local_name, local_box)``, as for any parameter |
| scale * B A of a box of a weight | ``bridge.lora.update(factors, hf_box)`` |
| the scale of a rank | ``plan.adapters.scale(rank)``; the rank of a weight is ``plan.adapters.ranks[hf_name]`` |

``plan`` is ``tuning_plan(config.tuning, shape)``, or ``MegatronPolicy.plan`` of a policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from mega_rl.bridge.mapping.tensors import full_series, hf_tensors
from mega_rl.bridge.mapping.tuning import AdapterPlan, module_of
from mega_rl.bridge.series import Series, hf_name_of
from mega_rl.bridge.slices import Box, extents, whole_box
from mega_rl.models.shape import ModelShape

PREFIX = "base_model.model."  # of every tensor in PEFT's adapter_model.safetensors
Range = tuple[int, int]  # end exclusive


def names_of(weight: str) -> tuple[str, str]:
    """PEFT's names of A and B for a Hugging Face weight (or a pattern of a series)."""
    module = f"{PREFIX}{module_of(weight)}"
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def adapter_tensors(shape: ModelShape, plan: AdapterPlan) -> dict[str, tuple[int, int]]:
    """Every tensor of the adapters with its full shape, in the model's order."""
    sizes = hf_tensors(shape)
    tensors: dict[str, tuple[int, int]] = {}
    for weight, rank in plan.ranks.items():
        rows, columns = sizes[weight]
        a, b = names_of(weight)
        tensors |= {a: (rank, columns), b: (rows, rank)}
    return tensors


@dataclass(frozen=True)
class MergedSeries:
    """What an engine's worker adds to the frozen weights of a series: its part of their adapters."""

    weight: Series
    a: Series  # own columns of A, in a tensor of its own
    b: Series  # own rows of B, likewise
    scale: float


@dataclass(frozen=True)
class Projection:
    """What a local weight holds of one Hugging Face linear."""

    hf_name: str  # of the weight, a pattern as in a series
    columns: Range  # own columns of the Hugging Face weight
    rows: tuple[Range, ...]  # own rows of it, ascending
    local_rows: tuple[Range, ...]  # where they stand in the local weight
    number: int | None  # among the projections of the local weight that have an adapter; None: it has none

    @property
    def num_rows(self) -> int:
        return sum(end - start for start, end in self.rows)


@dataclass(frozen=True)
class AdaptedWeight:
    """A local weight with adapters, of every layer and expert of a series."""

    like: Series  # whose names and numbers hold for the weight
    projections: tuple[Projection, ...]  # all that are in it, in the order of their first rows
    rank: int

    @property
    def columns(self) -> int:
        """Of the local weight."""
        start, end = self.projections[0].columns
        return end - start

    @property
    def adapted(self) -> list[Projection]:
        return [projection for projection in self.projections if projection.number is not None]


def adapted_weights(weights: Iterable[Series], plan: AdapterPlan) -> list[AdaptedWeight]:
    """Those of the local weights that have adapters. Layers of which other projections do come by themselves."""
    together: dict[tuple[object, ...], list[Series]] = {}
    for series in weights:
        if len(series.hf_box) == 2:
            assert not series.is_stacked, f"{series.local_name}: stacked experts have no adapters"
            key = (series.local_name, series.first_layer, tuple(series.layers))
            together.setdefault(key, []).append(series)
    return [adapted for pieces in together.values() for adapted in _adapted(pieces, plan)]


def adapter_series(weights: Iterable[Series], plan: AdapterPlan) -> list[Series]:
    """The adapters of a rank that holds ``weights``, in the trainer's places.

    Beside ``<module>.weight`` stand ``<module>.adapter.A``, the As of the adapted projections one below the other, and
    ``<module>.adapter.B0``, ``.B1``, ... of one projection each, its rows in the order of the Hugging Face tensor.
    """
    return [series for adapted in adapted_weights(weights, plan) for series in _series_of(adapted)]


def full_adapter_series(shape: ModelShape, plan: AdapterPlan) -> list[Series]:
    """Every tensor of the adapters whole, under its own name."""
    found = []
    for adapted in adapted_weights(full_series(shape), plan):
        for series in _series_of(adapted):
            found.append(
                replace(series, local_name=series.hf_name, local_box=series.hf_box, first_layer=0, first_expert=0)
            )
    return found


def merged_series(weights: Iterable[Series], plan: AdapterPlan) -> list[MergedSeries]:
    """The adapters of an engine's worker that holds ``weights``, stacked experts too; each of one rank."""
    return [merged for series in weights for one in _of_one_rank(series, plan) for merged in [_merged(one, plan)]]


def frozen(series: Series) -> Series:
    """The same weights without what adapters add to them, under names of their own."""
    return replace(series, hf_name=f"{series.hf_name}.frozen")


def _of_one_rank(series: Series, plan: AdapterPlan) -> Iterator[Series]:
    """The part of a series that has adapters, apart for layers and experts whose adapters have other ranks."""

    def of_layer(layer: int) -> list[int | None]:
        return [plan.ranks.get(hf_name_of(series.hf_name, (layer, expert))) for expert in series.experts]

    for of_experts, layers in groupby(series.layers, of_layer):
        own_layers, numbered = tuple(layers), zip(of_experts, series.experts, strict=True)
        for rank, group in groupby(numbered, lambda pair: pair[0]):
            experts = tuple(expert for _, expert in group)
            if rank is not None:
                yield replace(series, layers=own_layers, experts=experts)


def _merged(series: Series, plan: AdapterPlan) -> MergedSeries:
    rank = plan.ranks[hf_name_of(series.hf_name, (series.layers[0], series.experts[0]))]
    rows, columns = series.hf_box

    def factor(hf_name: str, hf_box: Box, own: Range) -> Series:
        name = f"{hf_name}[{own[0]}:{own[1]}]"  # a worker may hold several parts of a weight
        box = whole_box(extents(hf_box))
        return replace(series, hf_name=hf_name, hf_box=hf_box, local_name=name, local_box=box, is_stacked=False)

    a, b = names_of(series.hf_name)
    factors = factor(a, ((0, rank), columns), columns), factor(b, (rows, (0, rank)), rows)
    return MergedSeries(series, *factors, plan.scale(rank))


def _adapted(pieces: Sequence[Series], plan: AdapterPlan) -> Iterator[AdaptedWeight]:
    """The pieces of one kind of local weight, apart for layers and experts that differ in which have adapters."""
    first = pieces[0]
    names = list(dict.fromkeys(piece.hf_name for piece in pieces))

    def ranks(layer: int, expert: int) -> tuple[int | None, ...]:
        return tuple(plan.ranks.get(hf_name_of(name, (layer, expert))) for name in names)

    def of_layer(layer: int) -> list[tuple[int | None, ...]]:
        return [ranks(layer, expert) for expert in first.experts]

    for of_experts, layers in groupby(first.layers, of_layer):
        own_layers = list(layers)
        numbered = zip(of_experts, first.experts, strict=True)
        for chosen, group in groupby(numbered, lambda pair: pair[0]):
            if not any(chosen):
                continue
            experts = [expert for _, expert in group]
            has_adapter = dict(zip(names, chosen, strict=True))
            adapted = [name for name in names if has_adapter[name]]
            projections = tuple(_projection(name, pieces, adapted) for name in names)
            (rank,) = {rank for rank in chosen if rank}
            yield AdaptedWeight(replace(first, layers=tuple(own_layers), experts=tuple(experts)), projections, rank)


def _projection(name: str, pieces: Sequence[Series], adapted: Sequence[str]) -> Projection:
    own = [piece for piece in pieces if piece.hf_name == name]
    rows, local_rows = tuple(p.hf_box[0] for p in own), tuple(p.local_box[0] for p in own)
    number = adapted.index(name) if name in adapted else None
    return Projection(name, own[0].hf_box[1], rows, local_rows, number)


def _series_of(adapted: AdaptedWeight) -> Iterator[Series]:
    like, rank = adapted.like, adapted.rank
    place = like.local_name.removesuffix("weight") + "adapter."

    def series(hf_name: str, hf_box: Box, local_name: str, local_box: Box) -> Series:
        return replace(like, hf_name=hf_name, hf_box=hf_box, local_name=place + local_name, local_box=local_box)

    for one in adapted.adapted:
        assert one.number is not None
        a, b = names_of(one.hf_name)
        top = one.number * rank
        yield series(a, ((0, rank), one.columns), "A", ((top, top + rank), (0, adapted.columns)))
        start = 0
        for first, last in _joined(one.rows):
            end = start + last - first
            yield series(b, ((first, last), (0, rank)), f"B{one.number}", ((start, end), (0, rank)))
            start = end


def _joined(ranges: Iterable[Range]) -> list[Range]:
    """Ranges of which one begins where the one before it ends, as one."""
    joined: list[Range] = []
    for start, end in ranges:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, end))
    return joined
