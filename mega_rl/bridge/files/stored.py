"""A model's Hugging Face tensors as bytes of files, whatever the files: what a conversion reads and writes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from mega_rl.bridge.slices import Box, carry_over, extents, indices, intersect, num_elements, whole_box
from mega_rl.errors import InputError

# The errors with which this kernel or these file systems refuse to copy by themselves.
_NO_KERNEL_COPY = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL)


@dataclass(frozen=True, slots=True)
class FilePlace:
    """Where a box of a tensor lies: in ``box`` of an array of ``shape``, stored row by row from ``offset`` on."""

    hf_box: Box
    file: str  # relative to the root of the files
    offset: int  # bytes
    shape: tuple[int, ...]
    box: Box  # as hf_box, with a dimension more in front if the array stacks tensors
    is_transposed: bool = False  # the array has the matrix's columns for rows, in ``shape`` and ``box`` too

    def in_array(self, part: Box) -> Box:
        """Where a part of ``hf_box`` lies in the array."""
        if self.is_transposed:
            return carry_over(part[::-1], self.hf_box[::-1], self.box)
        return carry_over(part, self.hf_box, self.box)

    def in_order(self, values: Tensor) -> Tensor:
        """The view of a part's values in the order of the array; its own inverse."""
        return values.t() if self.is_transposed else values


@dataclass(frozen=True)
class StoredTensors:
    """All tensors of one model in the files of one directory."""

    root: Path
    shapes: Mapping[str, tuple[int, ...]]  # in the model's order
    dtypes: Mapping[str, torch.dtype]
    places: Mapping[str, Sequence[FilePlace]]  # disjoint; together the whole tensor

    @property
    def num_bytes(self) -> int:
        return sum(prod(size) * self.dtypes[name].itemsize for name, size in self.shapes.items())

    def files(self) -> list[str]:
        return sorted({place.file for places in self.places.values() for place in places})


class OpenTensors:
    """The files of a ``StoredTensors``, open; boxes are read and written by position and no page of a file is mapped.

    Used in a ``with`` block, and by several threads at a time.
    """

    def __init__(self, stored: StoredTensors, is_writable: bool = False) -> None:
        self.stored = stored
        with ExitStack() as stack:
            self._handles: dict[str, int] = {}
            for file in stored.files():
                handle = os.open(stored.root / file, os.O_RDWR if is_writable else os.O_RDONLY)
                stack.callback(os.close, handle)
                self._handles[file] = handle
            self._stack = stack.pop_all()

    def __enter__(self) -> OpenTensors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def read(self, name: str, box: Box) -> Tensor:
        """The box, contiguous, in the stored dtype; InputError if a file ends too early or cannot be read."""
        out = torch.empty(extents(box), dtype=self.stored.dtypes[name])
        num_read = 0
        for place, part, target in self._parts(name, box, out):
            ordered = place.in_order(target)
            piece = ordered if ordered.is_contiguous() else torch.empty(ordered.shape, dtype=out.dtype)
            self._read_array(name, place, place.in_array(part), piece)
            if piece is not ordered:
                ordered.copy_(piece)
            num_read += target.numel()
        assert num_read == out.numel(), f"{name}: {num_read} of {out.numel()} elements have a place"
        return out

    def write(self, name: str, box: Box, values: Tensor) -> None:
        """Puts the box, in the stored dtype, to its places; OSError if that fails."""
        num_written = 0
        for place, part, piece in self._parts(name, box, values):
            self._write_array(place, part, piece)
            num_written += piece.numel()
        assert num_written == values.numel(), f"{name}: {num_written} of {values.numel()} elements have a place"

    def copy_from(self, source: OpenTensors, name: str, box: Box) -> None:
        """Puts the box of the source's tensor, of the same dtype, to its places; InputError and OSError as above.

        What is one run of bytes on both sides is copied by the kernel, which takes a third of the processor time.
        """
        assert self.stored.dtypes[name] == source.stored.dtypes[name], name
        values: Tensor | None = None
        for place in self.stored.places[name]:
            part = intersect(place.hf_box, box)
            if part is None or self._copied_by_kernel(source, name, place, part):
                continue
            if values is None:  # whole rows, once for all places that share them by columns
                values = source.read(name, box)
            self._write_array(place, part, values[indices(carry_over(part, box, whole_box(values.shape)))])

    def _copied_by_kernel(self, source: OpenTensors, name: str, place: FilePlace, part: Box) -> bool:
        itemsize = self.stored.dtypes[name].itemsize
        copies: list[tuple[FilePlace, tuple[int, int], tuple[int, int]]] = []
        for origin in source.stored.places[name]:  # a tensor that was split by rows comes from several
            piece = intersect(origin.hf_box, part)
            if piece is not None:
                read, written = _span(origin, piece, itemsize), _span(place, piece, itemsize)
                if read is None or written is None:
                    return False
                copies.append((origin, read, written))
        if sum(num_bytes for _, (_, num_bytes), _ in copies) != num_elements(part) * itemsize:
            return False  # the read says what is missing
        for origin, (start, num_bytes), (out_start, _) in copies:
            files, done = (source._handles[origin.file], self._handles[place.file]), 0
            while done < num_bytes:
                try:
                    num_copied = os.copy_file_range(*files, num_bytes - done, start + done, out_start + done)
                except OSError as error:
                    if error.errno in _NO_KERNEL_COPY:
                        return False  # written again by hand, what is there already too
                    raise
                if num_copied == 0:
                    raise source.truncated(origin.file, name)
                done += num_copied
        return True

    def truncated(self, file: str, name: str) -> InputError:
        return InputError(f"{self.stored.root / file} is truncated: it ends within {name}; copy it again")

    def _parts(self, name: str, box: Box, values: Tensor) -> Iterator[tuple[FilePlace, Box, Tensor]]:
        """Every place with elements of the box, those elements, and the view of ``values`` that stands for them."""
        for place in self.stored.places[name]:
            part = intersect(place.hf_box, box)
            if part is not None:
                yield place, part, values[indices(carry_over(part, box, whole_box(values.shape)))]

    def _write_array(self, place: FilePlace, part: Box, piece: Tensor) -> None:
        handle, itemsize = self._handles[place.file], piece.element_size()
        data, done = _bytes_of(place.in_order(piece).contiguous()), 0
        for start, count in _runs(place.in_array(part), place.shape):
            begin, end = place.offset + start * itemsize, done + count * itemsize
            while done < end:
                written = os.pwrite(handle, data[done:end], begin)
                done, begin = done + written, begin + written

    def _read_array(self, name: str, place: FilePlace, box: Box, piece: Tensor) -> None:
        handle, itemsize, data = self._handles[place.file], piece.element_size(), _bytes_of(piece)
        done = 0
        for start, count in _runs(box, place.shape):
            begin, end = place.offset + start * itemsize, done + count * itemsize
            while done < end:
                try:
                    num_read = os.preadv(handle, [data[done:end]], begin)
                except OSError as error:
                    raise InputError(
                        f"{self.stored.root / place.file}: cannot read {name} ({error.strerror})"
                    ) from error
                if num_read == 0:
                    raise self.truncated(place.file, name)
                done, begin = done + num_read, begin + num_read


def row_blocks(shape: Sequence[int], itemsize: int, max_bytes: int) -> Iterator[Box]:
    """A tensor in blocks of whole rows of at most ``max_bytes``, or of one row if that is longer."""
    rows = max(1, max_bytes // (itemsize * prod(shape[1:])))
    for start in range(0, shape[0], rows):
        yield ((start, min(start + rows, shape[0])), *whole_box(shape[1:]))


def _runs(box: Box, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where the box's elements lie in a row-major array, in their order: (first element, number of elements)."""
    if not box:
        yield 0, 1
        return
    (start, end), row = box[0], prod(shape[1:])
    if box[1:] == whole_box(shape[1:]):
        yield start * row, num_elements(box)
        return
    for i in range(start, end):
        for first, count in _runs(box[1:], shape[1:]):
            yield i * row + first, count


def _span(place: FilePlace, part: Box, itemsize: int) -> tuple[int, int] | None:
    """First byte and number of bytes of a part of a place, or None if it is not one run in the tensor's own order."""
    if place.is_transposed:
        return None
    runs = list(islice(_runs(place.in_array(part), place.shape), 2))
    return (place.offset + runs[0][0] * itemsize, runs[0][1] * itemsize) if len(runs) == 1 else None


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data
