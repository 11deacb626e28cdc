"""A killed run loses no row of its metrics: the checkpoint has what the row of its step would say."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mega_rl.config import RunConfig
from mega_rl.megatron.checkpoint import checkpoint
from mega_rl.observe.sinks.sinks import read_jsonl
from mega_rl.observe.timers import Timers
from mega_rl.stages.run import progress
from mega_rl.stages.run.job import Job
from mega_rl.stages.run.output import CHECKPOINTS
from mega_rl.stages.run.progress import Progress

ROWS = {1: {"actor/loss": 0.5}, 2: {"actor/loss": 0.25, "actor/grad_norm": 3.0}}
SOURCE: Any = SimpleNamespace(state_dict=lambda: {}, load_state_dict=lambda state: None)


def job_of(output_dir: Path, resumed_from: Path | None) -> Job:
    config = RunConfig()
    config.logging.tensorboard = config.logging.progress = False
    given = {"config": config, "output_dir": output_dir, "checkpoint": resumed_from}
    return Job(**{field.name: given.get(field.name) for field in dataclasses.fields(Job)})  # type: ignore[arg-type]


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a checkpoint of step 2 keeps, as ``resume`` reads it again."""
    content: dict[str, Any] = {"step": 2}
    writer: Any = SimpleNamespace(
        root=Path("absent"), save=lambda step, actor, kept: content.update(kept), finish=lambda: None
    )
    actor: Any = None
    job: Any = SimpleNamespace(checkpoints=writer, memory=None, timers=Timers())
    progress.save_if_due(job, 2, actor, SOURCE, Progress(2, {}, ROWS[2]), total_steps=4)
    monkeypatch.setattr(checkpoint, "load", lambda directory, actor: content)
    monkeypatch.setattr(Job, "is_main", True)
    return content


@pytest.mark.parametrize("num_rows_written", [1, 2])
def test_the_row_of_a_checkpoint_is_there_once(tmp_path: Path, saved: dict[str, Any], num_rows_written: int) -> None:
    with job_of(tmp_path, None).observer(Progress(), 4) as observer:
        for step in range(1, num_rows_written + 1):
            observer.log(step, ROWS[step])
    directory, actor = checkpoint.directory_of(tmp_path / CHECKPOINTS, 2), None
    state = progress.resume(directory, None, actor, SOURCE, print)  # type: ignore[arg-type]
    with job_of(tmp_path, directory).observer(state, 4) as observer:
        observer.log(3, {"actor/loss": 0.125})
    expected = {**ROWS, 3: {"actor/loss": 0.125}}
    assert {row["step"]: row["metrics"] for row in read_jsonl(tmp_path / "metrics.jsonl")} == expected


def test_a_checkpoint_of_another_run_brings_no_row(tmp_path: Path, saved: dict[str, Any]) -> None:
    directory = checkpoint.directory_of(tmp_path / "other" / CHECKPOINTS, 2)
    job_of(tmp_path / "run", directory).observer(Progress(2, {}, ROWS[2]), 4).close()
    assert read_jsonl(tmp_path / "run" / "metrics.jsonl") == []


def test_a_checkpoint_of_before_has_no_row(tmp_path: Path, saved: dict[str, Any]) -> None:
    del saved["metrics"]
    state = progress.resume(tmp_path, None, None, SOURCE, print)  # type: ignore[arg-type]
    assert state == Progress(2, {}, {})
