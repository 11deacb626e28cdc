"""Writing checkpoints that are either whole or not chosen.

A checkpoint is written under a hidden temporary name. Every rank syncs, measures and hashes what it has written itself
and reports it; rank 0 makes the manifest from these reports alone, once it sees every one of these files with its size,
and only then the directory gets its final name: an asynchronous save does so when all ranks have written.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial as partial_call
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from mega_rl import platform
from mega_rl.bridge.files.assembly import fsync
from mega_rl.bridge.files.torch_dist.columns import extract, to_bytes
from mega_rl.bridge.files.torch_dist.manifest import (
    COLUMNS,
    MANIFEST,
    PROGRESS,
    WEIGHTS,
    Written,
    manifest,
    model_record,
    written,
)
from mega_rl.bridge.files.torch_dist.torch_dist import INDEX
from mega_rl.bridge.files.torch_dist.visible import patiently, size_of
from mega_rl.errors import InputError
from mega_rl.megatron.checkpoint.checkpoint import (
    GENERATORS,
    all_checkpoints,
    directory_of,
    sharded_state,
    tuning_record,
)
from mega_rl.megatron.checkpoint.writers import (
    Shards,
    ShardStrategy,
    WriterEndedError,
    prepare_writers,
    writers_end_with_us,
)
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.megatron.offload import PARTS
from mega_rl.parallel.collectives import gather_to_first, is_any, own_name, together

UNFINISHED = (".step_*.incomplete", ".step_*.replaced")  # what a killed save leaves
LATE_WAIT_S = 5.0  # for the late part at a time: ranks wait for rank 0 in a collective, which has a limit
NO_PLAN = SavePlan([])
COMMON = "common.pt"  # Megatron's file of what is no tensor


@runtime_checkable
class Late(Protocol):
    """A part of a checkpoint that is not known yet when its tensors are written."""

    def get_late(self, wait_s: float) -> dict[str, Any] | None:
        """The part, once; on rank 0, the only one that calls it.

        Args:
            wait_s: for so long, seconds; None if it is not there then.
        """
        ...


@dataclass(frozen=True)
class _Open:
    """A checkpoint whose tensors are written or on their way, and that still waits for its late part."""

    late: Late
    publish: Callable[[Mapping[str, Any]], None]  # given it; on other ranks nothing


class Report(NamedTuple):
    """What one rank has written of a checkpoint."""

    writer: str  # rank and host
    results: list[WriteResult]  # where each tensor is
    files: list[Written]
    plan: SavePlan = NO_PLAN  # what of which tensor
    generators: Any = None  # its random states as the checkpoint began


class CheckpointWriter:
    """Writes the checkpoints of one run, at most one at a time.

    Args:
        root: where the run keeps its checkpoints; must be the same file system on every node.
        keep: how many of the newest checkpoints to keep; 0 keeps all.
        is_async: ``save`` returns once the state is copied; a process of each rank writes it, and the checkpoint gets
            its name in a later ``poll``, ``save`` or ``finish``.

    Raises (each method, on all ranks):
        InputError: a rank cannot write, or rank 0 does not see what another one wrote; nothing is published then.
    """

    def __init__(self, root: Path, keep: int, is_async: bool) -> None:
        self.root, self.keep = root, keep
        prepare_writers()
        self._strategy = ShardStrategy()
        self._calls = AsyncCallsQueue() if is_async else None
        self._open: _Open | None = None

    def save(self, step: int, engine: MegatronEngine, progress: Mapping[str, Any]) -> None:
        """Write one checkpoint. All ranks call it.

        Args:
            step: the number of finished steps, which names it.
            engine: whose weights, optimizer and schedule are written.
            progress: what else a resume needs (plain values); only rank 0's is written. If its key ``data`` is
                ``Late`` on all ranks, the checkpoint gets its name in a later call.
        """
        engine.policy.refuse_replaced("a checkpoint")
        assert engine.offload.is_complete, "a checkpoint needs weights and optimizer on the device"
        self.finish()
        for one in (engine, *engine.companions.values()):
            one.offload.to_device()
            with one.in_its_groups():
                one.collect_weights()
        partial = self.root / f".step_{step:08d}.incomplete"
        generators = platform.current().rng_state()
        state, metadata = sharded_state(engine, is_loading=False)
        tuning = tuning_record(engine)
        # What Megatron would validate of it in exchanges of its own is validated with the index.
        state, common = save_preprocess({**state, "content_metadata": metadata}, validate_access_integrity=False)
        late = progress["data"] if isinstance(progress.get("data"), Late) else None
        content = {
            **progress,
            "step": step,
            "skipped_steps": engine.stepper.skipped.state_dict(),
            "model": model_record(engine.policy.shape),
            "world_size": dist.get_world_size(),
            "expert_parallel": engine.policy.layout.expert,
            **tuning,
            "companions": companion_records(engine),
        }
        with self._on_disk(step):
            if dist.get_rank() == 0:
                sweep(self.root)
                (partial / WEIGHTS).mkdir(parents=True)
                if late is None:
                    _write_progress(partial, content)
                (partial / WEIGHTS / COMMON).write_bytes(_saved(common))
                save_config(CheckpointingConfig("torch_dist", 1), str(partial / WEIGHTS))
        replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
        shards = self._strategy.shards(state, partial, WEIGHTS, replicas)
        request, publish = shards.request(), partial_call(self._publish, step, partial, shards, generators)
        if late is None:
            request.add_finalize_fn(partial_call(publish, None))
        else:
            self._open = _Open(late, lambda data: publish({**content, "data": data}))
        with writers_end_with_us():
            if self._calls is None:
                request.execute_sync()
            else:
                self._calls.schedule_async_request(request)
        for companion in engine.companions.values():
            companion.offload.to_host(*PARTS)

    def poll(self) -> None:
        """Give the checkpoint under way its name if all of it is there. All ranks call it."""
        self._close(wait=False)

    def finish(self) -> None:
        """Wait for the checkpoint under way. All ranks call it."""
        self._close(wait=True)

    def _close(self, wait: bool) -> None:
        if self._calls is not None:
            self._calls.maybe_finalize_async_calls(blocking=wait)
        if self._open is None or (self._calls is not None and self._calls.get_num_unfinalized_calls()):
            return
        found, is_there = None, False
        while not is_there:
            with together("closing a checkpoint"):
                if dist.get_rank() == 0:
                    found = self._open.late.get_late(LATE_WAIT_S if wait else 0.0)
            is_there = is_any(found is not None)  # only rank 0 asks
            if not wait and not is_there:
                return
        publish, self._open = self._open.publish, None
        publish(found or {})

    def _publish(
        self, step: int, partial: Path, shards: Shards, generators: Any, progress: Mapping[str, Any] | None
    ) -> None:
        """Make a completely written checkpoint one that can be chosen, and remove the oldest ones.

        Args:
            generators: this rank's random states as the checkpoint began.
            progress: is written now; None: it is there.
        """
        with self._on_disk(step):
            if dist.get_rank() == 0 and progress is not None:
                _write_progress(partial, progress)
            results, files = shards.reported()
        reports: list[Report] = gather_to_first(Report(own_name(), results, files, shards.plan, generators))
        with self._on_disk(step):
            if dist.get_rank() != 0:
                return
            (partial / GENERATORS).write_bytes(_saved([report.generators for report in reports]))
            shards.write_index([report.plan for report in reports], [report.results for report in reports])
            own = [partial / name for name in (PROGRESS, COLUMNS, GENERATORS) if (partial / name).exists()]
            own += [partial / WEIGHTS / name for name in (COMMON, "metadata.json", INDEX)]
            reports.append(Report(own_name(), [], written(partial, own)))
            problem = patiently(lambda: difference(partial, reports))
            if problem is not None:
                raise InputError(
                    f"the checkpoint of step {step} is not whole and gets no name: {problem}; put trainer.output_dir "
                    "on a file system that all ranks share; earlier checkpoints are untouched"
                )
            (partial / MANIFEST).write_text(manifest(file for report in reports for file in report.files))
            for path in (partial / MANIFEST, partial / WEIGHTS, partial):
                fsync(path)
            self._name(partial, directory_of(self.root, step))

    def _name(self, partial: Path, final: Path) -> None:
        replaced = self.root / f".{final.name}.replaced"
        shutil.rmtree(replaced, ignore_errors=True)
        if final.exists():
            final.rename(replaced)
        partial.rename(final)
        fsync(self.root)
        shutil.rmtree(replaced, ignore_errors=True)
        for old in all_checkpoints(self.root)[self.keep :] if self.keep else []:
            shutil.rmtree(old)

    @contextmanager
    def _on_disk(self, step: int) -> Iterator[None]:
        """Wraps what ranks write by themselves: if one of them cannot, all of them say so."""
        with together(f"writing the checkpoint of step {step}"):
            try:
                yield
            except OSError as error:
                raise InputError(
                    f"the checkpoint of step {step} cannot be written under {self.root} by {own_name()} "
                    f"({cause(self.root, error)}, {free_bytes(self.root):,} bytes free); free the disk or choose "
                    "another trainer.output_dir; earlier checkpoints are untouched"
                ) from error
            except WriterEndedError as error:
                raise InputError(
                    f"the checkpoint of step {step} is not written: a process of {own_name()} that was writing it "
                    f"{error}; if the host is short of memory, take less of it (checkpoint.async_save, "
                    "checkpoint.local, memory.offload); earlier checkpoints are untouched"
                ) from error


def _write_progress(directory: Path, content: Mapping[str, Any]) -> None:
    document, columns = extract(content)
    (directory / PROGRESS).write_text(json.dumps(document, indent=1))
    if columns:
        (directory / COLUMNS).write_bytes(to_bytes(columns))


def companion_records(engine: MegatronEngine) -> dict[str, Any]:
    """What the progress says of the further models of a run, by their names."""
    return {
        name: {
            "model": model_record(other.policy.shape),
            "skipped_steps": other.stepper.skipped.state_dict(),
            "shares_base": bool(other.policy.shared),
        }
        for name, other in engine.companions.items()
    }


def difference(directory: Path, reports: list[Report]) -> str | None:
    """Where the files of a directory are not those that the ranks report, in names or sizes, as this rank sees them."""
    for report in reports:
        for file in report.files:
            seen = size_of(directory / file.name)
            if seen != file.size:
                what = "no such file" if seen is None else f"{seen:,} bytes"
                return f"{report.writer} wrote {file.name} of {file.size:,} bytes, and {own_name()} sees {what} there"
    reported = {file.name for report in reports for file in report.files}
    strange = sorted({str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()} - reported)
    return f"{strange[0]} is there, which no rank reports" if strange else None


def sweep(root: Path) -> None:
    """Remove what killed saves have left; nobody may be saving."""
    for pattern in UNFINISHED:
        for left_over in root.glob(pattern):
            shutil.rmtree(left_over, ignore_errors=True)


def free_bytes(directory: Path) -> int:
    """Bytes that a user may still write on the file system of a directory, which need not exist yet."""
    return shutil.disk_usage(next(path for path in (directory, *directory.absolute().parents) if path.exists())).free


def cause(directory: Path, error: OSError) -> str:
    """Why a write failed. torch may only know where its writer was: then the disk's answer to one more MiB."""
    if error.strerror:
        return error.strerror
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as answer:
        return answer.strerror or str(answer)
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _saved(value: Any) -> bytes:
    """As ``torch.save`` writes it: by way of memory, because it does not say why it cannot write to a disk."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
