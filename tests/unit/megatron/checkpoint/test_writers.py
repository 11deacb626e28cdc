"""The processes that write a checkpoint end with the rank that they write for, and it notices their end."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from mega_rl.megatron.checkpoint.writers import writers_end_with_us
from tests.launching.launch import REPO, Running, started

pytestmark = pytest.mark.slow  # as a module

SCRIPT = REPO / "tests" / "unit" / "megatron" / "checkpoint" / "run_held_writers.py"
LIMIT_S = 100.0


def amid(directory: Path, running: Running) -> list[int]:
    """The processes that are writing, once there are any."""
    deadline = time.monotonic() + LIMIT_S
    while not (writers := [int(path.name[len("writer_") :]) for path in directory.glob("writer_*")]):
        assert running.process.poll() is None and time.monotonic() < deadline, running.output()
        time.sleep(0.05)
    return writers


@pytest.mark.parametrize(("mode", "killed"), [("plain", "writer"), ("async", "writer"), ("async", "its parent")])
def test_a_killed_writer_ends_the_run_with_one_sentence(mode: str, killed: str, tmp_path: Path) -> None:
    with started((sys.executable, str(SCRIPT), mode, str(tmp_path))) as running:
        writer = psutil.Process(amid(tmp_path, running)[0])
        writer.parent().kill() if killed == "its parent" else writer.kill()
        assert running.process.wait(LIMIT_S) == 2, running.output()
        (line,) = [line for line in running.output().splitlines() if line.startswith("error:")]
        how = "ended without a report" if killed == "its parent" else "ended with signal 9"
        assert line.startswith("error: the checkpoint of step 1 is not written: a process of rank 0")
        assert how in line and "checkpoint.async_save" in line and "earlier checkpoints are untouched" in line


@pytest.mark.parametrize(("mode", "depth"), [("plain", 1), ("async", 2)])
def test_a_killed_rank_leaves_no_writer(mode: str, depth: int, tmp_path: Path) -> None:
    with started((sys.executable, str(SCRIPT), mode, str(tmp_path))) as running:
        writers = amid(tmp_path, running)
        rank = psutil.Process(running.process.pid)
        children = [child for child in rank.children(recursive=True) if "resource_tracker" not in str(child.cmdline())]
        assert set(writers) <= {child.pid for child in children} and len(children) >= depth
        rank.kill()
        _, alive = psutil.wait_procs(children, timeout=LIMIT_S)
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
