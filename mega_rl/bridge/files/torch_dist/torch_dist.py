"""Megatron's ``torch_dist`` checkpoint format, from nothing but files: no process group, no Megatron, no model.

A checkpoint is a pickled index (``.metadata``: global tensors, their chunks, and which bytes of which file hold each)
and data files in which every chunk is a small zip archive as ``torch.save`` writes it. Format:
torch.distributed.checkpoint (FileSystemWriter) as megatron-core 0.16 calls it.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from enum import Enum
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from mega_rl.bridge.files.stored import FilePlace, StoredTensors
from mega_rl.bridge.files.torch_dist.plain import is_name_below, open_plain
from mega_rl.bridge.files.torch_dist.torch_dist_layout import global_shapes, global_slices, names_in, padded_keys
from mega_rl.bridge.mapping.tensors import hf_tensors
from mega_rl.bridge.slices import Box, Slice, carry_over, extents, intersect, whole_box
from mega_rl.errors import InputError, shortened, shown
from mega_rl.models.shape import ModelShape

INDEX = ".metadata"
MODEL_KEYS = ("embedding.", "decoder.", "output_layer.", "vision.")  # what a model's weights begin with
INDEX_CLASSES = {  # module -> what an index may name of it
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    # the plans of the ranks, which Megatron keeps in the index
    "torch.distributed.checkpoint.planner": {
        "SavePlan",
        "WriteItem",
        "WriteItemType",
        "TensorWriteData",
        "BytesIOWriteData",
    },
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict", "defaultdict"},
    "builtins": {"set", "frozenset"},
}
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def read_torch_dist(directory: Path, shape: ModelShape) -> StoredTensors:
    """The model's weights in a checkpoint of any layout, with or without other state beside them.

    Raises:
        InputError: a file is missing or truncated, or the weights are not exactly those of the model.
    """
    index = read_index(directory)
    tensors = {
        key: entry
        for key, entry in index.state_dict_metadata.items()
        if key.startswith(MODEL_KEYS) and isinstance(entry, TensorStorageMetadata)
    }
    slices = names_in(tensors, global_slices(shape))
    _check(directory, tensors, slices, shape)
    arrays = _Arrays(directory, index, tensors)
    places: dict[str, list[FilePlace]] = {name: [] for name in hf_tensors(shape)}
    for piece in slices:
        for box, file, offset in arrays.near(piece.local_name, piece.local_box[0][0]):
            part = intersect(piece.local_box, box)
            if part is not None:
                places[piece.hf_name].append(place_of(piece, part, box, file, offset))
    dtypes = {piece.hf_name: tensors[piece.local_name].properties.dtype for piece in slices}
    return StoredTensors(directory, hf_tensors(shape), dtypes, places)


def place_of(piece: Slice, part: Box, chunk: Box, file: str, offset: int) -> FilePlace:
    """The place of ``part``, a box of a global tensor in ``piece`` and ``chunk``, whose array begins at ``offset``."""
    front = len(piece.local_box) - len(piece.hf_box)
    hf_box = carry_over(part[front:], piece.local_box[front:], piece.hf_box)
    size = extents(chunk)
    return FilePlace(hf_box, file, offset, size, carry_over(part, chunk, whole_box(size)))


class _IndexUnpickler(pickle.Unpickler):
    """Reads the classes that an index is made of, and no others: unpickling runs whatever code a file names."""

    def find_class(self, module: str, name: str) -> Any:
        # A name with a dot would reach through a class or a module into everything that it has imported.
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        is_path = module.startswith("pathlib") and name in ("Path", "PosixPath")
        if name in INDEX_CLASSES.get(module, ()) or is_dtype or is_path:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # how Python 3.11.0 to 3.11.3 writes a member of an enum
            return _member
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _member(kind: Any, name: Any) -> Enum:
    """A member of an enum, and nothing else that ``getattr`` could reach."""
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f"it asks for {shown(name)} of {shown(kind)}")
    return kind[name]


def read_index(directory: Path) -> Metadata:
    """The index of a checkpoint; no code that it names is run.

    Raises:
        InputError: it is missing or damaged, or names anything that no index is made of.
    """
    path = directory / INDEX
    try:
        with open_plain(path) as file:
            index = _IndexUnpickler(file).load()
    except FileNotFoundError:
        raise InputError(f"{path} is missing; give a directory in Megatron's torch_dist format") from None
    except Exception as error:  # a pickle is a program: what it raises is Python's, and no list is complete
        cause = (error.strerror if isinstance(error, OSError) else None) or shortened(str(error))
        raise InputError(f"{path} is truncated or damaged ({cause}); copy the checkpoint again") from error
    if not isinstance(index, Metadata):
        raise InputError(f"{path} holds no index of a checkpoint; copy the checkpoint again")
    try:
        problem = _entries_problem(index) or _places_problem(directory, index)
    except (AttributeError, TypeError) as error:  # of an object without all of its parts
        problem = shortened(str(error))
    if problem is not None:
        raise InputError(f"{path} is damaged ({problem}); copy the checkpoint again")
    return index


def _entries_problem(index: Metadata) -> str | None:
    """What is wrong with the list of tensors and objects."""
    for key, entry in index.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            continue
        is_tensor = isinstance(entry, TensorStorageMetadata) and isinstance(entry.properties.dtype, torch.dtype)
        if not is_tensor or not _are_sizes(entry.size):
            return f"{shown(key)} is neither a tensor nor an object"
        ndim = len(entry.size)
        for chunk in entry.chunks:
            if not (_are_sizes(chunk.offsets, ndim) and _are_sizes(chunk.sizes, ndim)):
                return f"a chunk of {shown(key)} has no place in it"
    return None


def _are_sizes(sizes: Any, ndim: int | None = None) -> bool:
    is_list = isinstance(sizes, tuple) and (ndim is None or len(sizes) == ndim)
    return is_list and all(isinstance(size, int) and 0 <= size < 1 << 62 for size in sizes)


def _places_problem(directory: Path, index: Metadata) -> str | None:
    """What is wrong with the list of places: they are ranges of regular files beside the index."""
    names: set[Any] = set()
    for info in index.storage_data.values():
        if not _are_sizes((info.offset, info.length)):
            return f"a range of {shown(info.relative_path)} is none"
        names.add(info.relative_path)
    for name in sorted(names, key=str):
        if not isinstance(name, str) or "/" in name or not is_name_below(name):
            return f"it names {shown(name)}, which is no file beside it"
        if (directory / name).exists() and not (directory / name).is_file():
            return f"{name} is no regular file"
    return None


def _check(
    directory: Path, tensors: Mapping[str, TensorStorageMetadata], slices: Sequence[Slice], shape: ModelShape
) -> None:
    expected = global_shapes(shape, slices, shape.vocab_size)
    path = directory / INDEX
    for key, size in expected.items():
        if key not in tensors:
            raise InputError(f"{path}: tensor {key} is missing; the checkpoint is not whole, or of another model")
        found = tuple(tensors[key].size)
        is_padded = key in padded_keys(shape) and found[1:] == size[1:] and found[0] >= size[0]
        if found != size and not is_padded:
            raise InputError(f"{path}: {key} has shape {list(found)}, but config.json says {list(size)}")
        if tensors[key].properties.dtype not in FLOATS:
            raise InputError(f"{path}: {key} is {tensors[key].properties.dtype}; give an unquantised checkpoint")
        if sum(prod(chunk.sizes) for chunk in tensors[key].chunks) != prod(found):
            raise InputError(f"{path}: the chunks of {key} do not cover it; copy the checkpoint again")
    extra = [key for key in tensors if key not in expected]
    if extra:
        raise InputError(f"{path}: unexpected tensor {extra[0]}; the weights do not belong to this config.json")


class _Arrays:
    """Where the data of every chunk of the given tensors begins."""

    def __init__(self, directory: Path, index: Metadata, tensors: Mapping[str, TensorStorageMetadata]) -> None:
        self._by_start: dict[str, dict[int, list[tuple[Box, str, int]]]] = {}
        self._irregular: set[str] = set()  # tensors with a chunk of several entries of a stack
        wanted = [(key, chunk, entry.properties.dtype) for key, entry in tensors.items() for chunk in entry.chunks]
        handles: dict[str, int] = {}
        try:
            for key, chunk, dtype in wanted:
                info = index.storage_data.get(MetadataIndex(key, chunk.offsets))
                if info is None:
                    raise InputError(f"{directory / INDEX}: a chunk of {key} has no file; copy the checkpoint again")
                if info.relative_path not in handles:
                    handles[info.relative_path] = _open(directory / info.relative_path, key)
                where = f"{directory / info.relative_path}: {key}"
                start = _array_offset(handles[info.relative_path], info, tuple(chunk.sizes), dtype, where)
                box = tuple((a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))
                self._by_start.setdefault(key, defaultdict(list))[box[0][0]].append((box, info.relative_path, start))
                if len(box) < 3 or chunk.sizes[0] != 1:
                    self._irregular.add(key)
        finally:
            for handle in handles.values():
                os.close(handle)

    def near(self, key: str, start: int) -> list[tuple[Box, str, int]]:
        """Chunks that may hold elements of a box that begins at ``start``; in a stack those of its one entry."""
        if key not in self._irregular:
            return self._by_start[key].get(start, [])
        return [chunk for chunks in self._by_start[key].values() for chunk in chunks]


def _open(path: Path, key: str) -> int:
    try:
        return os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        raise InputError(f"{path} is missing, which holds {key}; copy the checkpoint again") from None


class _Window(io.RawIOBase):
    """A range of an open file as a file of its own."""

    def __init__(self, handle: int, start: int, length: int) -> None:
        self._handle, self._start, self._length, self._at = handle, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._length - self._at))
        data = os.pread(self._handle, count, self._start + self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


class _TensorUnpickler(pickle.Unpickler):
    """The description of a saved tensor: (record, storage offset, size, stride)."""

    def persistent_load(self, pid: Any) -> Any:
        return pid[2]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda record, offset, size, stride, *_: (record, offset, tuple(size), tuple(stride))
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda tensor, *_: tensor
        if module == "torch" and name.endswith("Storage"):
            return name
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        raise pickle.UnpicklingError(f"it is no plain tensor but {module}.{name}")


def _array_offset(handle: int, info: _StorageInfo, size: tuple[int, ...], dtype: torch.dtype, where: str) -> int:
    """Byte of the file at which a chunk's elements begin, row by row."""
    if os.fstat(handle).st_size < info.offset + info.length:
        raise InputError(f"{where} is truncated: the file ends before it; copy the checkpoint again")
    try:
        with zipfile.ZipFile(io.BufferedReader(_Window(handle, info.offset, info.length), 4096)) as archive:
            names = {name.partition("/")[2]: name for name in archive.namelist()}
            description = _TensorUnpickler(io.BytesIO(archive.read(names["data.pkl"]))).load()
            record, storage_offset, found, stride = description
            entry = archive.getinfo(names[f"data/{record}"])
        header = os.pread(handle, 30, info.offset + entry.header_offset)
        name_length, extra_length = struct.unpack("<HH", header[26:30])
    except (zipfile.BadZipFile, pickle.UnpicklingError, EOFError, KeyError, ValueError, TypeError, IndexError) as error:
        raise InputError(f"{where} is damaged ({error}); copy the checkpoint again") from error
    num_bytes = (storage_offset + prod(size)) * dtype.itemsize
    is_plain = entry.compress_type == zipfile.ZIP_STORED and entry.file_size >= num_bytes
    if found != size or not is_plain or not _is_row_major(size, stride):
        raise InputError(f"{where} is not the {list(size)} tensor that the index names; copy the checkpoint again")
    begin = info.offset + entry.header_offset + 30 + name_length + extra_length
    return int(begin + storage_offset * dtype.itemsize)


def _is_row_major(size: Sequence[int], stride: Sequence[int]) -> bool:
    return all(n == 1 or step == prod(size[dim + 1 :]) for dim, (n, step) in enumerate(zip(size, stride, strict=True)))
