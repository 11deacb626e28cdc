"""Where tokens stand: positions of text and of pictures, as Qwen2.5-VL and Qwen3-VL count them.

A token of text stands at one number on all three axes (time, height, width); the tokens of a picture keep the time of
the text before it and count its rows and columns from there; text goes on behind the larger of both. Source: Qwen2-VL
(arXiv 2409.12191, section 2.1, M-RoPE). Pictures are where the prompt has put them: a picture token that a model has
written by itself is text, to the engine too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mega_rl.models.vision import NUM_AXES, Tower


class Placed(NamedTuple):
    """A picture in a sequence of tokens."""

    first: int  # its first token
    rows: int  # of patches
    columns: int


def image_positions(num_tokens: int, pictures: Sequence[Placed], merge: int) -> Tensor:
    """int64 [3, num_tokens]: time, height and width of every token of one sequence.

    Args:
        pictures: ascending; everything else is text.
        merge: patches of one token along each side.
    """
    parts: list[Tensor] = []
    token = position = 0

    def text(end: int) -> None:
        nonlocal token, position
        assert end >= token, "pictures stand one after the other"
        parts.append(torch.arange(position, position + end - token).expand(NUM_AXES, -1))
        position, token = position + end - token, end

    for first, rows, columns in pictures:
        text(first)
        height, width = rows // merge, columns // merge
        axes = torch.meshgrid(
            torch.zeros(1, dtype=torch.int64), torch.arange(height), torch.arange(width), indexing="ij"
        )
        parts.append(torch.stack(axes).reshape(NUM_AXES, -1) + position)
        position, token = position + max(height, width), first + height * width
    text(num_tokens)
    return torch.cat(parts, dim=1)


def picture_places(pictures: Sequence[Placed], merge: int) -> Tensor:
    """int64 [F]: the tokens of one picture or several, in order."""
    return torch.cat([torch.arange(p.first, p.first + p.rows * p.columns // merge**2) for p in pictures])


def rotary_axes(tower: Tower) -> Tensor:
    """int64 [D/2]: the axis (0 time, 1 height, 2 width) that turns each pair of a head's channels."""
    sections = tower.rope_sections
    if not tower.interleaved:
        return torch.repeat_interleave(torch.arange(NUM_AXES), torch.tensor(sections))
    axes = torch.zeros(sum(sections), dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : NUM_AXES * sections[axis] : NUM_AXES] = axis
    return axes
