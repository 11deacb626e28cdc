"""A training step leaves no object of Python behind: a long run does not grow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launching.launch import ranks
from tests.launching.training import TinyWorld

EVERY, STEPS = 15, 47  # objects are counted as steps 15, 30 and 45 begin


@pytest.mark.slow
def test_steps_leave_no_object(tiny_world: TinyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole loop of rl on one process, with invented responses in the place of an engine."""
    monkeypatch.setenv("MEGA_RL_SOAK", str(tmp_path))
    monkeypatch.setenv("MEGA_RL_SOAK_OBJECTS_EVERY", str(EVERY))
    (tmp_path / "step_000001.jsonl").touch()
    settings = ("parallel={tensor: 1, sequence: false}", "rollout.tensor_parallel_size=1", "checkpoint.save_freq=9")
    settings += (f"rollout.replay={tmp_path}", f"trainer.output_dir={tmp_path / 'run'}", f"trainer.total_steps={STEPS}")
    script = "tests/faults/soak.py"
    ranks(script, "--config", tiny_world.rl, "trainer.gates.disabled=[engine]", *settings, nproc=1).check()
    rows = [json.loads(line) for line in (tmp_path / "rank0.jsonl").read_text().splitlines()]
    _, before, after = [row["objects"] for row in rows if "objects" in row]
    assert after - before < EVERY // 2, [row.get("kinds") for row in rows if "objects" in row]
