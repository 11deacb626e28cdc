"""Sharded checkpoints in Megatron's distributed format that are either whole or not chosen.

A checkpoint is written under a hidden temporary name, every file is synced to disk, a manifest of all file sizes is
written last, and only then the directory gets its final name: an asynchronous save does so when all ranks have written.
Loading takes the newest directory whose files match its manifest.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from functools import partial as partial_call
from pathlib import Path
from pickle import UnpicklingError
from struct import error as StructError
from typing import Any
from zipfile import BadZipFile

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from mega_rl import platform
from mega_rl.bridge.files.manifest import MANIFEST as MANIFEST
from mega_rl.bridge.files.manifest import PROGRESS as PROGRESS
from mega_rl.bridge.files.manifest import WEIGHTS as WEIGHTS
from mega_rl.bridge.files.manifest import damage as damage
from mega_rl.bridge.files.manifest import manifest, model_record
from mega_rl.bridge.files.progress import read_progress
from mega_rl.bridge.files.torch_dist_write import CONTENT
from mega_rl.errors import InputError, shortened, shown
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.megatron.model import PolicyModel
from mega_rl.megatron.optimizer import own_hyperparameters
from mega_rl.megatron.reading import load_generators, load_sharded
from mega_rl.megatron.writers import prepare_writers, writers_end_with_us
from mega_rl.parallel.collectives import broadcast_object, gather_objects, together
from mega_rl.parallel.layout import ParallelLayout

GENERATORS = "generators.pt"  # torch's random states of every rank
SUPERSEDED = "superseded_"  # directories of checkpoints that a later run did not continue
_NAME = re.compile(r"^step_(\d{8})$")
_UNREADABLE = (  # what reading a garbled checkpoint raises; torch's CheckpointException is no Exception
    RuntimeError,
    OSError,
    EOFError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    MemoryError,
    StructError,
    BadZipFile,
    UnpicklingError,
    CheckpointException,
    CheckpointingException,
)


def directory_of(root: Path, step: int) -> Path:
    return root / f"step_{step:08d}"


def all_checkpoints(root: Path) -> list[Path]:
    """Checkpoint directories under ``root``, newest first, damaged ones included."""
    if not root.is_dir():
        return []
    return sorted((p for p in root.iterdir() if _NAME.match(p.name) and p.is_dir()), reverse=True)


def find(root: Path, resume: str) -> tuple[Path | None, list[str]]:
    """The checkpoint to resume from, and a sentence for every damaged one that was passed over.

    Args:
        root: where the run keeps its checkpoints.
        resume: "auto", "never", or the path of one checkpoint.

    Raises:
        InputError: the named checkpoint is not whole, or there are checkpoints but none is.
    """
    if resume == "never":
        return None, []
    if resume != "auto":
        problem = "there is no such directory" if not Path(resume).is_dir() else damage(Path(resume))
        if problem:
            raise InputError(f"checkpoint.resume={resume} cannot be used: {problem}; name a whole checkpoint, or auto")
        return Path(resume), []
    passed_over: list[str] = []
    for directory in all_checkpoints(root):
        problem = damage(directory)
        if problem is None:
            return directory, passed_over
        passed_over.append(f"passing over damaged checkpoint {directory}: {problem}")
    if passed_over:
        raise InputError(
            f"no checkpoint under {root} is whole ({passed_over[0]}); restore one, or start again with "
            "checkpoint.resume=never"
        )
    return None, []


def set_aside(root: Path, after: Path | None) -> None:
    """Move out of the way what a run that starts from ``after`` (None: from the beginning) will not continue.

    Otherwise a later resume would choose those checkpoints, and pruning would count them as the newest.
    """
    start = read_progress(after)["step"] if after is not None else 0
    superseded = [p for p in all_checkpoints(root) if p != after and int(p.name[-8:]) > start]
    if superseded:
        number = 1 + sum(1 for p in root.iterdir() if p.name.startswith(SUPERSEDED))
        aside = root / f"{SUPERSEDED}{number}"
        aside.mkdir()
        for directory in superseded:
            directory.rename(aside / directory.name)


def check_layout(directory: Path, layout: ParallelLayout) -> None:
    """Raise InputError if Megatron cannot resume this checkpoint at the layout."""
    progress = read_progress(directory, needed=None)
    experts = 1 if progress.get("weights_only") else progress["expert_parallel"]
    if experts > 1 and layout.expert == 1:
        raise InputError(
            f"checkpoint {directory} was written with parallel.expert {experts}, and Megatron does not read its "
            f"optimizer state with 1: set parallel.expert to {experts}, or checkpoint.resume to never"
        )


def _named_chunks(engine: MegatronEngine) -> dict[str, PolicyModel]:
    """The model chunks by the names that Megatron's optimizers look for."""
    chunks = engine.policy.chunks
    return {"model": chunks[0]} if len(chunks) == 1 else {f"model{i}": chunk for i, chunk in enumerate(chunks)}


def _metadata() -> dict[str, Any]:
    return {**CONTENT, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


def _sharded_state(engine: MegatronEngine, is_loading: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    metadata = _metadata()
    state: dict[str, Any] = {
        name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in _named_chunks(engine).items()
    }
    models = {name: dict(values) for name, values in state.items()}
    state["optimizer"] = engine.optimizer.sharded_state_dict(models, is_loading=is_loading, metadata=metadata)
    state["lr_schedule"] = engine.lr_schedule.state_dict()
    return state, dict(CONTENT)


def _last_line(error: BaseException) -> str:
    return shortened((str(error).strip().splitlines() or [type(error).__name__])[-1])


def free_bytes(directory: Path) -> int:
    """Bytes that a user may still write on the file system of a directory, which need not exist yet."""
    return shutil.disk_usage(next(path for path in (directory, *directory.absolute().parents) if path.exists())).free


def _cause(directory: Path, error: BaseException) -> str:
    """Why a write failed: the disk's error for one more MiB, because torch only tells where its writer was."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as answer:
        return answer.strerror or str(answer)
    return _last_line(error)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class CheckpointWriter:
    """Writes the checkpoints of one run, at most one at a time.

    Args:
        root: where the run keeps its checkpoints; must be the same file system on every node.
        keep: how many of the newest checkpoints to keep; 0 keeps all.
        is_async: ``save`` returns once the state is copied; a process of each rank writes it, and the checkpoint gets
            its name in a later ``poll``, ``save`` or ``finish``.
    """

    def __init__(self, root: Path, keep: int, is_async: bool) -> None:
        self.root, self.keep = root, keep
        prepare_writers()
        self._strategy = get_default_save_sharded_strategy("torch_dist", 1)
        self._calls = AsyncCallsQueue() if is_async else None

    def save(self, step: int, engine: MegatronEngine, progress: Mapping[str, Any]) -> None:
        """Write one checkpoint. All ranks call it.

        Args:
            step: the number of finished steps, which names it.
            engine: whose weights, optimizer and schedule are written.
            progress: what else a resume needs (JSON).
        """
        engine.policy.refuse_replaced("a checkpoint")
        assert engine.offload.is_complete, "a checkpoint needs weights and optimizer on the device"
        self.finish()
        partial = self.root / f".step_{step:08d}.incomplete"
        generators = gather_objects(platform.current().rng_state())
        content = json.dumps(
            {
                **progress,
                "step": step,
                "skipped_steps": engine.stepper.skipped.state_dict(),
                "model": model_record(engine.policy.shape),
                "world_size": dist.get_world_size(),
                "expert_parallel": engine.policy.layout.expert,
            },
            indent=1,
        )
        with together("preparing the checkpoint directory"):
            if dist.get_rank() == 0:
                for left_over in self.root.glob(".step_*.incomplete"):
                    shutil.rmtree(left_over, ignore_errors=True)
                (partial / WEIGHTS).mkdir(parents=True)
                torch.save(generators, partial / GENERATORS)
                (partial / PROGRESS).write_text(content)
        state, metadata = _sharded_state(engine, is_loading=False)
        try:
            with writers_end_with_us():
                request = dist_checkpointing.save(
                    state,
                    str(partial / WEIGHTS),
                    sharded_strategy=self._strategy,
                    content_metadata=metadata,
                    async_sharded_save=self._calls is not None,
                )
        except (OSError, CheckpointException) as error:
            raise InputError(
                f"the checkpoint of step {step} cannot be written under {self.root} "
                f"({_cause(self.root, error)}, {free_bytes(self.root):,} bytes free); free the disk or choose another "
                "trainer.output_dir; earlier checkpoints are untouched"
            ) from error
        if self._calls is None:
            self._publish(partial, directory_of(self.root, step))
        else:
            request.add_finalize_fn(partial_call(self._publish, partial, directory_of(self.root, step)))
            with writers_end_with_us():
                self._calls.schedule_async_request(request)

    def poll(self) -> None:
        """Give the checkpoint under way its name if all ranks have written it. All ranks call it."""
        if self._calls is not None:
            self._calls.maybe_finalize_async_calls(blocking=False)

    def finish(self) -> None:
        """Wait for the checkpoint under way. All ranks call it."""
        if self._calls is not None:
            self._calls.maybe_finalize_async_calls(blocking=True)

    def _publish(self, partial: Path, final: Path) -> None:
        """Make a completely written checkpoint one that can be chosen, and remove the oldest ones."""
        with together("finishing the checkpoint"):
            if dist.get_rank() != 0:
                return
            paths = [p for p in sorted(partial.rglob("*")) if p.is_file()]
            for path in paths:
                _sync(path)
            (partial / MANIFEST).write_text(manifest(partial, paths))
            _sync(partial / MANIFEST)
            for directory in (partial / WEIGHTS, partial):
                _sync(directory)
            replaced = self.root / f".{final.name}.replaced"
            shutil.rmtree(replaced, ignore_errors=True)
            if final.exists():
                final.rename(replaced)
            partial.rename(final)
            _sync(self.root)
            shutil.rmtree(replaced, ignore_errors=True)
            for old in all_checkpoints(self.root)[self.keep :] if self.keep else []:
                shutil.rmtree(old)


def load(directory: Path, engine: MegatronEngine) -> dict[str, Any]:
    """Restore weights, optimizer, schedule and random states; returns the progress. All ranks call it.

    A converted checkpoint has only weights: the rest stays as it is in a new run.

    Raises:
        InputError: a checkpoint of another model, or one that Megatron cannot read (at this layout).
    """
    progress = broadcast_object(read_progress(directory, needed=None) if dist.get_rank() == 0 else None)
    own = model_record(engine.policy.shape)
    different = [key for key, value in own.items() if progress["model"].get(key) != value]
    if different:
        key = different[0]
        raise InputError(
            f"checkpoint {directory} is of another model: {key} is {shown(progress['model'].get(key))} there and "
            f"{own[key]!r} in model.path; choose the model it was trained from, or checkpoint.resume=never"
        )
    if progress.get("weights_only"):
        _load_weights(directory, engine)
        return progress
    check_layout(directory, engine.policy.layout)
    state, _ = _sharded_state(engine, is_loading=True)
    loaded, generators = read_state(directory, state)
    for name, chunk in _named_chunks(engine).items():
        chunk.load_state_dict(loaded[name])
    with own_hyperparameters(engine.optimizer):
        engine.optimizer.load_state_dict(loaded["optimizer"])
    engine.lr_schedule.load_state_dict(loaded["lr_schedule"])
    engine.stepper.skipped.load_state_dict(progress["skipped_steps"])
    if len(generators) == dist.get_world_size():  # for another number of ranks the states do not fit
        try:
            platform.current().set_rng_state(generators[dist.get_rank()])
        except _UNREADABLE as error:
            raise _unreadable(directory, error) from error
    return progress


def read_state(directory: Path, state: dict[str, Any]) -> tuple[dict[str, Any], list[Mapping[str, Tensor]]]:
    """What a checkpoint has for a sharded state, and the random states of its ranks. All ranks call it.

    Raises:
        InputError: a file is damaged, or would run code if it could.
    """
    loaded = _read(directory, state)
    try:
        return loaded, load_generators(directory / GENERATORS)
    except _UNREADABLE as error:
        raise _unreadable(directory, error) from error


def _read(directory: Path, state: dict[str, Any]) -> dict[str, Any]:
    try:
        return load_sharded(state, directory / WEIGHTS)
    except _UNREADABLE as error:
        raise _unreadable(directory, error) from error


def _unreadable(directory: Path, error: BaseException) -> InputError:
    if isinstance(error, CheckpointException):  # of several ranks at once
        error = next(iter(error.failures.values()))[0]
    is_pickle = isinstance(error, UnpicklingError)  # torch's own words are a page on how to run it
    reason = "a file is damaged, or holds more than tensors and plain values" if is_pickle else _last_line(error)
    return InputError(f"checkpoint {directory} cannot be read ({reason}); use an older one, or checkpoint.resume=never")


def _load_weights(directory: Path, engine: MegatronEngine) -> None:
    state = {name: chunk.sharded_state_dict(metadata=_metadata()) for name, chunk in _named_chunks(engine).items()}
    loaded = _read(directory, state)
    for name, chunk in _named_chunks(engine).items():
        chunk.load_state_dict(loaded[name])
    for weight in engine.policy.frozen.values():
        weight.copy_(weight.to(engine.policy.spec.dtype))  # a float32 tensor, but rounded as the engine has it
    engine.optimizer.reload_model_params()
