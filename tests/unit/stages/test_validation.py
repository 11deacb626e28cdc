"""Evaluation in one process, and what a training run does with it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from mega_rl.config import RunConfig
from mega_rl.parallel.layout import EngineLayout
from mega_rl.rollout.engine import Request
from mega_rl.stages.parts.validation import EvaluationSettings, Validator, evaluate
from mega_rl.stages.parts.weight_sync import Pushed
from mega_rl.types import Prompt, Score, Trajectory, UnknownReward

PROMPTS = [Prompt(i, (1, 2), f"{i}?", "", "a" if i < 2 else "b") for i in range(3)]
LAYOUT = EngineLayout(1, 1)


class Engine:
    """Answers every request with as many tokens as its sample's number, and one more."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def check(self, requests: Sequence[Request]) -> None:
        """Everything fits."""

    def generate(self, requests: Sequence[Request]) -> list[Trajectory]:
        self.requests += requests
        return [
            Trajectory.single_turn(r.prompt, r.sample_index, [5] * (n := r.sample_index + 1), [0.0] * n, "x", "stop", 0)
            for r in requests
        ]


class Scorer:
    """Sample 1 of a prompt is right, prompt 1 is unknown, every other answer is wrong."""

    judge = None

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        unknown = Score(float("nan"), {}, {"r": UnknownReward("raised", "raised ValueError: x")})
        return [unknown if t.prompt.index == 1 else Score(float(t.sample_index == 1)) for t in trajectories]


def test_metrics_and_rows_of_an_evaluation() -> None:
    engine, scorer = Engine(), Scorer()
    settings = EvaluationSettings(LAYOUT, n=2, temperature=0.7, max_tokens=4, seed=3)
    metrics, rows = evaluate(engine, scorer, PROMPTS, settings)  # type: ignore[arg-type]
    assert [(r.trajectory.prompt.index, r.trajectory.sample_index, r.is_greedy) for r in rows] == [
        *((i, 0, True) for i in range(3)),
        *((i, n, False) for i in range(3) for n in range(2)),
    ]
    assert [request.temperature for request in engine.requests] == [0.0] * 3 + [0.7] * 6
    assert all(request.max_tokens == 4 for request in engine.requests)
    assert metrics == {
        "val-core/a/greedy/acc": 0.0,
        "val-core/b/greedy/acc": 0.0,
        "val-core/a/acc/mean@1": 0.5,
        "val-core/a/acc/best@2": 1.0,
        "val-aux/a/response_length/mean": 1.5,
        "val-core/b/acc/mean@1": 0.5,
        "val-core/b/acc/best@2": 1.0,
        "val-aux/b/response_length/mean": 1.5,
    }


def test_without_samples_the_greedy_answers_stand_for_them() -> None:
    settings = EvaluationSettings(LAYOUT, n=0, temperature=1.0, max_tokens=4, seed=3)
    metrics, rows = evaluate(Engine(), Scorer(), PROMPTS, settings)  # type: ignore[arg-type]
    assert len(rows) == 3 and metrics["val-core/b/acc/mean@1"] == metrics["val-core/b/greedy/acc"] == 0.0
    assert metrics["val-aux/a/response_length/mean"] == 1.0 and not any("best" in name for name in metrics)


class Sync:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def push(self, version: int, is_validation: bool = False) -> Pushed:
        self.calls.append((version, is_validation))
        return Pushed(version, sigma=0.0)

    def end_sampling(self) -> None:
        self.calls.append("end")


def test_a_validation_is_an_evaluation_between_two_calls_of_the_sync() -> None:
    config, said, shown, sync, engine = RunConfig(), [], [], Sync(), Engine()  # type: ignore[var-annotated]
    config.validation.n, config.data.max_response_length, config.trainer.seed = 1, 4, 3
    config.logging.num_text_samples = 2
    timers: Any = lambda name: nullcontext()  # noqa: E731
    dataset: Any = SimpleNamespace(prompts=PROMPTS)
    validator = Validator(config, LAYOUT, timers, said.append, dataset, sync, engine, Scorer())  # type: ignore[arg-type]
    observer: Any = SimpleNamespace(text=lambda step, tag, text: shown.append((step, tag)))
    first = validator.validate(observer, step=0)
    second = validator.validate(observer, step=6)
    assert sync.calls == [(0, True), "end", (6, True), "end"]
    assert validator.results == {"first": first, "last": second} and first == second
    assert shown == [(step, f"validation/{index}") for step in (0, 6) for index in (0, 1)]
    assert len(said) == 4 and all("for 1 of 3 samples: a prompt 1 sample 0" in line for line in said)  # greedy, sampled
    half = len(engine.requests) // 2
    assert engine.requests[:half] == engine.requests[half:], "the same seeds at every validation"


def test_without_a_data_set_there_is_no_validation() -> None:
    sync: Any = Sync()
    timers: Any = None
    validator = Validator(RunConfig(), LAYOUT, timers, print, None, sync, Engine(), Scorer())  # type: ignore[arg-type]
    assert validator.validate(SimpleNamespace(), step=0) == {} and sync.calls == []  # type: ignore[arg-type]
