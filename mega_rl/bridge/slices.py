"""Axis-aligned boxes of Hugging Face tensors, and where a rank keeps them: the terms of both sides of a reshard."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

Box = tuple[tuple[int, int], ...]  # one (start, end) per dimension, end exclusive


@dataclass(frozen=True, slots=True)
class Slice:
    """A piece of one HF tensor and its place in a local parameter; both boxes have the same extents.

    A parameter that stacks tensors (the experts of a fused layer) has one dimension more in front, of extent 1.

    Example: ``Slice("model.norm.weight", ((0, 64),), "decoder.final_layernorm.weight", ((0, 64),))``
    """

    hf_name: str
    hf_box: Box
    local_name: str
    local_box: Box

    def __post_init__(self) -> None:
        size, place = extents(self.hf_box), extents(self.local_box)
        assert place in (size, (1, *size)), f"{self}: the boxes differ in extents"


def whole_box(shape: Sequence[int]) -> Box:
    return tuple((0, n) for n in shape)


def extents(box: Box) -> tuple[int, ...]:
    return tuple(end - start for start, end in box)


def num_elements(box: Box) -> int:
    return prod(end - start for start, end in box)


def indices(box: Box) -> tuple[slice, ...]:
    """What to index a tensor with to get the box."""
    return tuple(slice(start, end) for start, end in box)


def intersect(a: Box, b: Box) -> Box | None:
    """The elements in both boxes, or None if there are none."""
    box = tuple((max(a0, b0), min(a1, b1)) for (a0, a1), (b0, b1) in zip(a, b, strict=True))
    return box if all(start < end for start, end in box) else None


def subtract(box: Box, hole: Box) -> list[Box]:
    """Disjoint boxes that cover ``box`` without the elements of ``hole``; at most two per dimension."""
    middle = intersect(box, hole)
    if middle is None:
        return [box]
    rest: list[Box] = []
    for dim, ((start, end), (low, high)) in enumerate(zip(box, middle, strict=True)):
        rest += [middle[:dim] + ((a, b),) + box[dim + 1 :] for a, b in ((start, low), (high, end)) if a < b]
    return rest


def subtract_all(boxes: Iterable[Box], holes: Iterable[Box]) -> list[Box]:
    """Disjoint boxes stay disjoint: what of ``boxes`` lies in none of ``holes``."""
    rest = list(boxes)
    for hole in holes:
        rest = [piece for box in rest for piece in subtract(box, hole)]
    return rest


def carry_over(inner: Box, outer: Box, target: Box) -> Box:
    """The part of ``target`` that stands where ``inner`` stands in ``outer``.

    Outer and target have equal extents, but for a dimension in front that target may have besides.
    """
    front, last = target[: len(target) - len(outer)], target[len(target) - len(outer) :]
    moved = ((t0 + i0 - o0, t0 + i1 - o0) for (i0, i1), (o0, _), (t0, _) in zip(inner, outer, last, strict=True))
    return (*front, *moved)


def flat_range(box: Box, start: int, end: int) -> list[Box]:
    """The elements number ``start`` to ``end`` of the box, counted row by row, as boxes in that order."""
    assert 0 <= start < end <= num_elements(box), (box, start, end)
    (first, _), inner = box[0], box[1:]
    row = num_elements(inner)
    head, tail = -(-start // row), end // row  # the whole rows between the two
    if head > tail:  # within one row
        return [((first + tail, first + head), *part) for part in flat_range(inner, start % row, end - tail * row)]
    boxes: list[Box] = []
    if start % row:
        boxes += [((first + head - 1, first + head), *part) for part in flat_range(inner, start % row, row)]
    if head < tail:
        boxes.append(((first + head, first + tail), *inner))
    if end % row:
        boxes += [((first + tail, first + tail + 1), *part) for part in flat_range(inner, 0, end % row)]
    return boxes


def stack_rows(local_name: str, parts: Iterable[tuple[str, int, int]], width: int | None) -> list[Slice]:
    """Row ranges ``(hf_name, start, end)`` one below the other in one local parameter; width None: vectors."""
    slices, row = [], 0
    columns: Box = () if width is None else ((0, width),)
    for hf_name, start, end in parts:
        if end > start:
            hf_box, local_box = ((start, end), *columns), ((row, row + end - start), *columns)
            slices.append(Slice(hf_name, hf_box, local_name, local_box))
        row += end - start
    return slices


def take_columns(local_name: str, hf_name: str, height: int, start: int, end: int) -> Slice:
    """The columns ``start`` to ``end`` of a matrix with ``height`` rows."""
    return Slice(hf_name, ((0, height), (start, end)), local_name, ((0, height), (0, end - start)))


def whole(local_name: str, hf_name: str, shape: Sequence[int]) -> Slice:
    return Slice(hf_name, whole_box(shape), local_name, whole_box(shape))


def into_stack(piece: Slice, local_name: str, index: int) -> Slice:
    """The same piece at place ``index`` of a parameter that stacks equal tensors."""
    return Slice(piece.hf_name, piece.hf_box, local_name, ((index, index + 1), *piece.local_box))
