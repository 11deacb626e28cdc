"""Experts that files hold together: one tensor of all gates and one of all outputs of a layer (Qwen3-VL's mixtures).

Everywhere else every expert has matrices of its own. On disk ``experts.gate_up_proj`` is [E, D, 2F] and
``experts.down_proj`` [E, F, D], so that a token is multiplied from the left; transformers 5 also writes, and reads, the
other order of the last two dimensions. Both are read; the first is written, as engines take no other.

Letters: E experts, D hidden size, F width of an expert.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mega_rl.bridge.slices import Box, whole_box
from mega_rl.models.shape import ModelShape

GATE_UP, DOWN = ".gate_up_proj", ".down_proj"  # how the names of a layer's two tensors end
_OF_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<number>\d+)\.(?P<part>gate|up|down)_proj\.weight")
Sizes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class ExpertPart:
    """Where the tensor of one expert lies in a tensor of a file."""

    file_name: str  # of the tensor in the file
    number: int  # of the expert
    is_second: bool  # the upper half of the width: ``up`` behind ``gate``


def part_of(name: str) -> ExpertPart | None:
    """Where the files of such a family keep this tensor; None: under its own name, whole."""
    match = _OF_EXPERT.fullmatch(name)
    if match is None:
        return None
    stack = DOWN if match["part"] == "down" else GATE_UP
    return ExpertPart(f"{match['experts']}{stack}", int(match["number"]), match["part"] == "up")


def box_in_file(part: ExpertPart, size: tuple[int, ...], is_transposed: bool) -> Box:
    """The part's box in its tensor of the file; ``size`` is that of the part itself, [rows, columns]."""
    rows, columns = whole_box(size)
    if part.is_second:
        rows = (size[0], 2 * size[0])
    return ((part.number, part.number + 1), *((columns, rows) if is_transposed else (rows, columns)))


def file_sizes(shape: ModelShape, tensors: Sizes, is_transposed: bool = True) -> dict[str, tuple[int, ...]]:
    """The tensors of the files for ``tensors``, which are all of the model, in order, with their shapes."""
    if not shape.fused_experts:
        return dict(tensors)
    assert shape.mixture is not None
    found: dict[str, tuple[int, ...]] = {}
    for name, size in tensors.items():
        part = part_of(name)
        if part is None:
            found[name] = size
            continue
        rows, columns = size if part.file_name.endswith(DOWN) else (2 * size[0], size[1])
        found[part.file_name] = (shape.mixture.num_experts, *((columns, rows) if is_transposed else (rows, columns)))
    return found


def are_transposed(gate_up: tuple[int, ...], down: tuple[int, ...]) -> bool:
    """Whether a file has its experts as [E, D, 2F] and [E, F, D], told by the shapes of one layer's."""
    return len(down) == 3 and gate_up[1:] == (down[2], 2 * down[1])
