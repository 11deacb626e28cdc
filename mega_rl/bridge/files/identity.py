"""Which weights a model directory holds, in one hash, by which partly trained checkpoints name their base."""

from __future__ import annotations

import hashlib
from math import prod

import torch
import torch.distributed as dist

from mega_rl.bridge.files.huggingface import HFReader
from mega_rl.bridge.mapping.tensors import hf_tensors
from mega_rl.models.shape import ModelShape
from mega_rl.observe.heartbeat import HEART
from mega_rl.parallel.collectives import gather_objects, together

CHUNK_ELEMENTS = 1 << 26  # read at once


def identity(weights: HFReader, shape: ModelShape) -> str:
    """The hash of all tensors of a checked model, whatever its files are cut into. Collective: every rank reads a part.

    Raises:
        InputError: a file cannot be read; on all ranks.
    """
    num_ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    own: dict[str, str] = {}
    with together("hashing the weights of model.path"):
        for name, size in list(hf_tensors(shape).items())[rank::num_ranks]:
            own[name] = digest(weights, name, size)
    digests = {name: value for part in gather_objects(own) for name, value in part.items()}
    return hashlib.blake2b("\n".join(f"{n} {digests[n]}" for n in sorted(digests)).encode(), digest_size=16).hexdigest()


def digest(weights: HFReader, name: str, size: tuple[int, ...]) -> str:
    """The hash of one tensor: dtype, shape and values as its file has them."""
    found = hashlib.blake2b(digest_size=16)
    rows = max(1, CHUNK_ELEMENTS // max(1, prod(size[1:])))
    for start in range(0, size[0], rows):
        HEART.mark()
        box = ((start, min(start + rows, size[0])), *((0, n) for n in size[1:]))
        part = weights.read(name, box).contiguous()
        if start == 0:
            found.update(f"{part.dtype} {size}".encode())
        found.update(part.view(torch.uint8).flatten().numpy().data)
    return found.hexdigest()
