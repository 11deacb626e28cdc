"""Copying a model's tensors from one set of files into another, block by block, and proving that it was done."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from mega_rl.bridge.files.assembly import Assembly
from mega_rl.bridge.files.stored import OpenTensors, StoredTensors, row_blocks
from mega_rl.bridge.slices import Box, num_elements

# (tensor, box of whole rows, values) -> values of the same shape and dtype
Transform = Callable[[str, Box, Tensor], Tensor]
Advance = Callable[[int], None]  # is told of every number of finished bytes
NUM_THREADS = 2  # threads that compute digests
RECORDED_BLOCKS = 32  # a killed conversion repeats at most so many


def copy_tensors(
    source: StoredTensors,
    target: StoredTensors,
    assembly: Assembly,
    bucket_bytes: int,
    advance: Advance,
    transform: Transform | None = None,
) -> None:
    """Write every tensor of ``source``, in the target's dtypes, to its places; continues where ``assembly`` stands.

    Holds at most three blocks of ``bucket_bytes`` (or of one row): as read, cast, and cut for one place.

    Raises:
        InputError: a file of the source cannot be read, or one of the target not be written.
    """
    blocks = [
        (name, box)
        for name, size in source.shapes.items()
        for box in row_blocks(size, _itemsize(source, target, name), bucket_bytes)
    ]
    with OpenTensors(source) as reader, OpenTensors(target, is_writable=True) as writer:
        for number, (name, box) in enumerate(blocks):
            if number >= assembly.num_done:
                try:
                    if transform is None and source.dtypes[name] == target.dtypes[name]:
                        writer.copy_from(reader, name, box)
                    else:
                        values = reader.read(name, box)
                        changed = values if transform is None else transform(name, box, values)
                        writer.write(name, box, changed.to(target.dtypes[name]))
                except OSError as error:
                    raise assembly.disk_error(error) from error
                if (number + 1) % RECORDED_BLOCKS == 0 or number + 1 == len(blocks):
                    assembly.record(number + 1)
            advance(num_elements(box) * target.dtypes[name].itemsize)


def digests(
    stored: StoredTensors,
    dtypes: Mapping[str, torch.dtype],
    bucket_bytes: int,
    advance: Advance,
    transform: Transform | None = None,
) -> dict[str, str]:
    """SHA-256 of every tensor's bytes, row by row, little-endian, in the given dtypes; InputError as in a read.

    ``transform``, if given, is applied to every block first; two threads call it, each for tensors of its own.
    """
    with OpenTensors(stored) as reader, ThreadPoolExecutor(NUM_THREADS) as pool:

        def digest(name: str) -> str:
            found = hashlib.sha256()
            for box in row_blocks(stored.shapes[name], stored.dtypes[name].itemsize, bucket_bytes):
                values = reader.read(name, box)
                values = (values if transform is None else transform(name, box, values)).to(dtypes[name])
                found.update(values.view(-1).view(torch.uint8).numpy().data)
                advance(values.nbytes)
            return found.hexdigest()

        return dict(zip(stored.shapes, pool.map(digest, stored.shapes), strict=True))


def _itemsize(source: StoredTensors, target: StoredTensors, name: str) -> int:
    return max(source.dtypes[name].itemsize, target.dtypes[name].itemsize)
