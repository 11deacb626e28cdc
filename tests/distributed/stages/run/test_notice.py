"""A run that is told to end saves after its step, says so and stops; a run that goes on from there loses nothing."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launching.launch import REPO, Running, ranks, started, torchrun_command
from tests.launching.training import TinyWorld, computed, digests, metrics_of, steps_saved

pytestmark = pytest.mark.slow
SCRIPT = REPO / "tests" / "distributed" / "stages" / "run" / "run_notice.py"
LIMIT_S = 200.0


def told_to_end(running: Running, record_property: Callable[[str, object], None]) -> str:
    """What a run says that is told to end within its third step."""
    running.wait_for("within step 3", LIMIT_S)
    begin = time.monotonic()
    running.process.send_signal(signal.SIGTERM)
    running.wait(LIMIT_S)
    record_property("seconds", time.monotonic() - begin)
    return running.output()


def test_a_run_that_torchrun_ends_saves_and_goes_on_bit_for_bit(
    tiny_world: TinyWorld, sft_run: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    output_dir = tmp_path / "run"
    arguments = ("--config", tiny_world.sft, f"trainer.output_dir={output_dir}")
    with started(torchrun_command(SCRIPT, "notice", 3, *arguments)) as running:
        output = told_to_end(running, record_property)
    assert "SIGTERM: this run saves at the end of the step and stops" in output
    assert output.count("stopped after step 3 because of SIGTERM: its checkpoint is written") == 1, output
    assert "Unable to shutdown" not in output, "the ranks ended by themselves, before torchrun killed them"
    assert steps_saved(output_dir) == [2, 3] and list(metrics_of(output_dir))[-1] == 3

    resumed = ranks(SCRIPT, "notice", 0, *arguments, timeout=LIMIT_S).check()
    assert "resuming after step 3" in resumed.stdout
    expected = {step: computed(row) for step, row in metrics_of(sft_run).items()}
    assert {step: computed(row) for step, row in metrics_of(output_dir).items()} == expected
    assert digests(output_dir / "huggingface") == digests(sft_run / "huggingface")


def test_a_step_that_is_longer_than_the_grace_ends_without_a_checkpoint(
    tiny_world: TinyWorld, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    output_dir = tmp_path / "run"
    arguments = ("--config", tiny_world.sft, f"trainer.output_dir={output_dir}", "checkpoint.grace_s=0.5")
    with started(torchrun_command(SCRIPT, "ever", 3, *arguments)) as running:
        output = told_to_end(running, record_property)
    assert output.count("no step ended within checkpoint.grace_s=0.5 s: this run ends without another checkpoint") == 1
    assert "stopped after step" not in output and "Unable to shutdown" not in output
    assert steps_saved(output_dir) == [2]
