"""Whether the files of the data are there, and are of a known format."""

from __future__ import annotations

import os
from pathlib import Path

from mega_rl.config.schema.data_file import DataFile
from mega_rl.config.schema.sections import RunConfig
from mega_rl.errors import shown

DATA_SUFFIXES = (".jsonl", ".json", ".parquet")


def data_file_problems(config: RunConfig) -> list[str]:
    """Every problem as a sentence."""
    data, freq, found = config.data, config.validation.test_freq, list[str]()
    if not data.train_files:
        found.append("data.train_files is []: give at least one .jsonl, .json or .parquet file")
    if not data.val_files and freq > 0:
        found.append(
            f"data.val_files is [] but validation.test_freq is {freq}: give a file, or set validation.test_freq to -1"
        )
    for field, entries in (("data.train_files", data.train_files), ("data.val_files", data.val_files)):
        found += [f"{field} has {shown(entry)}, {problem}" for entry in entries if (problem := _problem(entry))]
    return found


def _problem(entry: str) -> str | None:
    """The end of a sentence about an entry; None if its file can be opened."""
    name = DataFile.of(entry).path
    if os.path.isfile(name):
        is_known = Path(name).suffix in DATA_SUFFIXES
        return None if is_known else "whose format is not known: convert it to .jsonl, .json or .parquet"
    if os.path.exists(name):
        return "which is not a file: give an existing .jsonl, .json or .parquet file"
    hint = ", as FILE[:N] for its first N rows" if name.endswith("]") else ""
    return f"which does not exist: give an existing .jsonl, .json or .parquet file{hint}"
