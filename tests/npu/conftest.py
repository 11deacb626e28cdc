"""These tests run in a process of their own (``make test-npu``), where torch_npu is imported and devices pretended."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import pytest

from tests.npu import emulation

if emulation.is_active():
    COUNTS = emulation.start()
else:  # with torch_npu imported, all other tests would see two devices
    COUNTS = Counter()
    collect_ignore_glob = ["test_*.py"]


REPORTED: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def own_environment() -> Iterator[None]:
    """What choosing a platform sets in the environment does not reach the processes of the next file."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def report_operators() -> Callable[[str, Mapping[str, int]], None]:
    """Has what ran shown at the end of the run: Ascend's own operators, collectives, and all others in one number."""

    def report(title: str, counts: Mapping[str, int]) -> None:
        own = [f"{name} {count}" for name, count in sorted(counts.items()) if not name.startswith("aten::") and count]
        others = {name: count for name, count in counts.items() if name.startswith("aten::") and count}
        own.append(f"{len(others)} operators of torch {sum(others.values())}")
        REPORTED.append(f"{title}: {', '.join(own)}")

    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if REPORTED:
        terminalreporter.section("operators that ran on device npu")
        for line in REPORTED:
            terminalreporter.line(line)


@pytest.fixture
def operator_counts() -> Iterator[Counter[str]]:
    """ "npu::npu_rms_norm" -> how often it has run in this test; "aten::mm" and "c10d::allreduce_" likewise."""
    COUNTS.clear()
    yield COUNTS
