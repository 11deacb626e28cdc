"""A checkpoint directory of the trainer: its files, and the manifest that tells a whole one from a damaged one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mega_rl.models.shape import ModelShape

MANIFEST = "manifest.json"
PROGRESS = "progress.json"  # step, data position, model: what is no tensor
WEIGHTS = "megatron"
DIGESTED_BYTES = 1 << 20


def model_record(shape: ModelShape) -> dict[str, Any]:
    """The shape as JSON has it, sets as sorted lists."""
    record: dict[str, Any] = json.loads(json.dumps(asdict(shape), default=sorted))
    return record


def manifest(root: Path, paths: Iterable[Path]) -> str:
    """The text of the manifest for files under ``root``."""
    files = {str(path.relative_to(root)): (path.stat().st_size, digest(path)) for path in paths}
    return json.dumps({"files": files}, indent=1)


def damage(directory: Path) -> str | None:
    """What is wrong with a checkpoint directory, or None for a whole one."""
    try:
        files = json.loads((directory / MANIFEST).read_text())["files"]
        rows = [(name, size, expected) for name, (size, expected) in files.items()]
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is not readable"
    for name, size, expected in rows:
        path = directory / name
        if not path.is_file():
            return f"file {name} is missing"
        if path.stat().st_size != size:
            return f"file {name} has {path.stat().st_size} bytes instead of {size}"
        if digest(path) != expected:
            return f"file {name} is not what was written"
    return None


def digest(path: Path) -> str:
    """The hash of the first and the last MiB: cheap at any size, and sees what a crash or a bad copy does to a file."""
    with path.open("rb") as file:
        head = file.read(DIGESTED_BYTES)
        file.seek(max(len(head), path.stat().st_size - DIGESTED_BYTES))
        return hashlib.blake2b(head + file.read(), digest_size=16).hexdigest()
