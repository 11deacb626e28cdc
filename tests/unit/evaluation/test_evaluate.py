"""Evaluation in one process: requests, answers, scores and metrics."""

from __future__ import annotations

import pytest

from mega_rl.errors import InputError
from mega_rl.evaluation.evaluate import AnsweredPrompt, EvaluationSettings, evaluate, evaluation_metrics, summarized
from mega_rl.parallel.layout import EngineLayout, ParallelLayout
from mega_rl.rollout.collect.trajectory_store import TrajectoryStore
from tests.pretended.answering import PROMPTS, FakeEngine, FakeScorer

LAYOUT = EngineLayout(1, 1)


def trajectory_store() -> TrajectoryStore:
    return TrajectoryStore(ParallelLayout.create(1), 0)


def answers(settings: EvaluationSettings, engine: FakeEngine | None = None) -> list[AnsweredPrompt]:
    mine: list[AnsweredPrompt] = []
    evaluate(engine or FakeEngine(), FakeScorer(), PROMPTS, settings, mine.append)  # type: ignore[arg-type]
    return mine


def test_metrics_and_rows_of_an_evaluation() -> None:
    engine = FakeEngine()
    mine = answers(EvaluationSettings(LAYOUT, n=2, temperature=0.7, max_tokens=4, seed=3), engine)
    assert [a.prompt.index for a in mine] == [2, 1, 0], "as soon as the last answer of a prompt is scored"
    rows = summarized(mine, LAYOUT, trajectory_store())
    assert [(r.summary.prompt_index, r.summary.sample_index, r.is_greedy) for r in rows] == [
        *((i, 0, True) for i in range(3)),
        *((i, n, False) for i in range(3) for n in range(2)),
    ]
    sampled = {(r.prompt.index, r.sample_index): r.seed for r in engine.requests if not r.greedy}
    found = [row for one in mine for row in one.rows]
    assert {(r.trajectory.prompt.index, r.trajectory.sample_index): r.seed for r in found if not r.is_greedy} == sampled
    assert len(set(sampled.values())) == 6 and all(row.seed is None for row in found if row.is_greedy)
    assert sorted(request.temperature for request in engine.requests) == [0.0] * 3 + [0.7] * 6
    assert all(request.max_tokens == 4 for request in engine.requests)
    assert len({(r.prompt.index, r.sample_index) for r in engine.requests}) == 9, (
        "an engine tells answers apart by these"
    )
    assert evaluation_metrics(rows) == {
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
    rows = summarized(
        answers(EvaluationSettings(LAYOUT, n=0, temperature=1.0, max_tokens=4, seed=3)), LAYOUT, trajectory_store()
    )
    metrics = evaluation_metrics(rows)
    assert len(rows) == 3 and metrics["val-core/b/acc/mean@1"] == metrics["val-core/b/greedy/acc"] == 0.0
    assert metrics["val-aux/a/response_length/mean"] == 1.0 and not any("best" in name for name in metrics)


def test_without_greedy_answers_there_are_only_samples() -> None:
    settings = EvaluationSettings(LAYOUT, n=2, temperature=1.0, max_tokens=4, seed=3, is_greedy=False)
    rows = summarized(answers(settings), LAYOUT, trajectory_store())
    assert [row.is_greedy for row in rows] == [False] * 6
    assert "val-core/a/greedy/acc" not in evaluation_metrics(rows)


def test_the_engines_own_error_arrives_and_nothing_is_submitted() -> None:
    class Full(FakeEngine):
        def check(self, requests: object) -> None:
            raise InputError("too many")

    engine = Full()
    with pytest.raises(InputError, match="too many"):
        answers(EvaluationSettings(LAYOUT, n=1, temperature=1.0, max_tokens=4, seed=3), engine)
    assert not engine.requests
