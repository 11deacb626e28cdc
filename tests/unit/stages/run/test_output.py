"""One run at a time has an output directory, and what keeps it out of one is said in a sentence."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mega_rl.config import RunConfig
from mega_rl.errors import InputError
from mega_rl.megatron.checkpoint import saving
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.stages.run.output import CHECKPOINTS, LOCK, OutputLock, take_output

HOLD = """
import sys
from pathlib import Path
from mega_rl.stages.run.output import OutputLock
lock = OutputLock(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.readline()
"""


@contextmanager
def another_run(directory: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLD, str(directory)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_second_run_is_refused_by_name(tmp_path: Path) -> None:
    with another_run(tmp_path) as other, pytest.raises(InputError) as refused:
        OutputLock(tmp_path)
    holder = f"process {other.pid} on {socket.gethostname()}"
    assert f"trainer.output_dir={tmp_path} is in use by another run ({holder})" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_a_killed_run_left_keeps_nobody_out(tmp_path: Path) -> None:
    with another_run(tmp_path) as other:
        other.send_signal(signal.SIGKILL)
        other.wait()
        lock = OutputLock(tmp_path)
    assert (tmp_path / LOCK).read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
    with pytest.raises(InputError, match="in use by another run"):
        OutputLock(tmp_path)
    lock.release()
    OutputLock(tmp_path).release()


def test_a_refused_run_changes_nothing(tmp_path: Path) -> None:
    config = RunConfig()
    config.trainer.output_dir, config.checkpoint.resume = str(tmp_path), "never"
    (tmp_path / CHECKPOINTS / "step_00000002").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text("of the run that is under way")
    with another_run(tmp_path), pytest.raises(InputError, match="in use by another run"):
        take_output(config, ParallelLayout.create(1))
    assert (tmp_path / "config.yaml").read_text() == "of the run that is under way"
    assert [path.name for path in (tmp_path / CHECKPOINTS).iterdir()] == ["step_00000002"]
    lock, resume, warnings = take_output(config, ParallelLayout.create(1))
    assert (resume, warnings) == (None, []) and "total_steps" in (tmp_path / "config.yaml").read_text()
    assert [path.name for path in (tmp_path / CHECKPOINTS).iterdir()] == ["superseded_1"]
    lock.release()


def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    lock = OutputLock(tmp_path)
    assert lock.warnings == [
        f"warning: {tmp_path / LOCK} cannot be locked (Function not implemented): nothing keeps a second run out"
    ]
    lock.release()


@pytest.mark.parametrize(("number", "cause"), [(28, "No space left on device"), (30, "Read-only file system")])
def test_a_disk_that_takes_nothing_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, cause: str
) -> None:
    config = RunConfig()
    config.trainer.output_dir = str(tmp_path / "run")

    def refuse(path: Path, **_: object) -> None:
        raise OSError(number, cause, str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(
        InputError, match=rf"output_dir={tmp_path}/run: .*/run \({cause}, [\d,]+ bytes free\)"
    ) as refused:
        take_output(config, ParallelLayout.create(1))
    assert "\n" not in str(refused.value)


def test_the_cause_of_a_failed_save_is_what_the_disk_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's writer only knows that it stands elsewhere than it should."""
    error = OSError("unexpected pos 704 vs 598")
    assert saving.cause(tmp_path, error) == "unexpected pos 704 vs 598"

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert saving.cause(tmp_path, error) == "No space left on device"
