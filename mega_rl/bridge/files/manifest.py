"""A checkpoint directory of the trainer: its files, and the manifest that tells a whole one from a damaged one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mega_rl.bridge.files.plain import is_name_below, read_json
from mega_rl.errors import shortened, shown
from mega_rl.models.shape import ModelShape
from mega_rl.observe.heartbeat import HEART

MANIFEST = "manifest.json"
PROGRESS = "progress.json"  # step, data position, model: what is no tensor
WEIGHTS = "megatron"
VERSION = 2  # of the manifest: 1, without the field, digests only the ends of files
END_BYTES = 1 << 20
NUM_THREADS = 8


def model_record(shape: ModelShape) -> dict[str, Any]:
    """The shape as JSON has it, sets as sorted lists."""
    record: dict[str, Any] = json.loads(json.dumps(asdict(shape), default=sorted))
    return record


def manifest(root: Path, paths: Iterable[Path]) -> str:
    """The text of the manifest for files under ``root``, hashed side by side."""
    names = [str(path.relative_to(root)) for path in paths]
    digests = _side_by_side(digest, [root / name for name in names])
    files = {name: ((root / name).stat().st_size, value) for name, value in zip(names, digests, strict=True)}
    return json.dumps({"version": VERSION, "files": files}, indent=1)


def damage(directory: Path) -> str | None:
    """What is wrong with a checkpoint directory, or None for a whole one.

    A manifest of an earlier version has digests of the ends of its files only, and is taken by these.
    """
    try:
        content = read_json(directory / MANIFEST)
        rows = [(name, size, expected) for name, (size, expected) in content["files"].items()]
        version = content.get("version", 1)
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is not readable"
    if version not in (1, VERSION):
        return f"{MANIFEST} is of version {shown(version)}, and this program reads up to {VERSION}"
    if version == VERSION:
        needed = [directory / PROGRESS, *sorted(p for p in (directory / WEIGHTS).rglob("*") if not p.is_dir())]
        unlisted = [name for path in needed if (name := str(path.relative_to(directory))) not in content["files"]]
        if unlisted:
            return f"file {shortened(unlisted[0])} is not in {MANIFEST}"
    for name, size, _ in rows:
        if not is_name_below(name):
            return f"{MANIFEST} names {shown(name)}, which is no file of the checkpoint"
        path = directory / name
        if not path.is_file():
            return f"file {shortened(name)} is missing"
        if path.stat().st_size != size:
            return f"file {shortened(name)} has {path.stat().st_size} bytes instead of {shown(size)}"
    found = _side_by_side(digest if version == VERSION else digest_of_ends, [directory / name for name, *_ in rows])
    for (name, _, expected), value in zip(rows, found, strict=True):
        if value != expected:
            return f"file {shortened(name)} is not what was written"
    return None


def digest(path: Path) -> str:
    """The hash of all bytes."""
    HEART.mark()
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def digest_of_ends(path: Path) -> str:
    """The hash of the first and the last MiB, which is what manifests of version 1 hold."""
    with path.open("rb") as file:
        head = file.read(END_BYTES)
        file.seek(max(len(head), path.stat().st_size - END_BYTES))
        return hashlib.blake2b(head + file.read(), digest_size=16).hexdigest()


def _side_by_side(hash_of: Callable[[Path], str], paths: list[Path]) -> list[str]:
    with ThreadPoolExecutor(NUM_THREADS) as threads:  # hashlib lets other threads run
        return list(threads.map(hash_of, paths))
