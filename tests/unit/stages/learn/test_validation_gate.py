"""Answers of a validation against the trainer: the engine that says something else of them is named."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mega_rl import platform
from mega_rl.config import RunConfig
from mega_rl.errors import GateFailure
from mega_rl.evaluation.evaluate import RowSummary
from mega_rl.microbatch import Microbatch, TokenStats
from mega_rl.observe.metrics.declared import is_declared
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.rollout.collect.trajectory_store import TrajectoryStore
from mega_rl.stages.learn.validation_gate import MAX_ANSWERS, ValidationGate, validation_gate
from mega_rl.stages.run.batch_share import BatchShare
from mega_rl.types import Prompt, Score, Trajectory

LENGTH = 25
SHARE = BatchShare(ParallelLayout.create(1, 1, 1), 0, max_tokens=4096, pad_multiple=8, pad_token_id=0)


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    platform.select("cpu")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Actor:
    """A policy that finds every token as probable as any other one; knows which prompts it has seen."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def token_stats(self, microbatches: Sequence[Microbatch]) -> list[TokenStats]:
        for microbatch in microbatches:
            starts = microbatch.cu_seqlens[:-1].tolist()[: len(microbatch.sequence_indices)]
            self.seen += [int(microbatch.token_ids[start]) for start in starts]
        return [TokenStats(torch.full((m.num_tokens,), -2.0), torch.zeros(1)) for m in microbatches]


class Run:
    """Two validations or more, each of two answers to every prompt: a greedy one and a sampled one."""

    def __init__(self, **keys: Any) -> None:
        self.config, self.said, self.actor = RunConfig(), list[str](), Actor()
        self.config.model.dtype = keys.get("dtype", "float32")
        self.config.rollout.mode, self.config.rollout.max_staleness = "pinned", keys.get("staleness", 2)
        self.config.rollout.temperature = keys.get("temperature", 1.0)
        self.config.trainer.gates.disabled = keys.get("disabled", [])
        self.store = TrajectoryStore(SHARE.layout, 0)
        actor: Any = self.actor
        self.gate = ValidationGate(self.config, SHARE, actor, self.said.append)

    def validate(self, gaps: Sequence[float], step: int = 3) -> dict[str, float]:
        """``gaps``: by engine, nats by which it is off; one prompt each, that has the engine's number."""
        rows = []
        for is_greedy in (True, False):
            for engine, gap in enumerate(gaps):
                prompt = Prompt(engine, (engine, 1), "", "", "s")
                logprobs = [-2.0 + gap] * LENGTH
                made = Trajectory.single_turn(prompt, 1 - is_greedy, [7] * LENGTH, logprobs, "", "stop", -step - 1)
                summary = self.store.add(dataclasses.replace(made, engine=engine))
                rows.append(RowSummary(summary, Score(1.0), is_greedy))
        return self.gate.check(rows, self.store, step)


def test_engines_that_agree_are_measured() -> None:
    run = Run()
    metrics = run.validate([1e-5, -2e-5])
    assert metrics == {
        "gates/validation_tokens": 4 * LENGTH,
        "gates/validation_diff": pytest.approx(1.5e-5, rel=1e-2),
    }
    assert all(map(is_declared, metrics)) and not run.said


def test_an_engine_that_says_something_else_is_named() -> None:
    with pytest.raises(GateFailure) as failed:
        Run().validate([0.0, 0.3, 0.0], step=7)
    first, line, *_ = str(failed.value).splitlines()
    assert first == "the validation after step 7 is not what it must be"
    assert f"of the {2 * LENGTH} tokens of rollout engine 1 is 0.3" in line
    metrics = Run(disabled=["engine"]).validate([0.0, 0.3])
    assert metrics["gates/validation_diff"] == pytest.approx(0.15)


def test_a_coarser_dtype_and_the_validations_before_allow_more() -> None:
    run = Run(dtype="bfloat16")
    assert run.validate([0.04])["gates/validation_diff"] == pytest.approx(0.04)
    assert run.validate([0.15])["gates/validation_diff"] == pytest.approx(0.15), "four times as far as before"
    with pytest.raises(GateFailure):
        Run(dtype="bfloat16").validate([0.15])


def test_at_other_temperatures_the_other_answers_are_compared_or_none() -> None:
    """A greedy answer's log-probabilities are of temperature 1; the trainer's of rollout.temperature."""
    run = Run(temperature=0.7)
    assert [run.validate([0.3]) for _ in range(2)] == [{"gates/validation_tokens": 0.0}] * 2
    assert len(run.said) == 1 and "rollout.temperature=0.7" in run.said[0]
    run.config.validation.temperature = 0.7
    assert run.validate([0.0])["gates/validation_tokens"] == LENGTH


def test_few_answers_are_compared_in_turn_of_all_engines() -> None:
    run, num_engines = Run(), 3 * MAX_ANSWERS // 2
    for _ in range(3):
        assert run.validate([0.0] * num_engines)["gates/validation_tokens"] == MAX_ANSWERS * LENGTH
    assert sorted(run.actor.seen) == sorted([*range(num_engines)] * 2)


def test_only_runs_with_older_weights_have_one() -> None:
    run = Run()
    actor: Any = run.actor
    assert validation_gate(run.config, SHARE, actor, print) is not None
    run.config.rollout.max_staleness = 0
    assert validation_gate(run.config, SHARE, actor, print) is None
    run.config.rollout.mode, run.config.rollout.max_staleness = "synchronous", 2
    assert validation_gate(run.config, SHARE, actor, print) is None
