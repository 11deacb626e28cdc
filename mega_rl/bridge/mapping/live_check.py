"""Whether an engine's live parameters are what its layout says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from mega_rl.bridge.slices import Slice, num_elements

VOCABULARY = ("embed_tokens.weight", "lm_head.weight")  # ends of the names of parameters whose last rows are padding


def whole_parameters(parameters: Mapping[str, Tensor], slices: Iterable[Slice]) -> frozenset[str]:
    """The names of the parameters that are written to the last element: not those with rows of padding.

    Args: as of ``difference``, which has found none.
    """
    covered: dict[str, int] = {}
    for piece in slices:
        covered[piece.local_name] = covered.get(piece.local_name, 0) + num_elements(piece.local_box)
    return frozenset(name for name, size in covered.items() if size == parameters[name].numel())


def difference(parameters: Mapping[str, Tensor], slices: Iterable[Slice], dtype: torch.dtype) -> str | None:
    """The first thing that keeps an update from being written in place; None if the slices describe all exactly.

    Names, dtypes and full shapes are compared: a transposed weight has as many elements as the other. What shapes
    cannot show is a transposed weight that is square.

    Args:
        parameters: of one engine worker, by its own names.
        slices: of its layout; every one is to be written.
        dtype: of what would be written.

    Returns:
        Words that name the parameter, to follow "cannot write".
    """
    sizes: dict[str, list[int]] = {}
    covered: dict[str, int] = {}
    for piece in slices:
        ends = [end for _, end in piece.local_box]
        known = sizes.get(piece.local_name, ends)
        sizes[piece.local_name] = [max(pair) for pair in zip(known, ends, strict=True)]
        covered[piece.local_name] = covered.get(piece.local_name, 0) + num_elements(piece.local_box)
    for name in sorted({*parameters, *sizes}):
        if name not in parameters:
            return f"{name}, which the engine does not have"
        tensor, size = parameters[name], sizes.get(name)
        if name.endswith(VOCABULARY) and tensor.dim() == 2:  # rows without a token follow, or are all that a rank has
            rows, columns = size or tensor.shape
            size = [max(rows, len(tensor)), columns]
        elif size is not None and covered[name] != torch.Size(size).numel():
            return f"{name}, of which the mapping of this model family leaves out a part"
        if size is None:
            return f"{name}, which the mapping of this model family does not have"
        if tensor.dtype != dtype:
            return f"{name}, which the engine holds as {tensor.dtype}, not {dtype}"
        if list(tensor.shape) != size:
            return f"{name}: the engine holds it as {list(tensor.shape)} and the mapping as {size}"
    return None
