"""Rows of data files: read with errors that say where, written so that a crash leaves no half file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from mega_rl.config.schema.data_file import DataFile
from mega_rl.config.schema.sections import DataConfig
from mega_rl.errors import InputError, shortened

MAX_DEPTH = 64  # objects and lists inside one another, in a row
ROWS_AT_ONCE = 8192  # of a parquet file, as Python objects


@dataclass(frozen=True)
class Row:
    """One record of a data file and where it stands."""

    file: Path
    number: int  # JSONL: line, parquet and JSON: row; all from 1
    fields: Mapping[str, Any]

    @property
    def where(self) -> str:
        return f"{self.file} {'line' if self.file.suffix == '.jsonl' else 'row'} {self.number}"

    def get(self, name: str) -> Any:
        """The value of a field; None if it is absent or null."""
        return self.fields.get(name)

    def missing(self, wanted: str) -> InputError:
        """The error for a row that lacks the fields it needs; ``wanted`` describes them."""
        names = ", ".join(sorted(name for name, value in self.fields.items() if value is not None))
        found = shortened(names) or "no fields"
        return InputError(f"{self.where} has {found} but needs {wanted}; rename or add the fields in that file")


@dataclass(frozen=True)
class DataFiles:
    """The files of a data set, and how many of their rows are taken."""

    paths: list[str]
    key: str = "data.train_files"  # the configuration field that lists them, for messages
    max_samples: int | None = None  # of all files together, the first rows only, before anything is left out

    @classmethod
    def validation(cls, data: DataConfig, key: str = "data.val_files") -> DataFiles:
        """Those of ``data.val_files``."""
        return cls(data.val_files, key, data.max_val_samples)

    def rows(self) -> list[Row]:
        """Raises InputError as ``read_rows``."""
        return read_rows(self.paths, self.key)[: self.max_samples]


def read_rows(files: list[str], key: str) -> list[Row]:
    """The rows of all files, in order.

    Args:
        files: ``.jsonl``, ``.json`` (one array) or ``.parquet`` paths, or ``FILE[:N]`` for the first N rows of one.
        key: the configuration field that lists them, for messages.

    Raises:
        InputError: no files, a missing, empty, truncated or malformed one, another suffix.
    """
    if not files:
        raise InputError(f"{key} is empty: list at least one .jsonl, .json or .parquet file")
    return list(rows_of(files, key))


def rows_of(files: Iterable[str], key: str) -> Iterator[Row]:
    """The rows of all files, one after another; of ``FILE[:N]`` the first N.

    Raises:
        InputError: as ``each_row``.
    """
    for file in map(DataFile.of, files):
        yield from islice(each_row(Path(file.path), key), file.max_rows)


def each_row(path: Path, key: str) -> Iterator[Row]:
    """The rows of one file, one after another: of a ``.jsonl`` or ``.parquet`` file few are in memory at a time.

    Raises:
        InputError: as ``read_rows``, once what is wrong is reached.
    """
    if path.suffix not in READERS:
        hint = ", or write FILE[:N] for the first N rows" if path.name.endswith("]") else ""
        raise InputError(
            f"{key}: {shortened(str(path))} is neither .jsonl, .json nor .parquet; convert it or rename it{hint}"
        )
    if not os.path.isfile(path):
        raise InputError(
            f"{key}: {shortened(str(path))} is no file; correct the path or make it with tools/prepare_data.py"
        )
    is_empty = True
    try:
        for row in READERS[path.suffix](path, key):
            is_empty = False
            yield row
    except OSError as error:
        raise InputError(f"{key}: {path} cannot be read ({error}); check its permissions and the disk") from error
    if is_empty:
        raise InputError(f"{key}: {path} has no rows; write the file again or take it off the list")


def _read_parquet(path: Path, key: str) -> Iterator[Row]:
    path.open("rb").close()  # what the system refuses is the caller's to tell: the file need not be damaged
    before = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE):
                for number, record in enumerate(batch.to_pylist(), start=before + 1):
                    yield Row(path, number, record)
                before += batch.num_rows
    except (pa.ArrowException, OSError, ValueError, OverflowError, RecursionError) as error:
        # pyarrow raises OSError too for content that it cannot decode, Python what it has no text or date for
        cause = shortened(next(iter(str(error).splitlines()), type(error).__name__))
        raise InputError(f"{key}: {path} is truncated or no parquet file ({cause}); write it again") from error


def _read_jsonl(path: Path, key: str) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, JSON nested without end
                raise InputError(f"{key}: {path} line {number} is no JSON ({error}); fix that line") from error
            yield _row(path, number, record, _doubts(line), key, "line")


def _read_json(path: Path, key: str) -> Iterator[Row]:
    records, doubts = _json_value(path, key)
    if not isinstance(records, list):
        raise InputError(f"{key}: {path} is a JSON {type(records).__name__}, not an array of objects; correct it")
    for number, record in enumerate(records, start=1):
        yield _row(path, number, record, doubts, key, "row")


def read_object(path: Path, key: str) -> Row:
    """The one object that a ``.json`` file holds, as in sets of one file per problem.

    Raises:
        InputError: no or malformed JSON, or no object.
    """
    record, doubts = _json_value(path, key)
    return _row(path, 1, record, doubts, key, "row")


def _json_value(path: Path, key: str) -> tuple[Any, _Doubts]:
    try:
        text = path.read_bytes()
        return json.loads(text), _doubts(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{key}: {path} is no JSON ({error}); correct it") from error


class _Doubts(NamedTuple):
    """What may make records of a JSON text unusable, read off its bytes once, so that few are looked at."""

    may_be_deep: bool
    may_have_halves: bool  # an escape of half a character, rightly beside its other half or not


def _doubts(text: bytes) -> _Doubts:
    return _Doubts(text.count(b"[") + text.count(b"{") > MAX_DEPTH, b"\\ud" in text or b"\\uD" in text)


def _row(path: Path, number: int, record: Any, doubts: _Doubts, key: str, unit: str) -> Row:
    """A record as a row; ``doubts`` is of the text that it stands in, and ``unit`` what ``number`` counts."""
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise InputError(f"{key}: {path} {unit} {number} is a JSON {kind}, not an object; fix that {unit}")
    problem = _unusable(record, doubts)
    if problem is not None:
        raise InputError(f"{key}: {path} {unit} {number} {problem}; fix that {unit}")
    return Row(path, number, record)


READERS = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet}


def _unusable(record: dict[str, Any], doubts: _Doubts) -> str | None:
    """What of a record neither a tokenizer nor a reward could take; None for any other record."""
    if doubts.may_be_deep and _is_deeper(record, MAX_DEPTH):
        return f"is nested more than {MAX_DEPTH} deep"
    if doubts.may_have_halves:
        try:
            json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return "has half of a character (\\ud800 to \\udfff), which is no text"
    return None


def _is_deeper(value: Any, depth: int) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return parts is not None and (depth == 0 or any(_is_deeper(part, depth - 1) for part in parts))


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary name to write to; at the end of the block it is fsynced and takes the place of ``path``.

    When the block raises, ``path`` stays as it was and the temporary file is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)  # the rename itself is durable only with its directory
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> None:
    """Writes one JSON object per line, atomically."""
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def write_parquet(path: Path, records: list[dict[str, Any]]) -> None:
    """Writes the records as one parquet table, atomically."""
    with atomic_path(path) as temporary:
        pq.write_table(pa.Table.from_pylist(records), temporary)
