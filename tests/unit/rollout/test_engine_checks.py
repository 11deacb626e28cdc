"""What an engine must show in each of its lives, and what it is asked for that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from mega_rl.errors import GateFailure, InputError
from mega_rl.rollout.engine_checks import NUM_PROMPTS, PATIENCE, CheckPlan, EngineChecks, FleetChecks, Held, Question
from tests.pretended.tokens import first_logprobs

Answers = Callable[[Question], Mapping[int, float]]


def of(weights: object) -> Answers:
    """Those of an engine that has an adapter beside its weights, or none."""
    return lambda question: first_logprobs(
        weights if question.with_adapter else "base", question.prompt_ids, question.temperature
    )


def raw(question: Question) -> Mapping[int, float]:
    return first_logprobs(0, question.prompt_ids, 1.0)


def plan(temperature: float = 0.7, dtype: str = "float32", said: list[str] | None = None) -> CheckPlan:
    return CheckPlan(50, temperature, dtype, (said if said is not None else []).append)


def load(checks: EngineChecks, held: Held, answers: Answers) -> int:
    """How many questions there were."""
    questions = checks.questions(held)
    checks.hear(held, {question: answers(question) for question in questions})
    return len(questions)


def test_a_life_is_probed_once_with_the_first_weights_whatever_they_are() -> None:
    checks = EngineChecks(3, plan())
    assert [load(checks, Held(version), of(version)) for version in (-2, 0, 1, 5)] == [2, 0, 0, 0]
    for first in (0, 500, -2):
        with pytest.raises(InputError, match=r"rollout engine 3 returns .* show 1\), so rollout\.temperature=0\.7 "):
            load(EngineChecks(3, plan()), Held(first), raw)


def test_what_changes_nothing_is_told_once_of_all_engines() -> None:
    said: list[str] = []
    of_run = plan(1.0, said=said)
    for engine in range(3):
        load(EngineChecks(engine, of_run), Held(0), raw)
        load(EngineChecks(engine, of_run), Held(0), lambda question: dict.fromkeys(range(5), -1.6))
    assert len(said) == 2 and said[0].startswith("warning: rollout engine 0 ") and "cannot be probed" in said[1]


def adapters(version: int, largest_b: float | None = None, **more: Any) -> Held:
    return Held(version, largest_b=version * 1e-3 if largest_b is None else largest_b, **more)


@pytest.mark.parametrize("first", [0, 500])
def test_adapters_must_reach_every_life(first: int) -> None:
    checks = EngineChecks(1, plan())
    assert load(checks, adapters(first), of("old")) == 2 + NUM_PROMPTS
    assert load(checks, Held(-3), of("validation")) == 0
    assert load(checks, adapters(first + 1, first * 1e-3), of("old")) == 0, "a skipped step changes nothing"
    sentence = rf"rollout engine 1 answers with weight version {first + 2} bit for bit as with version {first}, "
    with pytest.raises(GateFailure, match=sentence):
        load(checks, adapters(first + 2), of("old"))
    anew = EngineChecks(1, plan())
    load(anew, adapters(first), of("old"))
    assert load(anew, adapters(first + 3), of("new")) == NUM_PROMPTS
    assert load(anew, adapters(first + 4), of("new")) == 0, "it has shown it"


@pytest.mark.parametrize("first", [1, 500])
def test_an_adapter_that_is_left_out_is_seen_with_the_first_load(first: int) -> None:
    checks = EngineChecks(2, plan())
    held = adapters(first, is_beside=True)
    sentence = f"rollout engine 2 answers with weight version {first} bit for bit as without its adapter, "
    with pytest.raises(GateFailure, match=sentence):
        load(checks, held, of("base"))
    anew = EngineChecks(2, plan())
    assert load(anew, adapters(0, is_beside=True), of("base")) == 2 + NUM_PROMPTS, "it adds nothing yet"
    assert load(anew, held, of("new")) == 2 * NUM_PROMPTS
    assert load(anew, adapters(first + 1, is_beside=True), of("newer")) == 0, "it has shown it"
    patient = EngineChecks(0, plan(dtype="bfloat16"))
    for version in range(first, first + PATIENCE["bfloat16"] - 1):
        load(patient, adapters(version, is_beside=True, unchanged=1.0), of("base"))
    with pytest.raises(GateFailure, match="as without its adapter"):
        load(patient, adapters(9999, is_beside=True), of("base"))


def test_noise_and_what_rounding_took_away_say_nothing_of_adapters() -> None:
    checks = EngineChecks(0, plan())
    load(checks, Held(0), of(0))
    assert load(checks, adapters(1, sigma=0.1), of(0)) == 0
    assert load(checks, adapters(2), of(0)) == NUM_PROMPTS
    assert load(checks, adapters(3, unchanged=1.0), of(0)) == 0
    patient = EngineChecks(0, plan(dtype="bfloat16"))
    for version in range(PATIENCE["bfloat16"]):
        load(patient, adapters(version), of(0))
    with pytest.raises(GateFailure):
        load(patient, adapters(99), of(0))


def test_a_fleet_knows_what_the_trainer_has_pushed() -> None:
    fleet = FleetChecks(plan())
    fleet.tell(adapters(4))
    assert fleet.held(4).largest_b == 4e-3 and fleet.held(-6) == Held(-6)
    with pytest.raises(KeyError):
        fleet.held(5)
    lives: Sequence[EngineChecks] = [fleet.of_life(0), fleet.of_life(0)]
    assert [len(life.questions(fleet.held(4))) for life in lives] == [2 + NUM_PROMPTS] * 2
