"""The distance of engines from the trainer, by engine and by the age of weights: what it is, and what it may be."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mega_rl.config import RunConfig
from mega_rl.errors import GateFailure
from mega_rl.microbatch import Microbatch, TokenStats
from mega_rl.stages.learn.engine_distance import (
    FIRST_SIGHT,
    STALE_FLOOR,
    Distance,
    Group,
    Histories,
    distances,
    staleness_T,
    too_far,
)
from mega_rl.stages.learn.gate_watch import GateWatch
from mega_rl.types import Prompt, Sample, Score, Span, Trajectory

PROMPT = Prompt(0, (1,), "", "", "s")


def sample(engine: int | None, spans: Sequence[tuple[int, int]], length: int = 4, number: int = 0) -> Sample:
    """``spans``: (first sampled token, version)."""
    whole = Trajectory.single_turn(PROMPT, number, [5] * length, [-1.0] * length, "", "stop", 0)
    found = dataclasses.replace(whole, spans=tuple(Span(1 + at, v) for at, v in spans), engine=engine)
    return Sample(found.summary(), Score(1.0), 0.0)


def microbatch(samples: Sequence[Sample], **fields: Tensor) -> Microbatch:
    """The sequences in their order, with a tail of one token."""
    lengths = [one.summary.num_tokens - 1 for one in samples]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    total = ends[-1] + 1
    return Microbatch(
        token_ids=torch.zeros(total, dtype=torch.int64),
        target_ids=torch.zeros(total, dtype=torch.int64),
        position_ids=torch.zeros(total, dtype=torch.int64),
        loss_mask=torch.tensor([1.0] * ends[-1] + [0.0]),
        cu_seqlens=torch.tensor([0, *ends, total], dtype=torch.int32),
        max_seqlen=max(lengths),
        sequence_indices=tuple(range(len(samples))),
        **fields,
    )


def test_tokens_are_told_apart_by_engine_and_by_the_weights_that_sampled_them() -> None:
    samples = [sample(0, [(0, 5)]), sample(1, [(0, 3), (3, 5)]), sample(None, [(0, 4)], length=2)]
    batch = microbatch(samples)
    ages_T = staleness_T(batch, samples, 5, keeps_cache=False)
    assert ages_T.tolist() == [0, 0, 0, 0, 2, 2, 2, 0, 1, 1, -1]
    engine_T = torch.tensor([1.0, 1, 1, 1, 2, 2, 2, 4, math.nan, 8, 99])
    assert distances(torch.zeros(11), engine_T, batch, samples, ages_T) == {
        Group(0, 0): Distance(4.0, 4),
        Group(1, 2): Distance(6.0, 3),
        Group(1, 0): Distance(4.0, 1),
        Group(None, 1): Distance(math.inf, 2),
    }
    kept_T = staleness_T(batch, samples, 5, keeps_cache=True)
    assert kept_T.tolist() == [0, 0, 0, 0, 2, 2, 2, 2, 1, 1, -1], "its last token stands on keys of older weights"


def test_older_tokens_are_measured_by_tokens_as_old() -> None:
    histories = Histories(4.0)
    assert histories.allows(1, 1) == FIRST_SIGHT
    histories.add(1, 1, 1e-4)
    assert histories.allows(2, 1) == STALE_FLOOR, "a warm-up says little of what is to come"
    for step in range(2, 40):
        histories.add(step, 1, 0.05)
    assert histories.allows(40, 1) == pytest.approx(0.2)
    assert histories.allows(40, 3) == pytest.approx(0.6), "three steps move the weights as far as three times one"
    histories.add(40, 3, 0.03)
    assert histories.allows(41, 3) == pytest.approx(0.12) and histories.allows(41, 4) == pytest.approx(0.16)


def test_noise_of_the_weights_that_sampled_counts() -> None:
    histories = Histories(4.0, sigma_of=lambda version: 0.0 if version < 4 else 0.1)
    histories.add(4, 1, 0.01)
    assert histories.allows(4, 1) == STALE_FLOOR
    assert histories.allows(5, 1) == FIRST_SIGHT, "weights without noise say nothing of weights with it"
    histories.add(5, 1, 0.3)
    assert histories.allows(6, 1) == pytest.approx(1.2)


@pytest.mark.parametrize(("num_tokens", "is_far"), [(4, False), (400, True)])
def test_few_tokens_may_be_further_away(num_tokens: int, is_far: bool) -> None:
    found = {Group(0, 0): Distance(0.15 * num_tokens, num_tokens), Group(1, 0): Distance(0.0, 10_000)}
    assert [one.engine for one in too_far(found, {0: 0.1})] == [0] * is_far
    assert too_far(found, {}) == []


def test_one_engine_of_many_is_named_and_a_broken_one_first() -> None:
    found = {Group(number, 1): Distance(0.01 * 1000, 1000) for number in range(50)}
    found[Group(7, 1)] = Distance(0.3 * 1000, 1000)
    found[Group(9, 1)] = Distance(math.inf, 1000)
    found[Group(None, 1)] = Distance(500.0, 1000)  # of nobody in particular
    far = too_far(found, {1: STALE_FLOOR})
    assert [one.engine for one in far] == [9, 7, None]
    del found[Group(9, 1)], found[Group(None, 1)]
    assert [one.engine for one in too_far(found, {1: STALE_FLOOR})] == [7], "the mean of all hides it"


class Run:
    """Steps whose engine is as far from the trainer as said; every response has 100 tokens."""

    def __init__(self, mode: str = "pinned", metrics: dict[str, float] | None = None, first_step: int = 0) -> None:
        self.config = RunConfig()
        self.config.model.dtype = "float32"
        self.config.rollout.mode = mode  # type: ignore[assignment]
        self.said: list[str] = []
        self.watch = GateWatch(self.config, True, self.said.append, first_step, metrics)

    def check(
        self,
        step: int,
        samples: Sequence[Sample],
        by: Sequence[float],
        later: Sequence[tuple[Sequence[Sample], Sequence[float]]] = (),
    ) -> dict[str, float]:
        gates = self.watch.of_step(step, step, 0.0)

        def made(of: Sequence[Sample], far: Sequence[float]) -> Microbatch:
            engine_T = torch.cat([torch.full((100,), value) for value in far] + [torch.zeros(1)])
            return microbatch(of, rollout_logprobs=engine_T, old_logprobs=torch.zeros_like(engine_T))

        actor: Any = SimpleNamespace(
            token_stats=lambda batches: [TokenStats(torch.zeros(b.num_tokens), torch.zeros(1)) for b in batches]
        )
        for of, far in later:
            gates.expect([made(of, far)], of)
        (batch,) = gates.recompute(actor, [made(samples, by)])
        gates.watched(lambda stats, _: (stats.logprobs.sum(), {}))(
            TokenStats(torch.zeros(batch.num_tokens), torch.zeros(1)), batch
        )  # type: ignore[arg-type,return-value]
        return gates.check(1.0, 1.0, samples, lambda: None)


def of(engine: int | None, version: int, number: int = 0) -> Sample:
    return sample(engine, [(0, version)], 100, number)


def test_what_cannot_be_compared_exactly_is_said_once_and_counted() -> None:
    run = Run()
    assert run.check(0, [of(0, 0)], [1e-6])["gates/engine_tokens"] == 100
    num_said = len(run.said)
    for step in (1, 2):
        metrics = run.check(step, [of(0, step - 1)], [0.01])
        assert metrics == {"gates/engine_tokens": 0, "rollout/logprob_diff_of_staleness/1": pytest.approx(0.01)}
    assert run.said[num_said:] == [
        "the engine gate compares no token of step 2 exactly: the weights of all its tokens are 1 to 1 steps older; "
        "they are measured by what tokens as old showed in the steps before"
    ]


@pytest.mark.parametrize("is_resumed", [False, True])
@pytest.mark.parametrize("engine", [None, 3])
def test_an_engine_that_shifts_is_found_among_older_tokens(engine: int | None, is_resumed: bool) -> None:
    run = Run()
    run.check(0, [of(engine, 0)], [1e-6])
    metrics = dict[str, float]()
    for step in (1, 2):
        metrics = run.check(step, [of(engine, step - 1)], [0.01])
    if is_resumed:
        run = Run(metrics=metrics, first_step=3)
    who = "rollout engine 3" if engine == 3 else "all rollout engines together"
    with pytest.raises(GateFailure, match=rf"engine: mean \|trainer - engine\| of the 100 tokens of {who} is 0.31, "):
        run.check(3, [of(engine, 2)], [0.31])
    run.config.trainer.gates.disabled = ["engine"]
    run.check(3, [of(engine, 2)], [0.31])


def test_a_checkpoint_without_distances_by_staleness_begins_with_those_of_its_step() -> None:
    known = {"rollout/logprob_diff_mean": 0.01, "rollout/staleness_max": 2.0, "rollout/staleness_mean": 2.0}
    with pytest.raises(GateFailure, match="rollout engine 0"):
        Run(metrics=known, first_step=5).check(5, [of(0, 3)], [0.31])
    mixed = known | {"rollout/staleness_mean": 0.5}
    Run(metrics=mixed, first_step=5).check(5, [of(0, 3)], [0.31])  # what tokens of one age showed is not known


def test_one_wrong_engine_of_several_is_named_in_a_synchronous_run() -> None:
    """In bfloat16 the mean over all tokens hides it."""
    run = Run("synchronous")
    run.config.model.dtype = "bfloat16"
    samples = [of(number, 0, number) for number in range(8)]
    run.check(0, samples, [0.005] * 8)
    with pytest.raises(
        GateFailure, match="of the 100 tokens of rollout engine 6 is 0.3, and 0.07 is allowed"
    ) as raised:
        run.check(0, samples, [0.005] * 6 + [0.3, 0.005])
    assert "engine 5" not in str(raised.value) and str(raised.value).count("to go on regardless") == 1


@pytest.mark.parametrize("old", ["decoupled", "rollout"])
def test_the_first_update_waits_for_the_engines_of_all_minibatches(old: str) -> None:
    run = Run("synchronous")
    run.config.aqn.enabled, run.config.aqn.old_logprobs = old == "rollout", old  # type: ignore[assignment]
    later = [([of(1, 0, 1)], [0.3])]
    if old == "rollout":  # pi_old is the engine's own
        assert run.check(0, [of(0, 0)], [1e-6], later)["gates/engine_tokens"] == 100
        return
    with pytest.raises(GateFailure, match="of the 100 tokens of rollout engine 1 is 0.3, "):
        run.check(0, [of(0, 0)], [1e-6], later)
    assert Run().check(0, [of(0, 0)], [1e-6], [([of(1, 0, 1)], [1e-6])])["gates/engine_tokens"] == 200
