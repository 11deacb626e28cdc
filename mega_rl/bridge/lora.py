"""Adding a low-rank adapter (LoRA, arXiv 2106.09685) to its weight, with the same bits however the weight is cut.

An adapter of the weight W [rows, columns] is two factors, A [r, columns] and B [rows, r]; the weight that acts is
W + scale B A.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mega_rl.bridge.slices import Box, extents

TILE_ROWS = 256


class Factors(NamedTuple):
    """The whole adapter of one weight."""

    a: Tensor  # [r, columns]
    b: Tensor  # [rows, r]
    scale: float

    @property
    def is_zero(self) -> bool:
        """Whether it adds nothing, as before its first step."""
        return not bool(self.b.any())


def tiles(start: int, end: int) -> Iterator[tuple[int, int]]:
    """The rows ``start`` to ``end`` cut at multiples of ``TILE_ROWS``."""
    while start < end:
        border = min(end, start - start % TILE_ROWS + TILE_ROWS)
        yield start, border
        start = border


def update(factors: Factors, box: Box) -> Tensor:
    """The box of ``scale B A``, float32.

    A matrix product may round otherwise for other sizes, so that a product of the box's own rows and columns would
    depend on how a layout cuts the weight. It is taken of whole tiles of rows, which lie at the same rows of the
    tensor for everybody, over all columns, and the box is cut out of it.
    """
    a, columns = factors.a.float(), slice(*box[1])
    out = torch.empty(extents(box), dtype=torch.float32, device=a.device)
    for start, end in tiles(*box[0]):
        first = start - start % TILE_ROWS
        product = (factors.b[first : first + TILE_ROWS].float() @ a) * factors.scale
        out[start - box[0][0] : end - box[0][0]] = product[start - first : end - first, columns]
    return out


def merged(weight: Tensor, factors: Factors, box: Box) -> Tensor:
    """The box of ``W + scale B A``, added in float32 and rounded once: a tensor of the weight's dtype.

    Args:
        weight: [extents of box], the box of W; not changed, and returned if the adapter adds nothing.
    """
    return weight if factors.is_zero else update(factors, box).add_(weight).to(weight.dtype)
