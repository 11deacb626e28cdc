"""What a training run does with an evaluation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from mega_rl.config import RunConfig
from mega_rl.parallel.layout import EngineLayout, ParallelLayout
from mega_rl.rollout.collect.trajectory_store import TrajectoryStore
from mega_rl.stages.sampling.batch_builder import BatchBuilder
from mega_rl.stages.sampling.validation import Validator, validation_set
from mega_rl.stages.weights.weight_sync import Pushed
from tests.pretended.answering import PROMPTS, FakeEngine, FakeScorer

LAYOUT, STORE = EngineLayout(1, 1), TrajectoryStore(ParallelLayout.create(1), 0)


class Sync:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def push(self, version: int, is_validation: bool = False) -> Pushed:
        self.calls.append((version, is_validation))
        return Pushed(version, sigma=0.0)

    def end_sampling(self) -> None:
        self.calls.append("end")


class Everybody:
    def wait(self, what: str) -> None:
        """There is one rank."""


def job_of(config: RunConfig, timers: Any, say: Callable[[str], None]) -> Any:
    meeting = Everybody()
    return SimpleNamespace(
        config=config, engine_layout=LAYOUT, timers=timers, say=say, rendezvous=meeting, trajectory_store=STORE
    )


def test_a_validation_is_an_evaluation_between_two_calls_of_the_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    config, said, shown, sync, engine = RunConfig(), [], [], Sync(), FakeEngine()  # type: ignore[var-annotated]
    config.validation.n, config.data.max_response_length, config.trainer.seed = 1, 4, 3
    config.logging.num_text_samples = 2
    timers: Any = lambda name: nullcontext()  # noqa: E731
    dataset: Any = SimpleNamespace(prompts=PROMPTS, picture_set=None)
    monkeypatch.setattr("mega_rl.stages.sampling.batch_builder.dist.get_rank", lambda: 0)
    monkeypatch.setattr("mega_rl.stages.sampling.batch_builder.engine_ranks", lambda *_: None)
    job = job_of(config, timers, said.append)
    batches = BatchBuilder(job, None, engine, FakeScorer(), validation_set(job, dataset))  # type: ignore[arg-type]
    validator = Validator(job, dataset, sync, batches, FakeScorer())  # type: ignore[arg-type]
    observer: Any = SimpleNamespace(samples=lambda step, tag, rows: shown.append((step, tag, len(rows))))
    first = validator.validate(observer, step=0)
    second = validator.validate(observer, step=6)
    assert sync.calls == [(0, True), "end", (6, True), "end"]
    assert validator.results == {"first": first, "last": second} and first == second
    assert shown == [(step, "validation", 2) for step in (0, 6)]
    assert len(said) == 4 and all("for 1 of 3 samples: a prompt 1 sample 0" in line for line in said)  # greedy, sampled
    half = len(engine.requests) // 2
    assert engine.requests[:half] == engine.requests[half:], "the same seeds at every validation"


def test_without_a_data_set_there_is_no_validation() -> None:
    sync: Any = Sync()
    timers: Any = None
    validator = Validator(job_of(RunConfig(), timers, print), None, sync, timers, FakeScorer())  # type: ignore[arg-type]
    assert validator.validate(SimpleNamespace(), step=0) == {} and sync.calls == []  # type: ignore[arg-type]
