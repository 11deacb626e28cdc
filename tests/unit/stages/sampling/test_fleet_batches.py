"""What a fleet's runs draw, and which checkpoints they go on from."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import FrozenInstanceError, fields, replace
from types import SimpleNamespace
from typing import Any

import pytest

from mega_rl.config.schema.sections import RunConfig
from mega_rl.data.stream import Stream, fingerprint
from mega_rl.errors import InputError
from mega_rl.evaluation.evaluate import EvaluationSettings, ValidationSet, requests_of
from mega_rl.fleet.engines import EngineLimits
from mega_rl.fleet.tickets import Key, held_out
from mega_rl.observe.timers import Timers
from mega_rl.parallel.layout import EngineLayout
from mega_rl.rollout.requests import sample_seed
from mega_rl.rollout.scheduling.scheduler_thread import Delivered
from mega_rl.stages.sampling.batch_builder import BusyTime
from mega_rl.stages.sampling.fleet_batches import Fleet, FleetBatches
from mega_rl.stages.sampling.ticket_requests import TicketScoring
from mega_rl.stages.weights.engine_probe import NoEngine
from mega_rl.types import Outcome, Prompt, Trajectory
from tests.pretended.owners import not_handed


class Prompts:
    fingerprint = fingerprint([b"prompts"])

    def __len__(self) -> int:
        return 9

    def __getitem__(self, position: int) -> Prompt:
        return Prompt(position, (1, position), str(position), "0", "digits")


@pytest.fixture(autouse=True)
def first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mega_rl.stages.sampling.fleet_batches.dist.get_rank", lambda: 0)


def batches(
    mode: str = "pinned", eta: int = 1, enabled: bool = True, validation: ValidationSet | None = None
) -> FleetBatches:
    config = RunConfig()
    config.rollout.mode, config.rollout.max_staleness, config.rollout.n = mode, eta, 3
    config.data.train_batch_size, config.data.max_response_length = 2, 8
    config.algorithm.dynamic_sampling.enabled = enabled
    fleet = Fleet(5, EngineLimits(), lambda _: pytest.fail("nothing is started"), NoEngine())
    stream = Stream(Prompts(), 2, True, 0)
    job: Any = SimpleNamespace(config=config, timers=Timers(), rendezvous=None, trajectory_store=None)
    return FleetBatches(job, stream, fleet, None, total_steps=10, validation=validation)  # type: ignore[arg-type]


def state(**changes: Any) -> dict[str, Any]:
    made = batches()
    rules = {
        "rollout.mode": "pinned", "rollout.max_staleness": 1, "rollout.n": 3, "data.train_batch_size": 2,
        "rollout.routing_replay": "off",
    }  # fmt: skip
    fleet = {"format": 1, "trained": 2, "steps": {"2": []}}
    return {"stream": made._stream.state_dict(), "carried": [], "rules": rules, "fleet": fleet} | changes


def test_requests_have_the_seeds_of_their_step_and_sample() -> None:
    requests = batches()._requests
    first, second = requests(Key(3, 1), (0, 2))
    prompt = Stream(Prompts(), 2, True, 0).batch_order.item(3, 1)
    assert first.prompt == second.prompt == prompt and (first.sample_index, second.sample_index) == (0, 2)
    assert second.seed == sample_seed(0, 3, prompt.index, 2)
    of_step = [requests(Key(3, ticket), (0,))[0].prompt.index for ticket in range(9)]
    assert sorted(of_step) == list(range(9))  # replacements too: no prompt twice in a step


def test_what_the_other_thread_asks_is_frozen_and_does_not_depend_on_the_loop() -> None:
    made = batches()
    keys = [Key(step, ticket) for step in range(6) for ticket in range(9)]
    before = [made._requests(key, (0, 1, 2)) for key in keys]
    made._stream.next_batch()
    made._stream.next_item()
    made.load_state_dict(state())
    assert [made._requests(key, (0, 1, 2)) for key in reversed(keys)] == before[::-1]
    for one in (made._requests, made._requests.batch_order, made._requests.rules, made._scoring):
        for field in fields(one):
            with pytest.raises(FrozenInstanceError):
                setattr(one, field.name, None)


def test_a_budget_is_never_larger_than_the_data_and_groups_are_cut_for_many_engines() -> None:
    rules = batches()._rules
    assert (rules.budget, rules.num_parts, rules.num_steps(0), rules.is_pinned) == (9, 3, 2, True)
    assert batches(enabled=False)._rules.budget is None and not batches("in_flight")._rules.is_pinned


def test_a_checkpoint_goes_on_with_the_rules_that_it_was_made_with() -> None:
    batches().load_state_dict(state())
    with pytest.raises(
        InputError, match=r"rollout.max_staleness=1, and this run has rollout.max_staleness=2.* as they"
    ):
        batches(eta=2).load_state_dict(state())
    with pytest.raises(InputError, match="written with rollout.mode=pinned"):
        batches("in_flight").load_state_dict(state())


def test_a_checkpoint_from_the_end_of_a_shorter_run_has_not_what_is_pinned_to_older_weights() -> None:
    last = {"format": 1, "trained": 4, "steps": {}}
    with pytest.raises(InputError, match="near the end of a run of fewer steps, and 1 steps were not begun"):
        batches().load_state_dict(state(fleet=last))
    batches().load_state_dict(state(fleet=last | {"trained": 10}))
    with pytest.raises(InputError, match="rollout.routing_replay=recompute"):
        batches().load_state_dict(state(rules=state()["rules"] | {"rollout.routing_replay": "recompute"}))


def test_a_batch_invariant_engine_is_part_of_what_a_checkpoint_was_made_with() -> None:
    rules = state()["rules"]
    assert batches()._named_rules()["rollout.batch_invariant"] is False
    batches().load_state_dict(state(rules=rules))  # of a version that had no such key
    with pytest.raises(InputError, match="batch_invariant=True, and this run has rollout.batch_invariant=False"):
        batches().load_state_dict(state(rules=rules | {"rollout.batch_invariant": True}))


def test_a_synchronous_checkpoint_has_nothing_in_the_air() -> None:
    synchronous = {"stream": state()["stream"], "carried": []}
    with pytest.raises(InputError, match="was written by a run with rollout.mode=synchronous"):
        batches().load_state_dict(synchronous)
    batches(eta=0).load_state_dict(synchronous)
    batches("in_flight").load_state_dict(synchronous)
    with pytest.raises(InputError, match="carried from step to step"):
        batches("in_flight").load_state_dict(synchronous | {"carried": [[]]})


def test_a_validation_asks_for_what_an_evaluation_asks_for() -> None:
    prompts = [Prompt(i, (1, i), str(i), "0", "digits") for i in range(3)]
    settings = EvaluationSettings(EngineLayout(1, 1), n=2, temperature=0.5, max_tokens=8, seed=3)
    found = batches(validation=ValidationSet(prompts, settings))._requests(Key(held_out(4), 1), (2, 0))
    assert found == requests_of(prompts[1], settings)[:2] and found[0].greedy and found[0].prompt is prompts[1]


def test_a_validation_is_scored_as_an_evaluation_in_its_own_time() -> None:
    config, scored, busy_time = RunConfig(), list[Any](), BusyTime()
    config.environment.unfinished = "leave_out"
    scorer: Any = SimpleNamespace(start=lambda trajectory: scored.append(trajectory) or Future())  # type: ignore[func-returns-value]
    scoring = TicketScoring(config, scorer, busy_time)
    prompt = Prompt(0, (1,), "", "0", "digits")
    whole = Trajectory.single_turn(prompt, 0, (2,), (-1.0,), "", "length", 0)
    cut = replace(whole, episode=Outcome("turns", 1, 1.0, None, {}))
    scoring.start(Key(held_out(0), 0), cut)
    assert scored == [cut] and busy_time._num_open == 0
    scoring.start(Key(0, 0), cut)
    assert busy_time._num_open == 1
    assert scored[1].episode.failure is not None, "a step may leave it out"


def test_a_checkpoint_that_waits_for_later_steps_finds_the_responses_of_its_own() -> None:
    """Owners forget the responses of a step when the next one is built, but not while a checkpoint needs them."""
    made, forgotten = batches(), list[int]()
    committed: list[Any] = [None, ({"steps": {}}, {})]
    thread: Any = SimpleNamespace(
        take=lambda step: Delivered({}, {}),
        published=lambda version: None,
        saved=lambda version: None,
        committed=lambda version, wait_s: committed.pop(0),
        record=SimpleNamespace(figures=dict),
    )
    store: Any = SimpleNamespace(drop=list, forget_handed=forgotten.append, whole=not_handed)
    made._thread, made._trajectory_store = thread, store
    made._rendezvous = SimpleNamespace(wait=lambda what: None)  # type: ignore[assignment]
    made.build(0)
    late = made.state_dict()
    made.build(1)
    made.build(2)
    assert late.get_late(0.0) is None
    made.build(3)
    assert (late.get_late(0.0) or {})["fleet"] == {"steps": {}}
    made.build(4)
    assert forgotten == [0, 1, 1, 1, 4]
