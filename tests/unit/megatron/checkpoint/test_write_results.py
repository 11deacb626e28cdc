"""How the writer process of a checkpoint reports to its rank."""

from __future__ import annotations

import os

import pytest
from megatron.core.dist_checkpointing.strategies import filesystem_async

from mega_rl.megatron.checkpoint import writers


def test_a_copy_of_a_process_reads_no_other_ones_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem_async, "_results_queue", None)
    writers.prepare_writers()
    first = filesystem_async._results_queue
    writers.prepare_writers()
    assert filesystem_async._results_queue is first  # a second writer of the process may report at the same time
    process_id = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: process_id + 1)
    writers.prepare_writers()
    second = filesystem_async._results_queue
    first.put("of the first")
    second.put("of the second")
    assert (first.get_nowait(), second.get_nowait()) == ("of the first", "of the second")
