"""Collectives on Python objects and metrics, and agreement on failure, over any torch.distributed group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from mega_rl.errors import InputError


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """``value`` of every rank, in rank order, on every rank; a single process needs no group."""
    if not dist.is_initialized():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def broadcast_object(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Rank 0's ``value`` on every rank."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, group_src=0, group=group)
    return box[0]


@contextmanager
def together(what: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run a block that may fail on some ranks only: if it fails on one, every rank raises, and none waits for ever.

    The block must hold no collective of its own: a rank that failed would meet the others inside it.

    Raises:
        InputError: the first failing rank's sentence, if that rank raised one.
        RuntimeError: on the other ranks, if the failure is a fault of the program.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must learn of it before it is raised again
        failure = error
    reports = gather_objects(None if failure is None else (isinstance(failure, InputError), str(failure)), group)
    if failure is not None:
        raise failure
    for rank, report in enumerate(reports):
        if report is not None:
            is_input, sentence = report
            raise InputError(sentence) if is_input else RuntimeError(f"{what} failed on rank {rank}: {sentence}")
