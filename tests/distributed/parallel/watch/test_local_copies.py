"""A run of which a rank is killed goes on from the memory of its node, whatever the checkpoints on disk are worth."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launching.launch import REPO, ranks, started, torchrun_command
from tests.launching.training import RUN_MARK, TinyWorld, computed, digests, metrics_of, steps_saved, survivors

pytestmark = pytest.mark.slow
SCRIPT = REPO / "tests" / "distributed" / "parallel" / "watch" / "run_killed.py"


def test_a_killed_rank_costs_no_step_and_reads_no_checkpoint(
    tiny_world: TinyWorld, sft_run: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    output_dir, token = tmp_path / "run", uuid.uuid4().hex
    arguments = ("--config", tiny_world.sft, f"trainer.output_dir={output_dir}", "checkpoint.local=1")
    command = list(torchrun_command(SCRIPT, 1, 5, *arguments))
    command[3:3] = ["--max-restarts", "1"]
    with started(command, env={RUN_MARK: token}) as running:
        running.wait_for("from the memory of the nodes", 300.0)
        resumed_at = time.monotonic()
        status = running.wait(300.0)
        output = running.output()
        left = survivors(token)
    assert status == 0, output
    record_property("seconds", resumed_at - float(re.findall(r"killed at (\d+\.\d{3})", output)[0]))
    assert output.count("resuming after step 5 from the memory of the nodes") == 1, output
    assert "from " + str(output_dir / "checkpoints") not in output
    assert left == [], "a server of the copies outlives torchrun"
    expected = {step: computed(row) for step, row in metrics_of(sft_run).items()}
    assert {step: computed(row) for step, row in metrics_of(output_dir).items()} == expected
    assert digests(output_dir / "huggingface") == digests(sft_run / "huggingface")
    assert steps_saved(output_dir)[-2:] == [6, 8]


def test_the_copy_of_a_node_that_is_lost_comes_from_another_one() -> None:
    launched = ranks(SCRIPT.with_name("run_state_copies.py"), nproc=2, timeout=250).check()
    assert "PASSED" in launched.stdout
