"""The files of a checkpoint in Megatron's ``torch_dist`` format before its weights are in them; see ``torch_dist``."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mega_rl.bridge.files.assembly import FileImage, literal_file
from mega_rl.bridge.files.stored import FilePlace, StoredTensors
from mega_rl.bridge.files.torch_dist.torch_dist import INDEX, place_of
from mega_rl.bridge.files.torch_dist.torch_dist_layout import Chunk, extra_state, global_shapes, global_slices
from mega_rl.bridge.mapping.tensors import hf_tensors
from mega_rl.bridge.slices import Box, Slice, extents, intersect, num_elements
from mega_rl.errors import InputError
from mega_rl.models.shape import ModelShape

# What the trainer tells Megatron of how it saves.
CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",  # loadable at another layout
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}
_BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def plan_torch_dist(
    root: Path, shape: ModelShape, chunks: Sequence[Chunk], dtypes: Mapping[str, torch.dtype], padded_vocab: int
) -> tuple[dict[str, FileImage], StoredTensors]:
    """A checkpoint's files without the weights, and the places of the weights in them.

    Args:
        root: directory of the files.
        chunks: as ``layout_chunks`` gives them; a file for every rank that owns any.
        dtypes: of every HF tensor.
        padded_vocab: rows of embedding and output layer.

    Raises:
        InputError: HF tensors that are parts of one Megatron tensor have different dtypes.
    """
    slices = global_slices(shape)
    sizes = global_shapes(shape, slices, padded_vocab)
    key_dtypes = _key_dtypes(slices, dtypes)
    images: dict[str, FileImage] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    arrays: dict[tuple[str, int], list[tuple[Box, str, int]]] = defaultdict(list)
    blobs: set[str] = set()
    for rank in sorted({chunk.rank for chunk in chunks}):
        file, end = f"__{rank}_0.distcp", 0
        literals: list[tuple[int, bytes]] = []
        for chunk in (c for c in chunks if c.rank == rank):
            frame = _frame(extents(chunk.box), key_dtypes[chunk.key])
            literals += [(end + at, content) for at, content in frame.literals]
            starts = torch.Size(start for start, _ in chunk.box)
            storage[MetadataIndex(chunk.key, starts)] = _StorageInfo(file, end, frame.size)
            arrays[chunk.key, chunk.box[0][0]].append((chunk.box, file, end + frame.array_offset))
            end += frame.size
            blob = extra_state(chunk.key, sizes[chunk.key], chunk.box)
            if blob is not None and blob not in blobs:
                blobs.add(blob)
                content = _empty_state()
                literals.append((end, content))
                storage[MetadataIndex(blob)] = _StorageInfo(file, end, len(content))
                end += len(content)
        images[file] = FileImage(end, tuple(literals))
    entries: dict[str, Any] = {
        key: _entry(key, size, chunks_of, key_dtypes[key]) for key, size, chunks_of in _grouped(sizes, chunks)
    }
    entries |= {blob: BytesStorageMetadata() for blob in sorted(blobs)}
    index = Metadata(state_dict_metadata=entries, planner_data=None, storage_data=storage)
    images[INDEX] = literal_file(pickle.dumps(index))
    images["metadata.json"] = literal_file(json.dumps(_BACKEND))
    images["common.pt"] = literal_file(_saved({"content_metadata": CONTENT}))
    return images, StoredTensors(root, hf_tensors(shape), dict(dtypes), _places(slices, arrays, sizes))


def _key_dtypes(slices: Sequence[Slice], dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
    found: dict[str, tuple[torch.dtype, str]] = {}
    for piece in slices:
        dtype, first = found.setdefault(piece.local_name, (dtypes[piece.hf_name], piece.hf_name))
        if dtype != dtypes[piece.hf_name]:
            raise InputError(
                f"{first} is {dtype} and {piece.hf_name} is {dtypes[piece.hf_name]}, but Megatron keeps them in one "
                f"tensor, {piece.local_name}; choose one with --dtype"
            )
    return {key: dtype for key, (dtype, _) in found.items()}


def _grouped(
    sizes: Mapping[str, tuple[int, ...]], chunks: Sequence[Chunk]
) -> list[tuple[str, tuple[int, ...], list[Chunk]]]:
    by_key: dict[str, list[Chunk]] = defaultdict(list)
    for chunk in chunks:
        by_key[chunk.key].append(chunk)
    return [(key, size, by_key[key]) for key, size in sizes.items()]


def _entry(key: str, size: tuple[int, ...], chunks: Sequence[Chunk], dtype: torch.dtype) -> TensorStorageMetadata:
    assert sum(num_elements(chunk.box) for chunk in chunks) == prod(size), f"the chunks do not cover {key}"
    described = [
        ChunkStorageMetadata(torch.Size(start for start, _ in chunk.box), torch.Size(extents(chunk.box)))
        for chunk in sorted(chunks, key=lambda chunk: chunk.box)
    ]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(size), described)


def _places(
    slices: Sequence[Slice],
    arrays: Mapping[tuple[str, int], Sequence[tuple[Box, str, int]]],
    sizes: Mapping[str, tuple[int, ...]],
) -> dict[str, list[FilePlace]]:
    flat: dict[str, list[tuple[Box, str, int]]] = defaultdict(list)
    for (key, _), chunks in arrays.items():
        flat[key] += chunks
    places: dict[str, list[FilePlace]] = defaultdict(list)
    for piece in slices:
        key = piece.local_name
        for box, file, offset in arrays[key, piece.local_box[0][0]] if len(sizes[key]) == 3 else flat[key]:
            part = intersect(piece.local_box, box)
            if part is not None:
                places[piece.hf_name].append(place_of(piece, part, box, file, offset))
    return dict(places)


@dataclass(frozen=True)
class _Frame:
    """A saved tensor without its elements."""

    size: int  # bytes, elements included
    array_offset: int
    literals: tuple[tuple[int, bytes], ...]


class _Sparse:
    """What a writer writes, and where; what it skips stays empty."""

    def __init__(self) -> None:
        self.at, self.parts = 0, list[tuple[int, bytes]]()

    def write(self, content: Any) -> int:
        data = bytes(content)
        if self.parts and self.parts[-1][0] + len(self.parts[-1][1]) == self.at:
            start, before = self.parts.pop()
            self.parts.append((start, before + data))
        else:
            self.parts.append((self.at, data))
        self.at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        assert whence in (os.SEEK_SET, os.SEEK_CUR)
        self.at = offset + (self.at if whence == os.SEEK_CUR else 0)
        return self.at

    def tell(self) -> int:
        return self.at

    def flush(self) -> None:
        pass


@cache
def _frame(size: tuple[int, ...], dtype: torch.dtype) -> _Frame:
    sink = _Sparse()
    with torch.serialization.skip_data():
        torch.save(torch.empty(size, dtype=dtype), sink)  # type: ignore[arg-type]  # the memory is never touched
    num_bytes = prod(size) * dtype.itemsize
    holes = [a + len(data) for (a, data), (b, _) in zip(sink.parts, sink.parts[1:], strict=False) if b > a + len(data)]
    if len(holes) != 1:
        raise AssertionError(f"torch.save left {len(holes)} gaps for one tensor of {num_bytes} bytes")
    return _Frame(sink.at, holes[0], tuple(sink.parts))


@cache
def _empty_state() -> bytes:
    return _saved([None])


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
