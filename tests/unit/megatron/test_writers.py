"""The processes that write a checkpoint end with the rank that they write for, however it ended."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from mega_rl.megatron.writers import writers_end_with_us
from tests.launch import REPO, started

pytestmark = pytest.mark.slow  # as a module

SCRIPT = REPO / "tests" / "unit" / "megatron" / "run_held_writers.py"
LIMIT_S = 100.0


@pytest.mark.parametrize(("mode", "depth"), [("plain", 1), ("async", 2)])
def test_a_killed_rank_leaves_no_writer(mode: str, depth: int, tmp_path: Path) -> None:
    with started((sys.executable, str(SCRIPT), mode, str(tmp_path))) as running:
        deadline = time.monotonic() + LIMIT_S
        while not (writers := [int(path.name[len("writer_") :]) for path in tmp_path.glob("writer_*")]):
            assert running.process.poll() is None and time.monotonic() < deadline, running.output()
            time.sleep(0.05)
        rank = psutil.Process(running.process.pid)
        children = [child for child in rank.children(recursive=True) if "resource_tracker" not in str(child.cmdline())]
        assert set(writers) <= {child.pid for child in children} and len(children) >= depth
        rank.kill()
        _, alive = psutil.wait_procs(children, timeout=20)
        assert alive == []


def test_other_forks_are_left_alone() -> None:
    """What is forked outside of the block outlives its parent as before, for example a reward's own process."""

    def death_signal() -> int:
        """Of a child that is forked now; it reports by its exit status."""
        pid = os.fork()
        if pid == 0:
            signal = ctypes.c_int()
            ctypes.CDLL(None).prctl(2, ctypes.byref(signal), 0, 0, 0)  # PR_GET_PDEATHSIG
            os._exit(signal.value)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    before = death_signal()
    with writers_end_with_us():
        assert death_signal() == 9
    assert (before, death_signal()) == (0, 0)
