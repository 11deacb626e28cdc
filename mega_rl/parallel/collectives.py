"""Collectives on figures and Python objects, and agreement on failure.

What is asked in every step are a few numbers, in tensors of a fixed size. ``gather_objects`` takes two exchanges of
what it first has to measure, and hands every rank as many values as there are ranks.
"""

from __future__ import annotations

import datetime
import os
import resource
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mega_rl.errors import InputError
from mega_rl.observe.heartbeat import HEART
from mega_rl.parallel.schedule import split_even
from mega_rl.parallel.start import store_of_this_start

Item = TypeVar("Item")
Result = TypeVar("Result")
Reduction = Callable[[list[list[float]]], Sequence[float]]

MAX_FILES = 1 << 16  # that a process has open at a time, far more than there are ranks

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


def allow_files() -> None:
    """Let this process open as many files as its host allows: rank 0 has a connection from every rank.

    The limit that a process begins with is 1,024 on many hosts.
    """
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if most == resource.RLIM_INFINITY else min(most, MAX_FILES)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def join_world(backend: str, timeout_s: float) -> None:
    """The default group, of all processes that the launcher's variables tell of; a single process needs no launcher."""
    connect_on_use()
    allow_files()
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    timeout = datetime.timedelta(seconds=timeout_s)
    store, rank, size = store_of_this_start(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def smallest(number: int, group: dist.ProcessGroup | None = None) -> int:
    """The smallest number of all ranks, on every rank. Collective."""
    if not dist.is_initialized():
        return number
    found = torch.tensor([number])
    with HEART.waiting("the other ranks"):
        dist.all_reduce(found, dist.ReduceOp.MIN, group=group)
    return int(found)


def is_any(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Whether the flag is set on at least one rank; the same on every rank. Collective."""
    return smallest(0 if flag else 1, group) == 0


def summed(numbers: Sequence[int]) -> list[int]:
    """The sums of whole numbers over all ranks, place by place, on every rank. Collective."""
    if not dist.is_initialized():
        return list(numbers)
    found = torch.tensor(numbers, dtype=torch.int64)
    with HEART.waiting("the other ranks"):
        dist.all_reduce(found)
    return [int(number) for number in found.tolist()]


def reduced(own: Sequence[float], reduction: Reduction, size: int) -> list[float]:
    """What ``reduction`` makes of the numbers of all ranks, on every rank. Collective.

    Rank 0 computes it, from the ranks in their order: so a sum of floats is the same at every run, which it would not
    be in the order of a tree.

    Args:
        own: equally many on every rank.
        reduction: called on rank 0 with one row per rank; must not raise, since the other ranks wait for it.
        size: how many numbers it returns.
    """
    if not dist.is_initialized():
        return list(reduction([list(own)]))
    row, found = torch.tensor(own, dtype=torch.float64), torch.empty(size, dtype=torch.float64)
    is_first = dist.get_rank() == 0
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())] if is_first else None
    with HEART.waiting("the other ranks"):
        dist.gather(row, rows)
        if rows is not None:
            found = torch.tensor(list(reduction(torch.stack(rows).tolist())), dtype=torch.float64)
            assert len(found) == size, "a reduction that returns another number of numbers than the ranks wait for"
        dist.broadcast(found, src=0)
    return [float(number) for number in found.tolist()]


def column_sums(rows: list[list[float]]) -> list[float]:
    """A ``Reduction``: sums in the order of the ranks."""
    return [sum(column) for column in zip(*rows, strict=True)]


def placed(own: Mapping[int, float], size: int) -> list[float]:
    """``size`` numbers of which each rank has some, by their places, and no two the same; on every rank. Collective."""
    found = torch.full((size,), -0.0, dtype=torch.float64)  # which added to any number leaves it as it is
    for place, number in own.items():
        found[place] = number
    if dist.is_initialized():
        with HEART.waiting("the other ranks"):
            dist.all_reduce(found)
    return [float(number) for number in found.tolist()]


def numbers_to_first(own: Sequence[float]) -> list[list[float]]:
    """The numbers of every rank, however many each has, in rank order, on rank 0; nothing on the others. Collective."""
    if not dist.is_initialized():
        return [list(own)]
    row = torch.zeros(1 - smallest(-len(own)), dtype=torch.float64)
    row[0], row[1 : 1 + len(own)] = len(own), torch.tensor(own, dtype=torch.float64)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())] if is_first() else None
    with HEART.waiting("the other ranks"):
        dist.gather(row, rows)
    return [one[1 : 1 + int(one[0])].tolist() for one in rows or []]


def told_numbers(numbers: Sequence[float], group: dist.ProcessGroup | None = None) -> list[float]:
    """Rank 0's numbers, however many, on every rank of the group; none take one exchange. Collective."""
    if not dist.is_initialized():
        return list(numbers)
    count = torch.tensor([len(numbers)])
    with HEART.waiting("the other ranks"):
        dist.broadcast(count, group=group, group_src=0)
        if not int(count):
            return []
        found = torch.empty(int(count), dtype=torch.float64)
        if dist.get_rank(group) == 0:
            found = torch.tensor(numbers, dtype=torch.float64)
        dist.broadcast(found, group=group, group_src=0)
    return [float(number) for number in found.tolist()]


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


def broadcast_list(values: list[Item], group: dist.ProcessGroup | None = None) -> list[Item]:
    """Rank 0's ``values`` on every rank; while there are none, a number is all that is exchanged. Collective."""
    return broadcast_object(values, group) if told_numbers([1] * bool(values), group) else []


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
