"""Collectives on Python objects and metrics, and agreement on failure, over any torch.distributed group."""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from mega_rl.errors import InputError
from mega_rl.observe.heartbeat import HEART
from mega_rl.parallel.figures import is_any
from mega_rl.parallel.schedule import split_even
from mega_rl.parallel.start import store_of_this_start

Item = TypeVar("Item")
Result = TypeVar("Result")


_ON_USE = "TORCH_GLOO_LAZY_INIT"


def connect_on_use() -> None:
    """Have gloo connect only those ranks of a group that talk: neighbours of a ring and of a tree.

    By itself it connects every rank with every other one, in each group: 2,046 sockets a process at 1,024 ranks, where
    many hosts allow 1,024 files. It reads this once, before a process's first group. All processes of a group must
    agree: where one connects at once and the other on use, gloo reads the other's address wrongly and crashes.
    """
    os.environ[_ON_USE] = "1"


def connects_on_use() -> bool:
    return os.environ.get(_ON_USE) == "1"


def join_world(backend: str, timeout_s: float) -> None:
    """The default group, of all processes that the launcher's variables tell of; a single process needs no launcher."""
    connect_on_use()
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    timeout = datetime.timedelta(seconds=timeout_s)
    store, rank, size = store_of_this_start(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """``value`` of every rank, in rank order, on every rank; a single process needs no group."""
    if not dist.is_initialized():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    with HEART.waiting("the other ranks"):
        dist.all_gather_object(gathered, value, group=group)
    return gathered


def broadcast_object(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Rank 0's ``value`` on every rank."""
    if not dist.is_initialized():
        return value
    box = [value]
    with HEART.waiting("the other ranks"):
        dist.broadcast_object_list(box, group_src=0, group=group)
    return box[0]


def gather_to_first(value: Any) -> list[Any]:
    """``value`` of every rank, in rank order, on rank 0; nothing on the others. Collective."""
    if not dist.is_initialized():
        return [value]
    gathered: list[Any] | None = [None] * dist.get_world_size() if is_first() else None
    with HEART.waiting("the other ranks"):
        dist.gather_object(value, gathered)
    return gathered or []


def is_first() -> bool:
    """Whether this is rank 0, or a process without ranks."""
    return not dist.is_initialized() or dist.get_rank() == 0


def own_name() -> str:
    """This rank and its machine, for a sentence."""
    return f"rank {dist.get_rank() if dist.is_initialized() else 0} on {socket.gethostname()}"


@contextmanager
def together(what: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run a block that may fail on some ranks only: if it fails on one, every rank raises, and none waits for ever.

    As long as nothing fails the ranks exchange one number; they exchange sentences only after a failure.

    The block must hold no collective of its own: a rank that failed would meet the others inside it. It may if whatever
    fails before the last of them fails on all ranks at once, as in another ``together``.

    Raises:
        InputError: the first failing rank's sentence, the same on all ranks, if that rank raised one.
        RuntimeError: on the other ranks, if the failure is a fault of the program.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must learn of it before it is raised again
        failure = error
    if not is_any(failure is not None, group):
        return
    reports = gather_objects(None if failure is None else (isinstance(failure, InputError), str(failure)), group)
    rank, is_input, sentence = next((rank, *report) for rank, report in enumerate(reports) if report is not None)
    if failure is not None and not (is_input and isinstance(failure, InputError)):
        raise failure
    if is_input:
        raise InputError(sentence) from failure
    raise RuntimeError(f"{what} failed on rank {rank}: {sentence}")


def work_shared(items: Sequence[Item], work: Callable[[Item], Result]) -> list[Result]:
    """``work`` of every item, in order, on every rank; each rank does an even share of it. Collective.

    Args:
        items: the same on every rank.

    Raises:
        InputError: of the first item for which ``work`` raises one, on every rank.
    """
    size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    share = split_even(len(items), size)[rank]
    done: list[Result] = []
    sentence: str | None = None
    for index in share:
        try:
            done.append(work(items[index]))
        except InputError as error:
            sentence = str(error)
            break
    results: list[Result] = []
    for part, problem in gather_objects((done, sentence)):
        results += part
        if problem is not None:
            raise InputError(problem)
    return results
