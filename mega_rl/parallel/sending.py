"""Bytes and objects between some ranks only, in buffers of their own size.

``gather_objects`` pads every rank's value to the largest one and hands all of them to every rank; what is here moves
what is there, to those who need it.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mega_rl.observe.heartbeat import HEART
from mega_rl.parallel.collectives import is_first, placed


def exchange(outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> None:
    """Send tensors to other ranks and fill others with what they send. The ranks at both ends of each call it.

    Args:
        outgoing: receiver -> what it gets, in host memory.
        incoming: sender -> where it goes, of the same size and type as the sender's.
    """
    under_way = [dist.irecv(tensor, src=rank) for rank, tensor in incoming.items()]
    under_way += [dist.isend(tensor, dst=rank) for rank, tensor in outgoing.items()]
    with HEART.waiting("the other ranks"):
        for work in under_way:
            assert work is not None, "a rank sends to itself"
            work.wait()


def collect_to_first(value: Any, owners: Sequence[int]) -> list[Any]:
    """The ``value`` of every owner, in their order, on rank 0; nothing on the others. Collective.

    Args:
        owners: ranks, the same everywhere; the ``value`` of others is not looked at.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    others = [owner for owner in owners if owner != 0]
    if not is_first():
        if rank in others:
            content = _as_tensor(value)
            exchange({0: torch.tensor([content.numel()])}, {})
            exchange({0: content}, {})
        return []
    sizes = {owner: torch.zeros(1, dtype=torch.int64) for owner in others}
    exchange({}, sizes)
    contents = {owner: torch.empty(int(size), dtype=torch.uint8) for owner, size in sizes.items()}
    exchange({}, contents)
    return [value if owner == 0 else pickle.loads(contents.pop(owner).numpy().data) for owner in owners]


def spread(value: Any, owners: Sequence[int]) -> list[Any]:
    """The ``value`` of every owner, in their order, on every rank. Collective; as above.

    Every owner puts its bytes where the others have zeros, and one sum gives all of them to all ranks.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value for _ in owners]
    place = {owner: number for number, owner in enumerate(owners)}.get(dist.get_rank())
    content = torch.empty(0, dtype=torch.uint8) if place is None else _as_tensor(value)
    sizes = [int(size) for size in placed({} if place is None else {place: content.numel()}, len(owners))]
    whole = torch.zeros(sum(sizes), dtype=torch.uint8)
    parts = whole.split(sizes)
    if place is not None:
        parts[place].copy_(content)
    with HEART.waiting("the other ranks"):
        dist.all_reduce(whole)
    return [value if number == place else pickle.loads(part.numpy().data) for number, part in enumerate(parts)]


def _as_tensor(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value, protocol=5)), dtype=torch.uint8)
