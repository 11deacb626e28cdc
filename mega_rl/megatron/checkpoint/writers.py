"""The processes that Megatron forks to write a checkpoint: what they report to their rank, and how they end with it."""

from __future__ import annotations

import ctypes
import os
import pickle
import queue
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem_async
import psutil
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.exchange_utils import (
    ShardDistribution,
    determine_main_replica_uniform_distribution,
)
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    distribute_main_replicas_with_precomputed_distribution,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from mega_rl.bridge.files.torch_dist.manifest import Written, written
from mega_rl.parallel.collectives import is_any

PR_SET_PDEATHSIG = 1
WRITERS_OF_A_RANK = 2  # processes, and files
_libc = ctypes.CDLL(None)


class WriterEndedError(Exception):
    """A process that was writing a checkpoint is gone, and its part with it; says how it ended."""


class _Channel:
    """What a writer process of this rank reports, in a file that has no name and that no other rank has.

    Megatron's own channel is a manager process that imports the entry script again, which takes seconds and hangs
    scripts without a main guard; a pipe would fill up, since the writer's end is awaited before its report is read.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - open as long as the process
        self.process_id = os.getpid()

    def put(self, results: Any) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._file.write(pickle.dumps(results))

    def get_nowait(self) -> Any:
        self._file.seek(0)
        content = self._file.read()
        if not content:
            raise queue.Empty
        self._file.seek(0)
        self._file.truncate()
        return pickle.loads(content)


def prepare_writers() -> None:
    """Give Megatron the file of this process; ranks that are copies of one process would read each other's."""
    present = filesystem_async._results_queue
    if not isinstance(present, _Channel) or present.process_id != os.getpid():
        filesystem_async._results_queue = _Channel()


class Shards:
    """The part of one checkpoint that this rank writes.

    Args:
        root: directory of the checkpoint; the shards are in a directory under it.
        writer: Megatron's, which knows what goes into which file.
        plan: what this rank writes of which tensor.
    """

    def __init__(self, root: Path, writer: filesystem_async.FileSystemWriterAsync, plan: SavePlan) -> None:
        self._root, self._writer, self.plan = root, writer, plan
        self._channel = _Channel()

    def request(self) -> AsyncRequest:
        """What writes and reports, in this process or in one that is forked from it."""
        write, preload, arguments = self._writer.get_save_function_and_args()
        if write is not None:
            write = partial(_write_and_report, write, self._root, self._channel)
        return AsyncRequest(write, arguments, [], preload_fn=preload)

    def reported(self) -> tuple[list[WriteResult], list[Written]]:
        """What has been written of which tensor, and the files; once, after the request was carried out.

        Raises:
            OSError: a file was not written to its end.
            WriterEndedError: nobody was left to write it.
        """
        results = self._writer.retrieve_write_results()
        if isinstance(results, tuple):  # an error, and where it was raised
            error = results[0].__cause__ or WriterEndedError("ended without a report")
            raise error if isinstance(error, OSError | WriterEndedError) else OSError(str(error))
        files: list[Written] | OSError = self._channel.get_nowait() if results else []
        if isinstance(files, OSError):
            raise files
        ends: dict[str, int] = {}
        for place in (result.storage_data for result in results):
            ends[place.relative_path] = max(place.offset + place.length, ends.get(place.relative_path, 0))
        if ends != {Path(file.name).name: file.size for file in files}:
            raise OSError(f"{ends} bytes were written, and the files are {files}")
        return results, files

    def write_index(self, plans: Sequence[SavePlan], results: list[list[WriteResult]]) -> None:
        """The index of what all ranks have written; on rank 0.

        Raises:
            RuntimeError, ValueError: it is not every tensor whole and once.
        """
        if (fault := fault_of(plans)) is not None:
            raise RuntimeError(fault)
        _, index = _planner().create_global_plan(list(plans))
        index.all_local_plans = list(plans)
        self._writer.finish(index, results)


def fault_of(plans: Iterable[SavePlan]) -> str | None:
    """What torch's planner does not see in all ranks' plans: parts of unlike tensors, or objects that are missing.

    None: nothing is wrong.
    """
    known: dict[str, tuple[Any, Any]] = {}
    objects: Counter[tuple[str, str]] = Counter()  # (key, shape) -> how many of them there are
    for item in (item for plan in plans for item in plan.items):
        key, _, place = item.index.fqn.rpartition("/shard_")  # as Megatron names objects that every rank has one of
        if (tensor := item.tensor_data) is not None:
            what = tensor.size, tensor.properties.dtype
            if known.setdefault(item.index.fqn, what) != what:
                return f"two ranks wrote parts of {item.index.fqn} as of tensors of other sizes or dtypes"
        elif key:
            objects[key, place.split("_")[1]] += 1
    for (key, shape), count in objects.items():
        if count != (wanted := prod(map(int, shape.split(".")))):
            return f"{count} of {wanted} parts of {key} were written"
    return None


def _planner() -> MCoreSavePlanner:
    return MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)


def _write_and_report(
    write: Callable[..., None], root: Path, channel: _Channel, rank: int, buckets: list[Any], results: Any
) -> None:
    """Megatron's ``write``, then the sizes and digests of its files: who wrote a file hashes it."""
    try:
        with _noticing_ended_writers():
            write(rank, buckets, results)
    except WriterEndedError as error:
        results.put(error)
        return
    try:
        channel.put(written(root, [Path(path) for path, *_ in buckets]))
    except OSError as error:
        channel.put(error)


@contextmanager
def _noticing_ended_writers() -> Iterator[None]:
    """Ends the wait for the processes that are forked in this block if one of them does not end well.

    Megatron waits until each of them has reported, for ever if one is killed. The kernel's signal interrupts that.

    Raises:
        WriterEndedError: one of them ended badly; the others are killed.
    """
    this = psutil.Process()
    others = set(this.children())

    def look(*_: Any) -> None:
        for writer in set(this.children()) - others:
            with suppress(ChildProcessError):  # it was waited for
                end = os.waitid(os.P_PID, writer.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if end is None or end.si_status == 0:
                    continue
                how = "exit status" if end.si_code == os.CLD_EXITED else "signal"
                raise WriterEndedError(f"ended with {how} {end.si_status}")

    before = signal.signal(signal.SIGCHLD, look)
    try:
        yield
    except WriterEndedError:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for writer in set(this.children()) - others:
            writer.kill()
        raise
    finally:
        signal.signal(signal.SIGCHLD, before)


class ShardStrategy:
    """Megatron's torch_dist format, planned by each rank for itself: the plans meet on rank 0 with what was written.

    Megatron's own planning has all ranks exchange a description of every tensor three times before they write.
    """

    def __init__(self) -> None:
        self._held: list[Any] | None = None  # what ``_shares`` is of
        self._shares: ShardDistribution | None = None

    def shards(self, state: dict[str, Any], root: Path, folder: str, replicas: dist.ProcessGroup) -> Shards:
        """The shards under ``root / folder`` that this rank is to write of a sharded state. All ranks call it.

        Args:
            replicas: ranks that hold the same tensors, which they share out among them: with the first checkpoint, and
                whenever what they hold has changed.
        """
        held = [_described(one) for one in nested_values(state) if isinstance(one, ShardedTensor)]
        if is_any(held != self._held, replicas):
            self._held, self._shares = held, determine_main_replica_uniform_distribution(state, replicas)
        distribute_main_replicas_with_precomputed_distribution(state, replicas, self._shares)
        tensors = mcore_to_pyt_state_dict(_replace_state_dict_keys_with_sharded_keys(state, True)[0], False)
        writer = filesystem_async.FileSystemWriterAsync(root / folder, thread_count=WRITERS_OF_A_RANK)
        planner, is_first = _planner(), dist.get_rank() == 0
        planner.set_up_planner(tensors, is_coordinator=is_first)
        writer.set_up_storage_writer(is_first)
        plan = writer.prepare_local_plan(planner.create_local_plan())
        placed = writer.prepare_decentralized_global_plan(planner.create_decentralized_global_plan(plan))
        writer.prepare_write_data(planner.finish_plan(placed), planner)
        return Shards(root, writer, plan)


def _described(tensor: ShardedTensor) -> tuple[Any, ...]:
    return tensor.key, tensor.dtype, tensor.local_shape, tensor.global_shape, tensor.global_offset, tensor.replica_id


class _Forks:
    """Lets a process that is forked while ``is_bound`` end with the one that forked it, and so on down the line.

    A writer whose rank was killed would wait for ever to be told that its report has been read.
    """

    def __init__(self) -> None:
        self.is_bound = False
        self._parent = 0
        os.register_at_fork(before=self._before, after_in_child=self._in_child)

    def _before(self) -> None:
        self._parent = os.getpid()

    def _in_child(self) -> None:
        if self.is_bound:
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != self._parent:  # it ended before this process could ask
                os._exit(1)


_forks = _Forks()


@contextmanager
def writers_end_with_us() -> Iterator[None]:
    """What is forked in this block, and what that forks, is killed when its parent has ended, however it ended."""
    _forks.is_bound = True
    try:
        yield
    finally:
        _forks.is_bound = False
