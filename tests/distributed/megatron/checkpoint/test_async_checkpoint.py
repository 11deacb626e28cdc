"""Checkpoints written in the background equal plain ones, and a job that dies amid one resumes from the one before."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launching.launch import REPO, ranks, started, torchrun_command

SCRIPT = REPO / "tests" / "distributed" / "megatron" / "checkpoint" / "run_async_checkpoint.py"


@pytest.mark.slow
def test_an_asynchronous_save_equals_a_plain_one_and_keeps_the_newest(tmp_path: Path) -> None:
    launched = ranks(SCRIPT, "--part", "write", "--dir", tmp_path, nproc=2).check()
    assert "PASSED write" in launched.stdout


@pytest.mark.slow
def test_a_job_killed_amid_an_asynchronous_save_resumes_at_another_layout_from_the_one_before(tmp_path: Path) -> None:
    with started(torchrun_command(SCRIPT, "--part", "hold", "--dir", tmp_path, nproc=2)) as running:
        running.wait_for("HELD amid the save", timeout=600)
    found = sorted(path.name for path in (tmp_path / "cut").iterdir())
    assert found == [".step_00000004.incomplete", "step_00000003"]
    launched = ranks(SCRIPT, "--part", "resume", "--dir", tmp_path, nproc=1).check()
    assert "PASSED resume" in launched.stdout
