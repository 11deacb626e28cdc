"""The files of a published set: which of them are for training and which for validation, and their rows."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from mega_rl.data.rows.rows import READERS, Row, each_row, read_object
from mega_rl.errors import InputError, shortened

TRAIN, VALIDATION = "train", "validation"
_WORDS = re.compile(r"[a-z]+")
_SPLITS = {TRAIN: {"train", "training"}, VALIDATION: {"test", "validation", "valid", "val", "eval", "dev"}}
PACKED = (".gz", ".zip", ".zst", ".tar", ".xz", ".bz2")


def files_of_splits(
    sources: Sequence[Path], validation: Sequence[Path], skip: re.Pattern[str] | None
) -> tuple[dict[str, list[Path]], list[Path]]:
    """Split -> its files in the order of their names; and the files that were skipped.

    A directory stands for all files in it, at any depth, whose kind is known. Without ``validation``, the name of a
    file or of a folder around it tells its split (``train-00000.parquet``, ``test/algebra/1.json``); a file whose
    names do not tell is for training. With ``validation``, files for validation in a directory of ``sources`` are
    skipped: nobody trains on a test by accident.

    Args:
        skip: files whose name has such a part belong to another use of the set.

    Raises:
        InputError: nothing at a path, or no file for training.
    """
    found: dict[str, list[Path]] = {TRAIN: [], VALIDATION: []}
    skipped: list[Path] = []
    for option, paths in (("--source", sources), ("--validation", validation)):
        for path in paths:
            for file, names in _files(path, option):
                if skip is not None and skip.search(file.stem):
                    skipped.append(file)
                elif option == "--validation":
                    found[VALIDATION].append(file)
                elif not validation:
                    found[_split(names)].append(file)
                elif file != path and _split(names) == VALIDATION:
                    skipped.append(file)
                else:
                    found[TRAIN].append(file)
    if not found[TRAIN]:
        given = shortened(" ".join(map(str, sources)))
        raise InputError(f"--source {given} has no file for training, only for validation: name them --validation")
    return found, skipped


def _files(path: Path, option: str) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """(file, the names that may tell its split)."""
    if os.path.isfile(path):
        yield path, (path.stem,)
        return
    if not os.path.isdir(path):
        raise InputError(f"{option} {shortened(str(path))} is neither a file nor a directory: give the downloaded set")
    files = sorted(file for file in path.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(path)))
    usable = [file for file in files if file.suffix in READERS]
    if not usable:
        packed = next((file for file in files if file.suffix in PACKED), None)
        fix = "give another directory" if packed is None else f"unpack {shortened(str(packed))} first"
        raise InputError(f"{option} {shortened(str(path))} has no .jsonl, .json or .parquet file: {fix}")
    for file in usable:
        yield file, file.relative_to(path).with_suffix("").parts


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _split(names: Sequence[str]) -> str:
    words = {word for name in names for word in _WORDS.findall(name.lower())}
    return VALIDATION if words & _SPLITS[VALIDATION] and not words & _SPLITS[TRAIN] else TRAIN


def rows_of(files: Sequence[Path], key: str, one_per_file: bool) -> Iterator[Row]:
    """All rows, one after another.

    Args:
        one_per_file: whether a ``.json`` file holds one object, not an array of them.
    """
    for file in files:
        if one_per_file and file.suffix == ".json":
            yield read_object(file, key)
        else:
            yield from each_row(file, key)
