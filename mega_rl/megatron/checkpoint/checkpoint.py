"""Sharded checkpoints in Megatron's distributed format: which one a run resumes from, and reading it.

The newest directory is taken whose files match its manifest. ``saving`` writes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from pickle import UnpicklingError
from struct import error as StructError
from typing import Any, TypeVar
from zipfile import BadZipFile

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from mega_rl import platform
from mega_rl.bridge.files.torch_dist.columns import Columns, from_bytes, restore
from mega_rl.bridge.files.torch_dist.manifest import (
    COLUMNS,
    WEIGHTS,
    ManifestContent,
    changed,
    different_key,
    missing_shard,
    model_record,
    read_content,
)
from mega_rl.bridge.files.torch_dist.plain import open_plain
from mega_rl.bridge.files.torch_dist.progress import read_progress
from mega_rl.bridge.files.torch_dist.torch_dist_write import CONTENT
from mega_rl.errors import InputError, shortened, shown
from mega_rl.megatron.checkpoint.reading import load_generators, load_sharded
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.megatron.model.layers import frozen_weights
from mega_rl.megatron.model.transformer import PolicyModel
from mega_rl.megatron.offload import PARTS
from mega_rl.megatron.optim.optimizer import ensure_state, own_hyperparameters
from mega_rl.parallel.collectives import broadcast_object, gather_objects, is_first, smallest, together
from mega_rl.parallel.layout import ParallelLayout

GENERATORS = "generators.pt"  # torch's random states of every rank
SUPERSEDED = "superseded_"  # directories of checkpoints that a later run did not continue
T = TypeVar("T")
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
    """The checkpoint to resume from, and a sentence for every damaged one that was passed over. All ranks call it.

    Args:
        root: where the run keeps its checkpoints.
        resume: "auto", "never", or the path of one checkpoint.

    Raises:
        InputError: the named checkpoint is not whole, or there are checkpoints but none is; on all ranks.
    """
    if resume == "never":
        return None, []
    if resume != "auto":
        problem = damage(Path(resume))
        if problem:
            raise InputError(f"checkpoint.resume={resume} cannot be used: {problem}; name a whole checkpoint, or auto")
        return Path(resume), []
    passed_over: list[str] = []
    for directory in broadcast_object(all_checkpoints(root) if is_first() else None):
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


def damage(directory: Path) -> str | None:
    """What is wrong with a checkpoint directory, or None for a whole one; the same on all ranks, which all call it.

    Rank 0 compares names and sizes, and every rank reads and hashes its share of the files.
    """
    content: ManifestContent | str = broadcast_object(_tried(read_content, directory) if is_first() else None)
    if isinstance(content, str):
        return content
    num_ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    share = sorted(content.files, key=lambda file: (-file.size, file.name))[rank::num_ranks]
    found = [problem for problem in gather_objects(_tried(changed, directory, content, share)) if problem is not None]
    if found:
        return found[0]
    return broadcast_object(_tried(missing_shard, directory, content) if is_first() else None)  # type: ignore[no-any-return]


def _tried(look: Callable[..., T], directory: Path, *arguments: Any) -> T | str:
    """What ``look`` finds in a directory, or why it cannot be read."""
    try:
        return look(directory, *arguments)
    except OSError as error:
        return f"{error.filename or directory} cannot be read ({error.strerror or error})"


def set_aside(root: Path, after: Path | None, step: int = 0) -> None:
    """Move out of the way what a run that starts from ``after`` (None: from ``step``) will not continue.

    Otherwise a later resume would choose those checkpoints, and pruning would count them as the newest.
    """
    start = read_progress(after)["step"] if after is not None else step
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


def _metadata(is_full: bool = True) -> dict[str, Any]:
    # Layers of which a part is trained have different tensors, so each gets names of its own.
    own = {} if is_full else {"non_homogeneous_layers": True}
    return {**CONTENT, **own, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


def sharded_state(engine: MegatronEngine, is_loading: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a checkpoint holds of an engine as Megatron describes it, and the name of that description. Collective."""
    metadata = _metadata(engine.policy.plan.is_full)
    if not is_loading:
        ensure_state(engine.optimizer)
    state: dict[str, Any] = {
        name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in _named_chunks(engine).items()
    }
    if not engine.policy.plan.is_full:
        state = {name: _trained(state[name], chunk) for name, chunk in _named_chunks(engine).items()}
    models = {name: dict(values) for name, values in state.items()}
    state["optimizer"] = engine.optimizer.sharded_state_dict(models, is_loading=is_loading, metadata=metadata)
    if not is_loading:
        _number_steps(state["optimizer"])
    state["lr_schedule"] = engine.lr_schedule.state_dict()
    for name, companion in engine.companions.items():
        with companion.in_its_groups():
            state[name] = sharded_state(companion, is_loading)[0]
        add_prefix_for_sharding(state[name], f"{name}.")
    return state, dict(CONTENT)


def _number_steps(state: dict[Any, Any]) -> None:
    """Say how many steps the optimizer made where it has no parameter and counts none. Collective.

    What of a state is no tensor is the first rank's, whose pipeline stage may train nothing; without this number the
    moments of the other stages would be taken for those of a first step.
    """
    parts = [part for part in (state, *state.values()) if isinstance(part, dict)]
    groups = [group for part in parts for group in part.get("optimizer", {}).get("param_groups", [])]
    for part in parts:
        if part.get("param_state") == {}:  # of a stage that trains nothing; Megatron would warn that the others differ
            del part["param_state"]
    steps = [group["step"] for group in groups if "step" in group]
    step = -smallest(-max(steps, default=-1))
    for group in groups:
        if step >= 0:
            group.setdefault("step", step)


def _trained(state: Mapping[str, Any], chunk: PolicyModel) -> dict[str, Any]:
    """What of a chunk's state its base does not have: that is ``model.path``, and stays out of the checkpoint."""
    frozen = {name for name, parameter in chunk.named_parameters() if not parameter.requires_grad}
    frozen |= frozen_weights(chunk).keys()
    return {name: value for name, value in state.items() if name not in frozen}


def tuning_record(engine: MegatronEngine) -> dict[str, Any]:
    """What a checkpoint says of a run that trains only a part: its settings, and where it began by hash. Collective."""
    tuning, seen = engine.policy.spec.tuning, engine.policy.spec.vision
    seeing = {"freeze": seen.freeze, "freeze_merger": seen.freeze_merger}
    record: dict[str, Any] = {"vision": seeing} if engine.policy.shape.tower else {}
    if not engine.policy.plan.is_full:
        record["tuning"] = {"settings": asdict(tuning), "base": engine.base, "start": engine.adapter_start}
    return record


def _compared(tuning: Mapping[str, Any], method: str) -> dict[str, Any]:
    """The settings that a method reads, but for the place of an adapter, which may have moved."""
    keys = {"full": (), "freeze": ("train_layers", "train_modules", "also_train"), "lora": ("also_train",)}[method]
    found = {key: tuning.get(key) for key in keys}
    if method == "lora":
        found |= {
            f"adapter.{key}": value
            for key, value in tuning.get("adapter", {}).items()
            if key not in ("path", "dropout")
        }
    return found


def _check_tuning(directory: Path, progress: Mapping[str, Any], engine: MegatronEngine) -> None:
    """Raise InputError if the checkpoint trained something else, or on another base. Collective."""
    tuning = engine.policy.spec.tuning
    record = progress.get("tuning", {"settings": {"method": "full"}})
    saved, method, never = record["settings"], tuning.method, "or checkpoint.resume to never"
    if saved["method"] != method:
        raise InputError(
            f"checkpoint {directory} was written with tuning.method {shown(saved['method'])}, and this run has "
            f"{method!r}: set it to that of the checkpoint, {never}"
        )
    before = _compared(saved, method)
    for key, value in _compared(asdict(tuning), method).items():
        if before.get(key) != value:
            raise InputError(
                f"checkpoint {directory} was written with tuning.{key} {shown(before.get(key))}, and this run has "
                f"{shown(value)}: set it to that of the checkpoint, {never}"
            )
    seeing = progress.get("vision", {}) if method == "full" else {}
    if other := [key for key, value in seeing.items() if value != getattr(engine.policy.spec.vision, key)]:
        raise InputError(
            f"checkpoint {directory} was written with model.vision.{other[0]} {seeing[other[0]]}: set it so, {never}"
        )
    if engine.policy.plan.is_full:
        return
    if record.get("base") != engine.base:
        is_merged = method == "lora" and tuning.adapter.new
        merged = " with the adapter of tuning.adapter.path merged into them" if is_merged else ""
        raise InputError(
            f"checkpoint {directory} holds what was trained on another base than the weights in model.path{merged}: "
            f"name there what it was trained from, {never}"
        )
    own, path = tuning.adapter, saved.get("adapter", {}).get("path")
    is_same = record["start"] == engine.adapter_start if "start" in record else own.new or path == own.path  # of before
    if method == "lora" and not is_same:
        raise InputError(
            f"checkpoint {directory} is of a run that began with another adapter than that of tuning.adapter.path: set "
            f"it to that adapter, or to null if there was none, {never}"
        )


def _last_line(error: BaseException) -> str:
    return shortened((str(error).strip().splitlines() or [type(error).__name__])[-1])


def load(directory: Path, engine: MegatronEngine) -> dict[str, Any]:
    """Restore weights, optimizer, schedule and random states; returns the progress. All ranks call it.

    A converted checkpoint has only weights: the rest stays as it is in a new run.

    Raises:
        InputError: a checkpoint of another model, or one that Megatron cannot read (at this layout).
    """
    progress = _whole_progress(directory)
    _check_model(directory, progress["model"], engine, "model.path")
    if progress.get("weights_only"):
        if not engine.policy.plan.is_full:
            raise InputError(
                f"checkpoint {directory} has the weights of a whole model and this run trains a part of one: set "
                "model.path to these weights as a Hugging Face directory (tools/convert.py), and checkpoint.resume to "
                "never"
            )
        _load_weights(directory, engine)
        return progress
    check_layout(directory, engine.policy.layout)
    _check_tuning(directory, progress, engine)
    companions = progress.get("companions", {})
    for name, companion in engine.companions.items():
        if name not in companions:
            raise InputError(
                f"checkpoint {directory} has no {name}, which this run trains: go on with the configuration that "
                "it was written with, or set checkpoint.resume=never"
            )
        _check_model(directory, companions[name]["model"], companion, f"{name}.path")
        _check_sharing(directory, companions[name].get("shares_base", False), companion, f"{name}.shares_base")
        companion.offload.to_device()
    state, _ = sharded_state(engine, is_loading=True)
    loaded, generators = read_state(directory, state)
    _restore(engine, loaded, progress["skipped_steps"])
    for name, companion in engine.companions.items():
        with companion.in_its_groups():
            _restore(companion, loaded[name], companions[name]["skipped_steps"])
        companion.offload.to_host(*PARTS)
    if len(generators) == dist.get_world_size():  # for another number of ranks the states do not fit
        try:
            platform.current().set_rng_state(generators[dist.get_rank()])
        except _UNREADABLE as error:
            raise _unreadable(directory, error) from error
    return progress


def _check_model(directory: Path, saved: Mapping[str, Any], engine: MegatronEngine, field: str) -> None:
    if (key := different_key(saved, engine.policy.shape)) is not None:
        own = model_record(engine.policy.shape)[key]
        raise InputError(
            f"checkpoint {directory} is of another model: {key} is {shown(saved.get(key))} there and {own!r} in "
            f"{field}; choose the model it was trained from, or checkpoint.resume=never"
        )


def _check_sharing(directory: Path, saved: bool, engine: MegatronEngine, field: str) -> None:
    own = bool(engine.policy.shared)
    if saved != own:
        raise InputError(
            f"checkpoint {directory} was written with {field}={str(saved).lower()}, and this run has "
            f"{str(own).lower()}: set it to that of the checkpoint, or checkpoint.resume to never"
        )


def _restore(engine: MegatronEngine, loaded: Mapping[str, Any], skipped_steps: Mapping[str, int]) -> None:
    for name, chunk in _named_chunks(engine).items():
        chunk.load_state_dict(loaded[name], strict=engine.policy.plan.is_full)
    with own_hyperparameters(engine.optimizer):
        engine.optimizer.load_state_dict(loaded["optimizer"])
    engine.lr_schedule.num_steps = 0  # Megatron adds the saved number to it
    engine.lr_schedule.load_state_dict(loaded["lr_schedule"])
    engine.stepper.skipped.load_state_dict(skipped_steps)


def _whole_progress(directory: Path) -> dict[str, Any]:
    """The progress with its long lists. All ranks call it.

    Raises:
        InputError: a value is missing or not what it must be; on all ranks.
    """
    progress: dict[str, Any] = {}
    with together("reading the checkpoint"):
        if is_first():
            document = read_progress(directory, needed=None)
            try:
                progress = restore(document, _columns(directory / COLUMNS))
            except _UNREADABLE as error:
                raise _unreadable(directory, error) from error
    whole: dict[str, Any] = broadcast_object(progress)
    return whole


def _columns(path: Path) -> Columns:
    if not path.exists():
        return {}
    with open_plain(path) as file:
        return from_bytes(file.read())


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
    engine.optimizer.reload_model_params()
