"""Every fault of the page on reliability names a test that exists, or a program that injects it and lists it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.launching.launch import REPO, run_copy

PAGE = REPO / "docs" / "reliability.md"
PROGRAM = "faults/runs.py"
MIN_FAULTS = 40
NUM_FINDINGS = 21
SOME = ("kill -9 of rank 1 in update", "kill -9 of torchrun in generate", "kill -9 of a reward worker in generate")


def rows(width: int) -> list[list[str]]:
    """The cells of every fault (4 wide) or finding (2 wide)."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    assert all(len(row) in (2, 4) and all(row) for row in cells)
    return [row for row in cells if row[0] not in ("fault", "finding") and len(row) == width]


def functions(file: Path) -> set[str]:
    """``name`` or ``Class::name`` of every test of a module."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    found = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    for group in (node for node in body if isinstance(node, ast.ClassDef)):
        found |= {f"{group.name}::{node.name}" for node in group.body if isinstance(node, ast.FunctionDef)}
    return found


def missing(cell: str) -> list[str]:
    """What a cell names that is not there; itself if it names nothing."""
    names = re.findall(r"`([^`]+)`", cell)
    faults = [] if names else [cell]
    for name in names:
        path, _, test = name.partition("::")
        is_program, file = path.startswith("faults/"), REPO / "tests" / path
        if not file.is_file() or (not is_program and test not in functions(file)):
            faults.append(name)
    return faults


def test_every_fault_has_a_test() -> None:
    found = rows(4)
    assert len(found) >= MIN_FAULTS
    assert len({row[0] for row in found}) == len(found)
    assert {row[0]: missing(row[2]) for row in found if missing(row[2])} == {}


def test_every_finding_has_a_test() -> None:
    found = rows(2)
    assert [row[0].partition(":")[0] for row in found] == [str(number) for number in range(1, NUM_FINDINGS + 1)]
    assert {row[0]: missing(row[1]) for row in found if missing(row[1])} == {}


def test_what_is_missing_is_found() -> None:
    here = "unit/tools/pages/test_reliability.py::test_every_fault_has_a_test"
    assert missing(f"`{PROGRAM}`, `{here}`") == []
    assert missing(f"`{here}s`, `unit/nowhere.py::test_a`") == [f"{here}s", "unit/nowhere.py::test_a"]
    assert missing("`faults/nowhere.py`") == ["faults/nowhere.py"] and missing("by hand") == ["by hand"]


def test_the_program_lists_its_faults() -> None:
    names = run_copy(Path("tests") / PROGRAM, "--list").check().stdout.splitlines()
    assert len(names) == len(set(names)) >= MIN_FAULTS and set(SOME) <= set(names)
