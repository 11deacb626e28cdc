"""These tests run in a process of their own (``make test-npu``), where torch_npu is imported and devices pretended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.npu import emulation

if emulation.is_active():
    COUNTS = emulation.start()
else:  # with torch_npu imported, all other tests would see two devices
    COUNTS = Counter()
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def operator_counts() -> Iterator[Counter[str]]:
    """ "npu::npu_rms_norm" -> how often it has run in this test; "aten::mm" and "c10d::allreduce_" likewise."""
    COUNTS.clear()
    yield COUNTS
