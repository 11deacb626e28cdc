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
CHUNK, CHUNK_ON_DEVICE = 1 << 16, 1 << 22  # elements to which one term after another is added: they stay in a cache


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

    Factors of 16 bits: the terms of each element are added in the order of the rank, as elementwise operations. Their
    products are exact in float32, so that every device and every cut gives the same bits, which are those of a matrix
    product in that order. Where nothing is added the result is -0, which leaves the sign of a zero as it is.

    Wider factors: a matrix product may round otherwise for other sizes, so that a product of the box's own rows and
    columns would depend on how a layout cuts the weight. It is taken of whole tiles of rows, which lie at the same rows
    of the tensor for everybody, over all columns, and the box is cut out of it.
    """
    if factors.a.element_size() == factors.b.element_size() == 2:
        return _added_in_order(factors, box)
    a, columns = factors.a.float(), slice(*box[1])
    out = torch.empty(extents(box), dtype=torch.float32, device=a.device)
    for start, end in tiles(*box[0]):
        first = start - start % TILE_ROWS
        product = (factors.b[first : first + TILE_ROWS].float() @ a) * factors.scale
        out[start - box[0][0] : end - box[0][0]] = product[start - first : end - first, columns]
    return out


def _added_in_order(factors: Factors, box: Box) -> Tensor:
    a, b = factors.a[:, slice(*box[1])].float(), factors.b[slice(*box[0])].float()
    out = torch.zeros(extents(box), dtype=torch.float32, device=a.device)
    num_rows = max(1, (CHUNK if a.device.type == "cpu" else CHUNK_ON_DEVICE) // max(1, a.shape[1]))
    for rows, of_rows in zip(out.split(num_rows), b.split(num_rows), strict=True):
        for term in range(len(a)):
            rows.addcmul_(of_rows[:, term : term + 1], a[term])
        rows.mul_(factors.scale)
        rows.masked_fill_(rows == 0, -0.0)
    return out


def merged(weight: Tensor, factors: Factors, box: Box) -> Tensor:
    """The box of ``W + scale B A``, added in float32 and rounded once: a tensor of the weight's dtype.

    Args:
        weight: [extents of box], the box of W; not changed, and returned if the adapter adds nothing.
    """
    return weight if factors.is_zero else update(factors, box).add_(weight).to(weight.dtype)


def merge_into(weight: Tensor, factors: Factors) -> None:
    """``merged`` of a whole weight in place, some rows at a time.

    Args:
        factors: of 16 bits, on any device.
    """
    if factors.is_zero:
        return
    on_device = Factors(factors.a.to(weight.device), factors.b.to(weight.device), factors.scale)
    num_rows, columns = max(1, CHUNK_ON_DEVICE // weight.shape[1]), (0, weight.shape[1])
    for start in range(0, len(weight), num_rows):
        rows = weight[start : start + num_rows]
        rows.copy_(update(on_device, ((start, start + len(rows)), columns)).add_(rows))
