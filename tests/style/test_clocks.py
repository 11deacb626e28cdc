"""Nothing waits by the clock of the wall, which jumps: time servers set it, and virtual machines are moved."""

from __future__ import annotations

import ast
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
WALL = {
    "time.time",
    "time.time_ns",
    "time.localtime",
    "time.gmtime",
    "datetime.now",
    "datetime.utcnow",
    "datetime.today",
}


def uses_of_the_wall(source: str) -> list[str]:
    """Names and line numbers of what reads that clock."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            name = ".".join(ast.unparse(node).split(".")[-2:])
            if name in WALL:
                found.append(f"{name} in line {node.lineno}")
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            found += [f"time.{a.name} in line {node.lineno}" for a in node.names if f"time.{a.name}" in WALL]
    return found


def test_nothing_waits_by_a_clock_that_jumps() -> None:
    files = [path for room in ("mega_rl", "tools") for path in sorted((REPO / room).rglob("*.py"))]
    found = {str(path.relative_to(REPO)): uses_of_the_wall(path.read_text(encoding="utf-8")) for path in files}
    assert files and {path: uses for path, uses in found.items() if uses} == {}


def test_a_use_is_found() -> None:
    source = "import time, datetime\nfrom time import time as now\nend = time.time() + 3\nx = datetime.datetime.now()\n"
    assert set(uses_of_the_wall(source)) == {"time.time in line 2", "time.time in line 3", "datetime.now in line 4"}
