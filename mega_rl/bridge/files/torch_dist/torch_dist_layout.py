"""Megatron's distributed checkpoint of a model in integers: its global tensors, and the chunks a layout cuts them into.

A global tensor is the same at every layout but for the padding of its vocabulary. Dense models stack their layers in
one tensor per kind; with experts every layer has tensors of its own, in which its experts are stacked.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from mega_rl.bridge.mapping.megatron import FUSED_NORMS, ModelChunk, chunk_series, megatron_slices, padded_vocab_size
from mega_rl.bridge.mapping.tensors import LM_HEAD, embedding_name
from mega_rl.bridge.series import slices_of
from mega_rl.bridge.slices import Box, Slice, carry_over, intersect, into_stack
from mega_rl.models.shape import ModelShape
from mega_rl.parallel.layout import ParallelLayout

EMBEDDING_KEY, OUTPUT_KEY = "embedding.word_embeddings.weight", "output_layer.weight"  # whose rows are padded
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(.+)$")
_LINEAR = re.compile(r"^(?!vision\.).*\.linear_\w+\.weight$")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a global tensor, and the rank that writes it."""

    key: str
    box: Box
    rank: int


def global_slices(shape: ModelShape) -> list[Slice]:
    """Every element of the HF tensors and its place in Megatron's global tensors, each exactly once."""
    slices = megatron_slices(shape, ModelChunk(range(shape.num_layers)))
    return [_global(shape, piece) for piece in slices]


def names_in(names: Collection[str], slices: Iterable[Slice]) -> list[Slice]:
    """The slices, with norms by the names that they have among ``names``, those of a checkpoint's tensors.

    Megatron names the norms before grouped-query attention and before the MLP as fused ones: its own layers always,
    TransformerEngine's only where they are fused, which a norm before experts is not.
    """
    found = []
    for piece in slices:
        other = _other_norm_name(piece.local_name)
        if other is not None and other in names and piece.local_name not in names:
            piece = replace(piece, local_name=other)
        found.append(piece)
    return found


def _other_norm_name(name: str) -> str | None:
    """A norm of a layer by its own name instead of its name in a fused layer, or the reverse; None: no such norm."""
    for pair in FUSED_NORMS.items():
        for own, other in (pair, pair[::-1]):
            if name.endswith(f".{own}"):
                return name.removesuffix(own) + other
    return None


def padded_keys(shape: ModelShape) -> tuple[str, ...]:
    """The global tensors that have a row for every token of the vocabulary."""
    return (EMBEDDING_KEY, OUTPUT_KEY) if shape.head == "vocabulary" else (EMBEDDING_KEY,)


def global_shapes(shape: ModelShape, slices: Iterable[Slice], padded_vocab: int) -> dict[str, tuple[int, ...]]:
    """The shape of every global tensor; ``padded_vocab`` is the number of rows of embedding and output layer."""
    shapes: dict[str, tuple[int, ...]] = {}
    for piece in slices:
        ends = tuple(end for _, end in piece.local_box)
        known = shapes.get(piece.local_name, ends)
        shapes[piece.local_name] = tuple(max(pair) for pair in zip(known, ends, strict=True))
    for key in padded_keys(shape):
        if key in shapes:
            shapes[key] = (padded_vocab, *shapes[key][1:])
    return shapes


def extra_state(key: str, shape: tuple[int, ...], box: Box) -> str | None:
    """The name of the (empty) state that Megatron keeps beside a linear layer's weight and asks for in every load."""
    if not _LINEAR.search(key):
        return None
    index, count = (box[0][0], shape[0]) if len(shape) == 3 else (0, 1)
    return f"{key.removesuffix('weight')}_extra_state/shard_{index}_{count}"


def smallest_layout(
    tensor: int, pipeline: int, virtual_pipeline: int | None, expert: int, expert_tensor: int | None
) -> ParallelLayout:
    """The layout of these sizes with the fewest ranks."""
    num_expert_ranks = expert * (expert_tensor or tensor)
    per_stage = next(n for n in range(tensor, tensor * num_expert_ranks + 1, tensor) if n % num_expert_ranks == 0)
    return ParallelLayout.create(
        per_stage * pipeline,
        tensor,
        pipeline,
        expert=expert,
        expert_tensor=expert_tensor,
        virtual_pipeline=virtual_pipeline,
    )


def layout_chunks(shape: ModelShape, layout: ParallelLayout) -> list[Chunk]:
    """What the ranks hold of the global tensors, each element once, by the first rank that has it."""
    by_hf_name: dict[str, list[Slice]] = defaultdict(list)
    for piece in global_slices(shape):
        by_hf_name[piece.hf_name].append(piece)
    padded = padded_vocab_size(shape.vocab_size, layout.tensor)
    chunks: dict[tuple[str, Box], Chunk] = {}
    for rank in range(layout.world_size):
        boxes: dict[str, list[Box]] = defaultdict(list)
        for piece in _rank_slices(shape, layout, rank, padded):
            if piece.hf_name in (embedding_name(shape), LM_HEAD):
                continue
            for whole in by_hf_name[piece.hf_name]:
                part = intersect(whole.hf_box, piece.hf_box)
                if part is not None:
                    boxes[whole.local_name].append(carry_over(part, whole.hf_box, whole.local_box))
        for key in _vocabulary_keys(shape, layout, rank):
            rows = padded // layout.tensor
            start = layout.coordinates(rank).tensor * rows
            boxes[key].append(((start, start + rows), (0, shape.hidden_size)))
        for key, parts in boxes.items():
            for box in _merged(parts):
                chunks.setdefault((key, box), Chunk(key, box, rank))
    return list(chunks.values())


def _rank_slices(shape: ModelShape, layout: ParallelLayout, rank: int, padded: int) -> list[Slice]:
    chunks = (chunk_series(shape, layout, rank, chunk, padded) for chunk in range(layout.num_chunks))
    return [piece for series in chunks for piece in slices_of(series)]


def _vocabulary_keys(shape: ModelShape, layout: ParallelLayout, rank: int) -> list[str]:
    """A tied output layer is the embedding, which the first stage writes."""
    stage = layout.coordinates(rank).pipeline
    keys = [EMBEDDING_KEY] if stage == 0 else []
    has_output = stage == layout.pipeline - 1 and not shape.tied and OUTPUT_KEY in padded_keys(shape)
    return keys + ([OUTPUT_KEY] if has_output else [])


def _global(shape: ModelShape, piece: Slice) -> Slice:
    layer = _LAYER.match(piece.local_name)
    if layer is None:
        return piece
    number, name = int(layer[1]), layer[2]
    if shape.latent is None:
        name = FUSED_NORMS.get(name, name)
    if shape.mixture is None:
        return into_stack(piece, f"decoder.layers.{name}", number)
    expert = _EXPERT.match(name)
    if expert:
        return into_stack(piece, f"decoder.layers.{number}.mlp.experts.experts.{expert[2]}", int(expert[1]))
    return replace(piece, local_name=f"decoder.layers.{number}.{name}")


def _merged(boxes: list[Box]) -> list[Box]:
    """The same elements in fewer boxes: those that lie one below the other, and are equally wide, become one."""
    merged: list[Box] = []
    for box in sorted(boxes):
        row = next((dim for dim, (start, end) in enumerate(box) if end - start > 1), len(box) - 1)
        last = merged[-1] if merged else None
        is_below = last is not None and last[row][1] == box[row][0]
        if last is not None and is_below and all(dim == row or last[dim] == box[dim] for dim in range(len(box))):
            merged[-1] = (*box[:row], (last[row][0], box[row][1]), *box[row + 1 :])
        else:
            merged.append(box)
    return merged
