"""The faults that tests inject: each test that docs/reliability.md names, and how long its fault took.

    python -m tests.faults.runs --rows [WORDS ...]

goes through the rows of the page whose faults have these words in them, or through all, and prints figures. A test
that starts a run tells the seconds from the fault until the run had ended or gone on, or, where its disk is at fault
from the beginning, from its start (pytest's ``record_property`` of ``seconds``). Of any other test the whole time
counts, so its figure is an upper bound. What needs namespaces of its own (hostile programs, full disks) makes them in
its test.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from benchmarks.report import publish, table
from tests.launching.launch import REPO

PAGE = REPO / "docs" / "reliability.md"
TEST = re.compile(r"`([\w/]+\.py(?:::\w+)+)`")


@dataclass
class Measured:
    """What the cases of one test took."""

    seconds: dict[str, float] = field(default_factory=dict)  # case -> seconds
    is_told: bool = False  # by the test itself, from its fault on
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def text(self) -> str:
        if self.failed:
            return f"FAILED: {', '.join(self.failed)}"
        if not self.seconds:
            return "skipped here"
        longest, what = max(self.seconds.values()), "from the fault on" if self.is_told else "the whole test"
        cases = f", {len(self.seconds)} cases" if len(self.seconds) > 1 else ""
        return f"{longest:.1f} s at most, {what}{cases}"


class Recorder:
    """A plugin of pytest."""

    def __init__(self) -> None:
        self.found: dict[str, Measured] = {}  # test, without the case

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test, _, case = report.nodeid.removeprefix("tests/").partition("[")
        measured = self.found.setdefault(test, Measured())
        if report.failed:
            measured.failed.append(case.rstrip("]") or report.when or "")
        elif report.skipped:
            measured.skipped.append(case.rstrip("]"))
        elif report.when == "call":
            told = {name: value for name, value in report.user_properties if name.startswith("seconds")}
            measured.is_told |= bool(told)
            for name, value in (told or {"": report.duration}).items():
                measured.seconds[f"{case}{name}"] = float(str(value))


def rows() -> dict[str, list[str]]:
    """Fault -> the tests that its row names."""
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.read_text().splitlines()]
    return {row[0]: TEST.findall(row[2]) for row in cells if len(row) == 4 and TEST.search(row[2])}


def publish_rows(words: list[str], json_path: Path | None) -> int:
    """Run the tests of the rows with these words, print what they took, and return pytest's exit status."""
    chosen = {fault: tests for fault, tests in rows().items() if not words or any(word in fault for word in words)}
    tests = sorted({test for tests in chosen.values() for test in tests})
    if not tests:
        print(f"error: no row of {PAGE.name} that names a test has {' or '.join(words)} in its fault", file=sys.stderr)
        return 2
    recorder, load = Recorder(), os.getloadavg()[0]
    os.chdir(REPO)
    options = ["-q", "-p", "no:cacheprovider", "-o", "timeout=0", *(f"tests/{test}" for test in tests)]
    status = int(pytest.main(options, plugins=[recorder]))
    figures = {test: found.text() for test, found in recorder.found.items()}
    lines = [(fault, f"`{test}`", figures.get(test, "not run")) for fault, tests in chosen.items() for test in tests]
    text = table(["fault", "test", "figure"], lines)
    text += f"\n\nLoad of the machine: {load:.0f} before, {os.getloadavg()[0]:.0f} after."
    publish("Faults that tests inject", text, "cpu", {"rows": lines}, json_path)
    return status
