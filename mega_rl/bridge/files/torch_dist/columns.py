"""Long lists of numbers beside a JSON document instead of in it: columns of a NumPy archive, read without pickle.

A million tokens take seconds and 40 MB as JSON text, and milliseconds and a few MB as columns.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np

Columns = dict[str, np.ndarray]

MIN_NUMBERS = 16  # a shorter list stays in the document
_KINDS: dict[
    type, tuple[str, type, type]
] = {  # of a list's elements -> name of the column, its exact and its short type
    int: ("$ints", np.int64, np.int32),
    float: ("$floats", np.float64, np.float32),
}


def extract(document: Any) -> tuple[Any, Columns]:
    """A document of plain values with its long lists of numbers replaced by ``{"$ints": number}``, and their columns.

    Columns: ``$ints`` and ``$floats``, all such lists one after the other, and ``$ints_ends``, ``$floats_ends``, where
    each list ends. A column has the short type if that changes no number.
    """
    found: dict[str, list[np.ndarray]] = {name: [] for name, *_ in _KINDS.values()}

    def without(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: without(item) for key, item in value.items()}
        if not isinstance(value, list | tuple):
            return value
        kinds = {type(item) for item in value} if len(value) >= MIN_NUMBERS else set()
        if len(kinds) != 1 or (kind := kinds.pop()) not in _KINDS:
            return [without(item) for item in value]
        name, exact, _ = _KINDS[kind]
        try:
            found[name].append(np.array(value, dtype=exact))
        except OverflowError:  # an integer of more than 64 bits
            return list(value)
        return {name: len(found[name]) - 1}

    rest = without(document)
    columns: Columns = {}
    for name, _, short in _KINDS.values():
        if found[name]:
            column = np.concatenate(found[name])
            with np.errstate(over="ignore"):
                shorter: np.ndarray = column.astype(short)
            columns[name] = shorter if np.array_equal(shorter, column, equal_nan=short is np.float32) else column
            columns[f"{name}_ends"] = np.cumsum([len(part) for part in found[name]], dtype=np.int64)
    return rest, columns


def restore(document: Any, columns: Mapping[str, np.ndarray]) -> Any:
    """The document that ``extract`` took apart.

    Raises:
        KeyError, IndexError: the columns are of another document.
    """
    if isinstance(document, list):
        return [restore(item, columns) for item in document]
    if not isinstance(document, dict):
        return document
    for name, *_ in _KINDS.values():
        if document.keys() == {name}:
            ends, number = columns[f"{name}_ends"], document[name]
            start = ends[number - 1] if number else 0
            return columns[name][start : ends[number]].tolist()
    return {key: restore(item, columns) for key, item in document.items()}


def to_bytes(columns: Columns) -> bytes:
    """The content of an ``.npz`` file."""
    buffer = io.BytesIO()
    np.savez(buffer, **columns)  # type: ignore[arg-type]
    return buffer.getvalue()


def from_bytes(content: bytes) -> Columns:
    """
    Raises:
        ValueError, OSError, zipfile.BadZipFile: it is no such file, or has something else than numbers in it.
    """
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}
