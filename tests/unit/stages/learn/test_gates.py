"""The gates of a step: what they measure, when they stop a run, and what they say."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mega_rl.config import RunConfig
from mega_rl.errors import GateFailure
from mega_rl.microbatch import Microbatch, TokenStats
from mega_rl.stages.learn import gates
from mega_rl.stages.learn.engine_distance import EngineHistory
from mega_rl.stages.learn.gate_watch import GateWatch
from mega_rl.stages.learn.logprob_difference import LogprobDifference, difference, merged
from mega_rl.types import Prompt, Sample, Score, Trajectory

LOGPROBS = torch.tensor(
    [-9.0, -1.0, -2.0, -3.0, -4.0, -5.0]
)  # one sequence of 4 positions, one of 2; 1, 2 and 2 learnt


def microbatch(**fields: Tensor) -> Microbatch:
    zeros = torch.zeros(6, dtype=torch.int64)
    return Microbatch(
        token_ids=zeros,
        target_ids=torch.tensor([0, 0, 8, 9, 7, 0]),  # of the samples below
        position_ids=zeros,
        loss_mask=torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0, 0.0]),
        cu_seqlens=torch.tensor([0, 4, 6], dtype=torch.int32),
        max_seqlen=4,
        sequence_indices=(1, 0),
        **fields,
    )


def moved(place: int, by: float) -> Tensor:
    return torch.where(torch.arange(6) == place, LOGPROBS + by, LOGPROBS)


def sample(prompt_index: int, sample_index: int, token_ids: tuple[int, ...]) -> Sample:
    prompt = Prompt(prompt_index, (1,), "", "", "s")
    logprobs = (-0.5,) * len(token_ids)
    trajectory = Trajectory.single_turn(prompt, sample_index, token_ids, logprobs, "", "stop", 0)
    return Sample(trajectory.summary(), Score(1.0), 0.0)


SAMPLES = [sample(40, 0, (7,)), sample(50, 3, (8, 9))]  # of the sequences 0 and 1


def test_the_worst_token_is_found_in_its_sequence() -> None:
    found = difference(LOGPROBS, moved(3, -0.5), microbatch())
    assert found == LogprobDifference(0.5, 0.5, 3, sequence=1, position=1, token=9, values=(-3.0, -3.5))
    assert difference(LOGPROBS, moved(4, 0.25), microbatch()) == LogprobDifference(
        0.25, 0.25, 3, 0, 0, 7, (-4.0, -3.75)
    )
    assert difference(LOGPROBS, moved(1, 9.0), microbatch()) == LogprobDifference(0.0, 0.0, 3, 1, 0, 8, (-2.0, -2.0))
    broken = difference(LOGPROBS, moved(3, float("nan")), microbatch())
    assert broken is not None and broken.largest == float("inf") and broken.position == 1
    assert difference(LOGPROBS, LOGPROBS, microbatch().replace(loss_mask=torch.zeros(6))) is None
    both = merged([found, None, difference(LOGPROBS, moved(4, 0.75), microbatch())])
    assert both is not None and (both.largest, both.total, both.num_tokens, both.sequence) == (0.75, 1.25, 6, 0)


class Run:
    """Steps of a run with a stand-in for the actor."""

    def __init__(self) -> None:
        self.config = RunConfig()
        self.config.model.dtype = "float32"
        self.said: list[str] = []
        self.recomputed = self.reference = self.engine = self.updated = LOGPROBS
        self.ratio_mean = self.ratio_max = 1.0
        self.sigma = 0.0
        self.num_recomputed = 0
        self.watch: GateWatch | None = None  # of a run that goes on; None: every check is of a run of its own

    def check(self, step: int = 0, version: int = 0) -> dict[str, float]:
        def token_stats(batches: list[Microbatch]) -> list[TokenStats]:
            self.num_recomputed += 1
            return [TokenStats(self.recomputed, LOGPROBS)]

        actor: Any = SimpleNamespace(token_stats=token_stats)
        watch = self.watch or GateWatch(self.config, is_counted=True, say=self.said.append)
        found = watch.of_step(step, version, self.sigma)
        given = [microbatch(reference_logprobs=self.reference, rollout_logprobs=self.engine)]
        (ready,) = found.recompute(actor, given)
        assert ready.old_logprobs is None or ready.old_logprobs is self.recomputed
        loss = found.watched(lambda stats, batch: (stats.logprobs.sum(), {"kl": torch.ones([])}))
        assert loss(TokenStats(self.updated, LOGPROBS), ready)[1] == {"kl": torch.ones([])}
        return found.check(self.ratio_mean, self.ratio_max, SAMPLES, lambda: "decoder.norm.weight")


@pytest.fixture
def first_step() -> Run:
    return Run()


def test_a_good_first_step_passes_and_is_logged(first_step: Run) -> None:
    first_step.engine = LOGPROBS + 1e-5
    metrics = first_step.check()
    found = {"gate/reference": 0, "gate/ppo_kl": 0, "gate/ratio": 0, "gate/engine": pytest.approx(1e-5, 0.1)}
    assert metrics == {**found, "gates/engine_tokens": 3}
    (line,) = first_step.said
    assert line.startswith("first step agrees: reference 0, ") and "not checked" not in line


FAILURES = [
    (
        "reference",
        {"reference": moved(3, 1e-6)},
        ["prompt 50, sample 3, response token 1 (id 9)", "decoder.norm.weight"],
    ),
    ("ppo_kl", {"updated": moved(4, 1e-6)}, ["prompt 40, sample 0, response token 0 (id 7)", "memory.recompute"]),
    ("ratio", {"ratio_max": 1.0 + 1e-6}, ["distance of the ratio from 1 is 1e-06"]),
    ("ratio", {"ratio_mean": 1.0 - 1e-6}, ["distance of the ratio from 1 is 1e-06"]),
    ("ratio", {"ratio_mean": float("nan")}, ["is nan"]),
    ("engine", {"engine": moved(2, 0.3)}, ["is 0.1,", "response token 0 (id 8): trainer -2, engine -1.7"]),
    ("engine", {"engine": moved(2, float("nan"))}, ["is inf"]),
]


@pytest.mark.parametrize(("name", "changes", "parts"), FAILURES)
def test_each_failure_stops_the_run_unless_it_is_disabled(
    first_step: Run, name: str, changes: dict[str, Any], parts: list[str]
) -> None:
    for field, value in changes.items():
        setattr(first_step, field, value)
    with pytest.raises(GateFailure) as raised:
        first_step.check()
    text = str(raised.value)
    assert f"\n  {name}: " in text and f"trainer.gates.disabled=[{name}]" in text
    assert [part for part in parts if part not in text] == [], text
    assert text.count("to go on regardless") == 1, "only what is wrong is reported"
    first_step.config.trainer.gates.disabled = [name]
    metrics = first_step.check()
    assert metrics[f"gate/{name}"] != 0  # still measured
    assert f"{name} disabled" in first_step.said[-1]


def test_tolerances_go_by_type_and_can_be_set(first_step: Run) -> None:
    first_step.engine = LOGPROBS + 0.02
    first_step.reference = LOGPROBS + 0.02
    with pytest.raises(GateFailure) as raised:
        first_step.check()
    assert "gates.reference allows 0\n" in str(raised.value) and "gates.engine allows 0.0001\n" in str(raised.value)
    first_step.config.rollout.dtype = "bfloat16"
    first_step.config.trainer.gates.reference = 0.1
    first_step.check()
    first_step.config.trainer.gates.engine = 0.01
    with pytest.raises(GateFailure, match="engine"):
        first_step.check()


def test_what_a_run_cannot_compare_is_said(first_step: Run) -> None:
    first_step.sigma, first_step.engine = 0.1, LOGPROBS + 1.0
    assert "gate/engine" not in first_step.check()
    assert "engine not checked (it samples with noise)" in first_step.said[-1]
    first_step.sigma, first_step.engine = 0.0, LOGPROBS
    first_step.config.algorithm.kl_coefficient = 0.0
    first_step.config.aqn.enabled, first_step.config.aqn.old_logprobs = True, "rollout"
    first_step.ratio_max = 1.01
    assert first_step.check().keys() == {"gate/ppo_kl", "gate/engine", "gates/engine_tokens"}


@pytest.mark.parametrize(
    ("verify", "update", "part"),
    [
        ("off", "auto", "run again with bridge.verify=all"),
        ("off", "reload", "run again with rollout.weight_update=live bridge.verify=all"),
        ("all", "live", "found every weight of the engine equal"),
    ],
)
def test_the_report_says_how_to_find_the_tensor(first_step: Run, verify: str, update: str, part: str) -> None:
    first_step.config.bridge.verify, first_step.config.rollout.weight_update = verify, update
    first_step.engine = LOGPROBS + 1.0
    with pytest.raises(GateFailure, match=part):
        first_step.check()


def run_on(first_step: Run, num_steps: int, distance: float = 1e-6, sigma: float = 0.0) -> None:
    """Steps in which the engine is as far from the trainer as said."""
    first_step.watch = first_step.watch or GateWatch(first_step.config, True, first_step.said.append)
    first_step.engine, first_step.sigma = LOGPROBS + distance, sigma
    for step in range(num_steps):
        metrics = first_step.check(step)
        assert (metrics.keys() == {"gates/engine_tokens"}) == (step > 0)


RAW = LOGPROBS + torch.tensor([0.0, 0.0, 0.4, -0.3, 0.35, 0.0])  # as if the temperature had been forgotten


@pytest.mark.parametrize(("sigma", "distance"), [(0.0, 1e-6), (0.01, 0.02)], ids=["clean", "noisy"])
def test_an_engine_that_changes_after_some_steps_stops_the_run(first_step: Run, sigma: float, distance: float) -> None:
    run_on(first_step, 5, distance, sigma)
    first_step.num_recomputed, num_said = 0, len(first_step.said)
    first_step.check(5)
    first_step.engine = RAW
    with pytest.raises(GateFailure) as raised:
        first_step.check(6)
    text = str(raised.value)
    assert text.startswith("step 7 is not what it must be\n  engine: mean |trainer - engine| per token is 0.35, ")
    assert "prompt 50, sample 3, response token 0 (id 8): trainer -2, engine -1.6" in text
    assert ("4 times what the last steps showed (trainer.gates.engine_factor)" in text) == (sigma > 0)
    assert first_step.num_recomputed == 0 and len(first_step.said) == num_said, "a running check costs no forward pass"
    first_step.config.trainer.gates.disabled = ["engine"]
    assert first_step.check(6) == {"gates/engine_tokens": 3}


def test_samples_of_older_weights_are_not_compared(first_step: Run) -> None:
    run_on(first_step, 1)
    first_step.engine = RAW
    metrics = first_step.check(1, version=1)
    assert metrics.pop("gates/engine_tokens") == 0, "all samples come from version 0"
    assert metrics == {"rollout/logprob_diff_of_staleness/1": pytest.approx(0.35)}
    with pytest.raises(GateFailure, match="engine"):
        first_step.check(1, version=0)
    of_sequence_0 = torch.arange(6) >= 4
    assert difference(LOGPROBS, RAW, microbatch(), of_sequence_0) == LogprobDifference(
        pytest.approx(0.35), pytest.approx(0.35), 1, 0, 0, 7, (-4.0, pytest.approx(-3.65))
    )


def test_the_distance_of_an_engine_is_taken_in_proportion_to_the_noise() -> None:
    history = EngineHistory(4.0)
    assert history.allows(0.0) is None
    history.add(float("nan"), 0.0)
    history.add(1e-6, 0.0)
    assert history.allows(0.0) == 4e-6 and history.allows(0.1) is None, (
        "a step without noise says nothing about one with"
    )
    history.add(0.1, 0.1)
    assert history.allows(0.1) == pytest.approx(0.4) and history.allows(0.05) == pytest.approx(0.2)
    assert EngineHistory(4.0).allows(0.1) is None
    for _ in range(100):
        history.add(0.02, 0.02)
    assert history.allows(0.02) == pytest.approx(0.08), "old steps are forgotten"
    assert history.allows(1e-6) == 0.02, "a step that was let pass is never too far"


@pytest.mark.parametrize("staleness", [0.0, 2.0])
def test_a_resumed_run_does_not_measure_by_tokens_of_older_weights(first_step: Run, staleness: float) -> None:
    known = {"rollout/logprob_diff_mean": 0.02, "aqn/sigma": 0.0, "rollout/staleness_max": staleness}
    first_step.watch = GateWatch(first_step.config, True, first_step.said.append, first_step=3, metrics=known)
    first_step.engine = LOGPROBS + 0.05
    with pytest.raises(GateFailure, match="engine") if staleness else nullcontext():
        first_step.check(3)


def test_a_resumed_run_checks_what_it_can(first_step: Run) -> None:
    known = {"rollout/logprob_diff_mean": 0.02, "aqn/sigma": 0.0}
    for metrics, passes in ((known, True), ({}, False)):
        first_step.watch = GateWatch(first_step.config, True, first_step.said.append, first_step=3, metrics=metrics)
        first_step.engine, first_step.reference = LOGPROBS + 0.05, LOGPROBS + 1.0
        if passes:
            assert first_step.check(3) == {"gates/engine_tokens": 3}
            assert first_step.said[-1].startswith("first step after the resume, step 4, agrees: ppo_kl 0, ")
            assert "reference" not in first_step.said[-1]
            continue
        with pytest.raises(GateFailure, match="the first step after the resume, step 4, is not what"):
            first_step.check(3)
    first_step.watch = GateWatch(first_step.config, True, first_step.said.append, first_step=3, metrics=known)
    first_step.updated = moved(3, 1e-6)
    with pytest.raises(GateFailure, match="ppo_kl"):
        first_step.check(3)


def test_tolerances_follow_whether_the_platform_repeats_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig()
    exact = {"reference": 0.0, "ppo_kl": 0.0, "ratio": 0.0}
    config.model.dtype = "bfloat16"
    assert gates.tolerances(config) == {**exact, "engine": 5e-2}
    monkeypatch.setattr(gates.platform, "current", lambda: SimpleNamespace(repeats_itself=False))
    assert gates.tolerances(config) == {**dict.fromkeys(exact, 0.5), "engine": 5e-2}
    config.platform.deterministic = True
    assert gates.tolerances(config) == {**exact, "engine": 5e-2}
    config.platform.deterministic, config.trainer.gates.ratio = False, 0.25
    assert gates.tolerances(config)["ratio"] == 0.25


def test_every_gate_has_a_key() -> None:
    fields = {f.name for f in dataclasses.fields(RunConfig().trainer.gates)}
    assert fields - {"disabled", "engine_factor"} == set(gates.tolerances(RunConfig())) == set(gates.GATES)
