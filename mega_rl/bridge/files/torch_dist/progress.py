"""What a checkpoint says of its run: ``progress.json``, whose values are checked before anything relies on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mega_rl.bridge.files.torch_dist.manifest import PROGRESS
from mega_rl.bridge.files.torch_dist.plain import read_json
from mega_rl.errors import InputError, shortened, shown

MOST = 2**31 - 1


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_table(value: Any, holds: Callable[[Any], bool]) -> bool:
    return isinstance(value, Mapping) and all(holds(item) for item in value.values())


def _is_tuning(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("method"), str)


KEYS: dict[str, tuple[str, Callable[[Any], bool]]] = {  # key -> what it must be
    "step": ("a number of steps", _is_count),
    "model": ("the shape of a model", lambda value: isinstance(value, Mapping)),
    "world_size": ("a number of processes", lambda value: _is_count(value) and value > 0),
    "expert_parallel": ("a number of processes", lambda value: _is_count(value) and value > 0),
    "skipped_steps": ("two numbers of steps", lambda value: _is_table(value, _is_count)),
    "data": ("a position in the data", lambda value: isinstance(value, Mapping)),
    "validations": (
        "metrics of validations",
        lambda value: _is_table(value, lambda metrics: _is_table(metrics, _is_number)),
    ),
}
OPTIONAL: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "weights_only": ("true or false", lambda value: isinstance(value, bool)),
    "metrics": ("metrics of a step", lambda value: _is_table(value, _is_number)),
    "tuning": (
        "what was tuned of which base",
        lambda value: (
            isinstance(value, Mapping) and isinstance(value.get("base"), str) and _is_tuning(value.get("settings"))
        ),
    ),
}
OF_WEIGHTS = ("step", "model")  # what a checkpoint without optimizer state needs


def read_progress(directory: Path, needed: tuple[str, ...] | None = ("step",)) -> dict[str, Any]:
    """The progress of a checkpoint.

    Args:
        needed: the keys that must be there; None: all that a resume needs.

    Raises:
        InputError: it cannot be read, or a value is missing or not what it must be.
    """
    path = directory / PROGRESS
    try:
        progress = read_json(path)
    except (OSError, ValueError) as error:
        cause = (error.strerror if isinstance(error, OSError) else None) or shortened(str(error))
        raise _unusable(path, cause) from error
    if not isinstance(progress, dict):
        raise _unusable(path, "it holds no table")
    if needed is None:
        needed = OF_WEIGHTS if progress.get("weights_only") is True else tuple(KEYS)
    for key, (expected, holds) in (KEYS | OPTIONAL).items():
        if key in progress and not holds(progress[key]):
            raise _unusable(path, f"{key} is {shown(progress[key])}, not {expected}")
        if key in needed and key not in progress:
            raise _unusable(path, f"it lacks {key}")
    return progress


def _unusable(path: Path, cause: str) -> InputError:
    return InputError(f"{path} cannot be used ({cause}); use an older checkpoint, or checkpoint.resume=never")
