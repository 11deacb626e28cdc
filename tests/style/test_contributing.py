"""The tables of CONTRIBUTING.md say what the tests of this folder hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.style.test_layers import HOMES, LEVEL, REPO, ROWS
from tests.style.test_tree import MAX_FUNCTION_LINES, MAX_LINES

TEXT = (REPO / "CONTRIBUTING.md").read_text(encoding="utf-8")


def table(text: str, first_column: str) -> list[list[str]]:
    """The cells of every row of the markdown table whose first column has this title."""
    found = re.search(rf"^\| {re.escape(first_column)} \|.*\n\|[-| ]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert found, f"there is no table with the first column {first_column!r}"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].splitlines()]


def code(cell: str) -> tuple[str, ...]:
    """The code spans of a cell."""
    return tuple(re.findall(r"`([^`]*)`", cell))


def folder(name: str) -> str:
    return f"{name}/" if name in ("tools", "examples") else name


def test_rows_are_those_of_the_layer_test() -> None:
    written = [(int(number), code(packages)) for number, packages in table(TEXT, "row")]
    assert written == [(row, tuple(folder(name) for name in ROWS[row])) for row in reversed(range(len(ROWS)))]


def test_rooms_are_those_of_the_layer_test() -> None:
    assert {code(room)[0]: int(level) for room, level, _ in table(TEXT, "room")} == LEVEL


def test_vendor_homes_are_those_of_the_layer_test() -> None:
    assert {code(library)[0]: code(homes) for library, homes in table(TEXT, "library")} == HOMES


def test_lengths_are_those_of_the_tree_test() -> None:
    assert f"Files under `mega_rl/` have at most {MAX_LINES} lines, functions at most {MAX_FUNCTION_LINES}" in TEXT


def test_every_file_that_is_named_exists() -> None:
    named = set(re.findall(r"`((?:mega_rl|tests|tools|configs|examples|docs)/[\w/.]+)`", TEXT))
    links = {link for link in re.findall(r"\]\(([^)#]+)\)", TEXT) if "://" not in link}
    real = {path for path in named | links if not Path(path).stem.startswith("NAME")}
    assert real and sorted(path for path in real if not (REPO / path).exists()) == []


def test_table_reads_cells() -> None:
    text = "| row | packages |\n|---|---|\n| 1 | `a`, `b` |\n| 0 | none |\n\n| x | y |\n|---|---|\n| 2 | 3 |\n"
    assert table(text, "row") == [["1", "`a`, `b`"], ["0", "none"]] and code("`a`, `b`") == ("a", "b")
    with pytest.raises(AssertionError, match="no table"):
        table(text, "packages")
