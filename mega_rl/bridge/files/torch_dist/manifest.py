"""A checkpoint directory of the trainer: its files, and the manifest that tells a whole one from a damaged one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from mega_rl.bridge.files.torch_dist.plain import is_name_below, read_json
from mega_rl.bridge.files.torch_dist.torch_dist import INDEX, read_index
from mega_rl.errors import InputError, shortened, shown
from mega_rl.models.shape import ModelShape
from mega_rl.observe.heartbeat import HEART

MANIFEST = "manifest.json"
PROGRESS = "progress.json"  # step, data position, model: what is no tensor
COLUMNS = "columns.npz"  # the long lists of numbers of ``PROGRESS``, if it has any
WEIGHTS = "megatron"
VERSION = 3  # 1, without the field: digests of the ends of files only; 2: no columns, all numbers are in ``PROGRESS``
END_BYTES = 1 << 20
OF_OLDER_RECORDS = {"head": "vocabulary"}  # keys that the records of older checkpoints lack
NUM_THREADS = 8


class Written(NamedTuple):
    """One file, as who wrote it knows it."""

    name: str  # relative to the checkpoint directory
    size: int  # bytes
    digest: str  # of all bytes; in a manifest of version 1 of its first and last MiB


class ManifestContent(NamedTuple):
    """What a manifest says."""

    version: int
    files: list[Written]


def model_record(shape: ModelShape) -> dict[str, Any]:
    """The shape as JSON has it, sets as sorted lists."""
    record: dict[str, Any] = json.loads(json.dumps(asdict(shape), default=sorted))
    return record


def different_key(saved: Mapping[str, Any], shape: ModelShape) -> str | None:
    """The first key in which a ``model_record`` differs from that of the shape; None: it is of such a model."""
    known = {**OF_OLDER_RECORDS, **saved}
    return next((key for key, value in model_record(shape).items() if known.get(key) != value), None)


def written(root: Path, paths: Iterable[Path]) -> list[Written]:
    """What this process has written under ``root``: on the disk when this returns, and hashed side by side."""
    names = [str(path.relative_to(root)) for path in paths]
    digests = _side_by_side(_synced_digest, [root / name for name in names])
    return [Written(name, (root / name).stat().st_size, value) for name, value in zip(names, digests, strict=True)]


def manifest(files: Iterable[Written]) -> str:
    """The text of the manifest of these files."""
    rows = {file.name: (file.size, file.digest) for file in sorted(files)}
    return json.dumps({"version": VERSION, "files": rows}, indent=1)


def damage(directory: Path) -> str | None:
    """What is wrong with a checkpoint directory, or None for a whole one.

    A manifest of an earlier version has digests of the ends of its files only, and is taken by these.
    """
    content = read_content(directory)
    if isinstance(content, str):
        return content
    return changed(directory, content, content.files) or missing_shard(directory, content)


def read_content(directory: Path) -> ManifestContent | str:
    """The manifest, or what is wrong with it or with the names and sizes of the files; no file's content is read."""
    if not directory.is_dir():
        return "there is no such directory"
    try:
        content = read_json(directory / MANIFEST)
        content = ManifestContent(
            content.get("version", 1),
            [Written(name, size, expected) for name, (size, expected) in content["files"].items()],
        )
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is not readable"
    if content.version not in (1, 2, VERSION):
        return f"{MANIFEST} is of version {shown(content.version)}, and this program reads up to {VERSION}"
    if content.version > 1:
        needed = [directory / PROGRESS, *sorted(p for p in (directory / WEIGHTS).rglob("*") if not p.is_dir())]
        listed = {file.name for file in content.files}
        unlisted = [name for path in needed if (name := str(path.relative_to(directory))) not in listed]
        if unlisted:
            return f"file {shortened(unlisted[0])} is not in {MANIFEST}"
    for name, size, _ in content.files:
        if not is_name_below(name):
            return f"{MANIFEST} names {shown(name)}, which is no file of the checkpoint"
        path = directory / name
        if not path.is_file():
            return f"file {shortened(name)} is missing"
        if path.stat().st_size != size:
            return f"file {shortened(name)} has {path.stat().st_size} bytes instead of {shown(size)}"
    return content


def changed(directory: Path, content: ManifestContent, files: Sequence[Written]) -> str | None:
    """The first of the files that does not hold what was written."""
    hash_of = digest if content.version > 1 else digest_of_ends
    found = _side_by_side(hash_of, [directory / file.name for file in files])
    for file, value in zip(files, found, strict=True):
        if value != file.digest:
            return f"file {shortened(file.name)} is not what was written"
    return None


def missing_shard(directory: Path, content: ManifestContent) -> str | None:
    """A file that the index of the weights names and the manifest does not: it was not there when that was written."""
    index = f"{WEIGHTS}/{INDEX}"
    if not (directory / index).is_file():
        return f"file {index} is missing"
    try:
        named = {f"{WEIGHTS}/{info.relative_path}" for info in read_index(directory / WEIGHTS).storage_data.values()}
    except (InputError, AttributeError):
        return f"file {index} is not readable"
    absent = sorted(named - {file.name for file in content.files})
    return f"file {absent[0]} is missing: {index} names it, and {MANIFEST} does not" if absent else None


def digest(path: Path) -> str:
    """The hash of all bytes."""
    HEART.mark()
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _synced_digest(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return digest(path)


def digest_of_ends(path: Path) -> str:
    """The hash of the first and the last MiB, which is what manifests of version 1 hold."""
    with path.open("rb") as file:
        head = file.read(END_BYTES)
        file.seek(max(len(head), path.stat().st_size - END_BYTES))
        return hashlib.blake2b(head + file.read(), digest_size=16).hexdigest()


def _side_by_side(hash_of: Callable[[Path], str], paths: list[Path]) -> list[str]:
    with ThreadPoolExecutor(NUM_THREADS) as threads:  # hashlib lets other threads run
        return list(threads.map(hash_of, paths))
