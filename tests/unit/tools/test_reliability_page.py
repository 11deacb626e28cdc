"""docs/reliability.md names tests that are there, and one at least for each fault and for each finding."""

from __future__ import annotations

import ast
import re

from tests.launch import REPO

PAGE = REPO / "docs" / "reliability.md"
TEST = re.compile(r"`([\w/]+\.py)::([\w:]+)`")


def names_in(file: str) -> set[str]:
    """``name`` or ``Class::name`` of every test of a file."""
    path = REPO / "tests" / file
    body = ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else []
    found = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    for group in (node for node in body if isinstance(node, ast.ClassDef)):
        found |= {f"{group.name}::{node.name}" for node in group.body if isinstance(node, ast.FunctionDef)}
    return found


def test_every_test_that_is_named_is_there() -> None:
    named = sorted(set(TEST.findall(PAGE.read_text(encoding="utf-8"))))
    there = {file: names_in(file) for file, _ in named}
    assert len(named) > 80
    assert [f"{file}::{name}" for file, name in named if name not in there[file]] == []


def test_every_fault_and_every_finding_has_a_test_or_the_benchmark() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    faults = [row for row in rows if row.count(" | ") == 3 and not row.startswith("| fault |")]
    findings = [row for row in rows if re.match(r"\| \d+: ", row)]
    assert len(faults) > 70 and [int(row[2:].partition(":")[0]) for row in findings] == list(range(1, 22))
    assert [row for row in faults if not TEST.search(row) and "benchmarks/faults.py" not in row] == []
    assert [row for row in findings if not TEST.search(row)] == []
