"""The executor of real engines without engines: a Ray whose actors answer one call whenever somebody waits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from mega_rl import platform
from mega_rl.config.schema.sampling import RolloutConfig
from mega_rl.errors import InputError
from mega_rl.fleet import events
from mega_rl.fleet.engines import EngineLimits
from mega_rl.fleet.executor import PlacesError
from mega_rl.fleet.scheduler import FleetScheduler
from mega_rl.fleet.step_window import STATE_VERSION
from mega_rl.fleet.tickets import Key, Rules
from mega_rl.models.shape import ModelShape
from mega_rl.rollout.engine import Request
from mega_rl.rollout.remote.engine_process import LoadResult, WorkerPlace
from mega_rl.rollout.remote.fleet import places, ray_executor as under_test
from mega_rl.rollout.remote.fleet.nodes import Arrival
from mega_rl.rollout.remote.weight_store import Location, StoredVersion, WantedVersion
from mega_rl.types import Prompt
from tests.pretended.remote.fake_ray import (
    NUM_SLOTS,
    OWN,
    PROOFS,
    PULSE_FILE,
    Answer,
    FakeRay,
    LaterError,
    TaskFailed,
    Worker,
    executor_on,
)

RULES = Rules(num_groups=4, group_size=2, total_steps=3)
LIMITS = EngineLimits(progress_s=20.0, start_s=100.0, restarts=1)


def requests(key: Key, samples: Sequence[int]) -> list[Request]:
    prompt = Prompt(key.ticket, (5, 6), "", "", "test")
    return [Request(prompt, sample, seed=10 * key.ticket + sample, max_tokens=8) for sample in samples]


def fleet_of(num_engines: int, size: int = 1, is_pinned: bool = True) -> RolloutConfig:
    mode: Literal["pinned", "in_flight"] = "pinned" if is_pinned else "in_flight"
    return RolloutConfig(mode=mode, placement="separate", num_engines=num_engines, tensor_parallel_size=size)


class Run:
    """A scheduler and the executor of two engines."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        size: int = 1,
        picture_set: Any = None,
        rules: Rules = RULES,
        worker: Callable[[int, int], Worker] = Worker,
        shape: ModelShape | None = None,
        trained: int = 0,
    ) -> None:
        """``trained``: steps that a trainer before has made."""
        platform.select("cpu")
        self.ray, self.told, self.batches = FakeRay(worker, shape), [], []
        self.on_issue: Callable[[events.Issue, list[Worker]], None] = lambda decision, workers: None
        self.stored = {trained: StoredVersion(trained, 2, PROOFS)}
        rollout = fleet_of(2, size, is_pinned=rules.is_pinned)
        self.executor = executor_on(monkeypatch, self.ray, rollout, requests, self.stored, picture_set)
        state: dict[str, Any] = {"format": STATE_VERSION, "trained": trained, "steps": {}}
        self.scheduler = FleetScheduler(rules, LIMITS, range(2), state if trained else None)

    def go(self) -> events.Finish:
        todo = list(self.scheduler.begin(self.ray.now))
        while True:
            following: list[events.Decision] = []
            said: list[events.Event] = []
            for decision in todo:
                if isinstance(decision, events.Finish):
                    self.executor.close()
                    return decision
                self.do(decision, said)
            for event in [*said, *self.executor.events(1.0), events.Ticked()]:
                following += self.scheduler.handle(event, self.ray.now)
            todo = following

    def do(self, decision: events.Decision, said: list[events.Event]) -> None:
        self.told.append(decision)
        if isinstance(decision, events.ScoreGroup):
            said.append(events.Scored(decision.key, is_kept=True))
        elif isinstance(decision, events.Deliver):
            self.batches.append([[(r.sampled_ids.tolist(), r.spans) for r in group] for _, group in decision.groups])
            self.stored[decision.step + 1] = StoredVersion(decision.step + 1, 2, PROOFS)
            said.append(events.Published(decision.step + 1))
        elif isinstance(decision, events.Start | events.Kill | events.Load | events.Issue):
            if isinstance(decision, events.Issue):
                self.on_issue(decision, self.executor._lives[decision.engine].workers)
            self.executor.carry(decision)

    def whys(self) -> list[str]:
        """Why engines were ended before the run was."""
        return [d.why for d in self.told if isinstance(d, events.Kill)]

    def readers(self) -> list[Worker]:
        """The workers that have loaded weights by themselves."""
        return [worker for worker in self.ray.workers if worker.has_read]


def undisturbed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    run = Run(monkeypatch)
    assert not run.go().is_failure and not run.whys()[:-2], run.whys()
    assert [batch[0][0][0][0] for batch in run.batches] == [1, 2, 3], "each step has weights of its own"
    assert run.readers() == run.ray.workers[:1] and len(run.ray.workers) == 2, "the first of a kind loads, no other"
    return run.batches


def test_pictures_go_beside_the_requests_of_a_ticket(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []

    def on_issue(decision: events.Issue, workers: list[Worker]) -> None:
        shown.append(workers[0].shown)

    picture_set = SimpleNamespace(
        encoded=lambda prompts: {f"of {prompt.index}": b"" for prompt in prompts if prompt.index}
    )
    run = Run(monkeypatch, picture_set=picture_set)
    run.on_issue = on_issue
    assert not run.go().is_failure and shown
    for prompts, pictures in (one for worker in shown for one in worker):
        wanted = {f"of {index}": b"" for index in prompts if index}
        assert pictures == ((("put", wanted),) if wanted else ())


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("strike", ["gone", "stopped"])
def test_an_engine_that_dies_or_stops_with_work_costs_no_token(
    monkeypatch: pytest.MonkeyPatch, strike: str, size: int
) -> None:
    expected, run, struck = undisturbed(monkeypatch), Run(monkeypatch, size), []

    def on_issue(decision: events.Issue, workers: list[Worker]) -> None:
        if decision.key.step == 1 and not struck:
            struck.append(workers)
            workers[-1].state = strike  # one process of it is enough

    run.on_issue = on_issue
    assert not run.go().is_failure and run.batches == expected
    (why, *_) = run.whys()
    assert ("was gone while" if strike == "gone" else "20 s were not enough for it to go on with") in why
    assert all(worker.state == "gone" for worker in struck[0]), "the others of its processes too"
    issues = [d for d in run.told if isinstance(d, events.Issue) and d.key.step == 1]
    assert len(issues) > RULES.num_groups, "its work was given out again"


def test_without_restarts_left_the_run_ends_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)

    def on_issue(decision: events.Issue, workers: list[Worker]) -> None:
        if decision.key.step == 1:
            workers[0].state = "gone"

    run.on_issue = on_issue
    end = run.go()
    assert end.is_failure and end.sentence.startswith("no rollout engine is left (engine ") and len(run.batches) == 1
    assert len([d for d in run.told if isinstance(d, events.Start)]) == 4, "each was started again once"


def test_weights_that_cannot_be_proved_are_the_end_of_a_life(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, run = undisturbed(monkeypatch), Run(monkeypatch)
    spawn = run.ray.spawn

    def broken_once(*arguments: Any) -> list[Worker]:
        workers = spawn(*arguments)
        if len(run.ray.workers) == 1:
            workers[0].failures["load"] = RuntimeError("the engine holds another model.norm.weight")
        return workers

    monkeypatch.setattr(places, "spawn", broken_once)
    assert not run.go().is_failure and run.batches == expected
    assert run.whys()[0] == "it failed while loading weights: the engine holds another model.norm.weight"
    issued = {(d.engine, d.life) for d in run.told if isinstance(d, events.Issue)}
    assert (0, 0) not in issued, "it never served"


def test_a_place_that_cannot_be_had_is_the_end_of_a_life(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, run, failed = undisturbed(monkeypatch), Run(monkeypatch), list[LaterError]()
    spawn = run.ray.spawn

    def late_once(*arguments: Any) -> list[Worker]:
        if not failed:
            failed.append(LaterError("timed out"))
            raise failed[0]
        return spawn(*arguments)

    monkeypatch.setattr(places, "spawn", late_once)
    assert not run.go().is_failure and run.batches == expected
    assert run.whys()[0].startswith("it has no place: Ray failed with LaterError: timed out")


def test_a_short_outage_of_ray_costs_an_engine_one_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, run = undisturbed(monkeypatch), Run(monkeypatch)
    spawn = run.ray.spawn

    def late(*arguments: Any) -> list[Worker]:
        if run.ray.now < under_test.RETRY_S - 5:
            raise LaterError("timed out")
        return spawn(*arguments)

    monkeypatch.setattr(places, "spawn", late)
    assert not run.go().is_failure and run.batches == expected
    deaths = [(d.engine, d.life) for d in run.told if isinstance(d, events.Kill) and "no place" in d.why]
    assert deaths == [(0, 0), (1, 0)]


def test_a_life_without_a_place_that_has_ended_otherwise_dies_no_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)

    def fail(*arguments: Any) -> list[Worker]:
        raise LaterError("timed out")

    monkeypatch.setattr(places, "spawn", fail)
    run.executor.carry(events.Start(0, 0))
    run.executor.carry(events.Start(1, 0))
    assert run.executor.events(under_test.RETRY_S - 1) == []
    run.executor.carry(events.Kill(0, 0, "it was told to end"))
    run.executor.events(1.0)
    (died,) = run.executor.events(1.0)
    assert isinstance(died, events.Died) and (died.engine, died.life) == (1, 0)
    assert run.executor.events(2 * under_test.RETRY_S) == []


def test_what_the_user_must_change_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    spawn = run.ray.spawn

    def refusing(*arguments: Any) -> list[Worker]:
        workers = spawn(*arguments)
        workers[0].failures["start"] = InputError("vLLM does not accept the rollout settings")
        return workers

    monkeypatch.setattr(places, "spawn", refusing)
    with pytest.raises(InputError, match="vLLM does not accept"):
        run.go()


def test_a_node_without_memory_for_the_weights_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    refused = TaskFailed(InputError("on host b, which has rollout engines, the weight store takes 9 GB"))
    run.executor._nodes.met = Answer(error=refused, is_there=True)  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="on host b, which has rollout engines"):
        run.go()


def test_weights_on_their_way_to_a_node_hold_no_call_to_its_engines_up(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, run, late = undisturbed(monkeypatch), Run(monkeypatch), list[events.Load]()

    def location(load: events.Load, node: str, stored: StoredVersion) -> Location | None:
        if load.version == 1 and not late:
            late.append(load)
            run.ray.arriving.append((run.ray.now + 2 * LIMITS.progress_s, Arrival(load, OWN)))
            return None
        return OWN

    monkeypatch.setattr(run.executor._nodes, "location", location)
    assert not run.go().is_failure and run.batches == expected and late and not run.whys()[:-2], run.whys()


@pytest.mark.parametrize("comes_late", [True, False])
def test_weights_that_newer_ones_have_replaced_cost_no_restart(
    monkeypatch: pytest.MonkeyPatch, comes_late: bool
) -> None:
    """The first load of step 1's weights finds them gone; the scheduler asks again for what it needs."""
    expected, run, gone = undisturbed(monkeypatch), Run(monkeypatch), list[StoredVersion]()

    def location(load: events.Load, node: str, stored: StoredVersion) -> Location | None:
        if load.version == 1 and not gone:
            gone.append(run.stored.pop(1))
            run.ray.arriving.append((run.ray.now + 5, Arrival(load, OWN)))
            return None if comes_late else OWN
        return OWN

    if not comes_late:
        monkeypatch.setattr(run.executor._nodes, "heard", list)

    monkeypatch.setattr(run.executor._nodes, "location", location)
    handle = run.scheduler.handle

    def back_again(event: events.Event, now: float) -> list[events.Decision]:
        if isinstance(event, events.Missed):  # in a run the next load is of another version
            run.stored[1] = gone[0]
        return handle(event, now)

    monkeypatch.setattr(run.scheduler, "handle", back_again)
    assert not run.go().is_failure and run.batches == expected and gone and not run.whys()[:-2], run.whys()


@pytest.mark.parametrize("worst", [LoadResult.TORN, LoadResult.MISSED])
def test_weights_replaced_while_an_engine_reads_them_cost_no_restart_and_no_step(
    monkeypatch: pytest.MonkeyPatch, worst: LoadResult
) -> None:
    """One of an engine's workers was too late; with torn weights it is not told to sample on until it has others."""
    expected, run, late = undisturbed(monkeypatch), Run(monkeypatch, size=2), list[Worker]()
    load = Worker.do_load

    def do_load(worker: Worker, location: Any, wanted: WantedVersion) -> LoadResult:
        if wanted.version == 1 and worker.rank == 1 and not late:
            late.append(worker)
            return worst
        return load(worker, location, wanted)

    missed = run.executor._missed

    def checked(decision: events.Load, is_torn: bool = False) -> list[events.Event]:
        life = run.executor._lives[decision.engine]
        assert life.is_torn is is_torn is (worst is LoadResult.TORN)
        life.load, before = 1, len(life.workers[0].calls)
        run.executor._ask(decision.engine, life)
        asked = [name for name, _, _ in list(life.workers[0].calls)[before:]]
        life.load = 0
        assert ("proceed" in asked) is not is_torn
        return missed(decision, is_torn)

    monkeypatch.setattr(Worker, "do_load", do_load)
    monkeypatch.setattr(run.executor, "_missed", checked)
    assert not run.go().is_failure and run.batches == expected and late and not run.whys()[:-2], run.whys()


def test_weights_that_do_not_come_to_a_node_cost_its_engines_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, run, failed = undisturbed(monkeypatch), Run(monkeypatch), list[events.Load]()

    def location(load: events.Load, node: str, stored: StoredVersion) -> Location | None:
        if load.life:
            return OWN
        failed.append(load)
        run.ray.arriving.append((run.ray.now + 5, Arrival(load, why="it failed: no route")))
        return None

    monkeypatch.setattr(run.executor._nodes, "location", location)
    assert not run.go().is_failure and run.batches == expected and len(failed) == 2
    assert [why for why in run.whys() if "no route" in why] == 2 * ["it failed: no route"]


def test_weights_that_keep_coming_are_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """For as long as three limits for a load; without a chunk it is ended after one."""
    for comes in (True, False):
        run, loads = Run(monkeypatch), list[events.Load]()
        run.scheduler.limits = replace(LIMITS, load_s=30.0)

        def location(
            load: events.Load, node: str, stored: StoredVersion, run: Run = run, loads: Any = loads, comes: bool = comes
        ) -> Location | None:
            if load.version != 1 or loads:
                return OWN
            loads.append(load)
            times = [run.ray.now + later for later in range(10, 100, 10)] if comes else []
            run.ray.arriving += [(at, Arrival(load)) for at in times]
            run.ray.arriving.append((run.ray.now + 100, Arrival(load, OWN)))
            return None

        monkeypatch.setattr(run.executor._nodes, "location", location)
        if comes:
            assert not run.go().is_failure and not run.whys()[:-2], run.whys()
        else:
            run.ray.arriving.clear()
            run.go()
            assert run.whys()[0] == "30 s were not enough for it to load version 1"


@pytest.mark.parametrize("state", ["runs", "gone", "stopped"])
def test_an_engine_that_is_attached_to_and_does_not_rest_is_started_anew(
    monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """It has answered in the thread of pulses, and its other one is stuck."""
    run = Run(monkeypatch)
    run.ray.workers.append(Worker(0, 0, state))
    survivors = {0: places.Survivor([run.ray.workers[0]], [WorkerPlace("own", 0, PULSE_FILE)])}
    monkeypatch.setattr(run.executor._places, "survivor", lambda engine: survivors.pop(engine, None))
    run.executor.carry(events.Start(0, 0))
    said: list[events.Event] = []
    while not said and run.ray.now < LIMITS.start_s:
        said += run.executor.events(1.0)
    assert said == [events.Started(0, 0, NUM_SLOTS)]
    assert run.executor.whereabouts()[0].processes == (0 if state == "runs" else 1,)
    assert len(run.ray.workers) == (1 if state == "runs" else 2)
    assert run.ray.workers[0].state == ("runs" if state == "runs" else "gone")
    run.executor.close()


def test_places_of_engines_that_join_are_asked_for_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, size=2)
    run.executor.reserve(2)
    ((group, _),) = run.ray.groups.items()
    assert group.startswith("2 x {'CPU': ") and not run.executor.has_room(2)
    needed = "an engine needs CPU: 2 on one node, and in the whole Ray cluster there is CPU: 1 free"
    assert run.executor.free() == needed
    run.ray.groups[group] = "CREATED"
    assert run.executor.has_room(2)
    run.executor.carry(events.Start(2, 0))
    for _ in range(5):
        run.executor.events(1.0)
    assert run.executor.whereabouts() == {2: ("10.0.0.7", (0, 1))}
    run.executor.carry(events.Kill(2, 0, "it is no longer wanted"))
    run.executor.carry(events.Release(2))
    assert not run.ray.groups and all(worker.state == "gone" for worker in run.ray.workers)


def test_a_ray_that_fails_is_said_of_places(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    run.executor.reserve(2)

    def fail(*arguments: Any, **named: Any) -> Any:
        raise LaterError("timed out")

    for name in ("placement_group", "placement_group_table", "remove_placement_group"):
        monkeypatch.setattr(run.ray.util, name, fail)
    for name in ("available_resources", "nodes"):
        monkeypatch.setattr(run.ray, name, fail)
    asks: list[Callable[[], object]] = [lambda: run.executor.reserve(3), lambda: run.executor.has_room(2)]
    for ask in [*asks, run.executor.free, run.executor.whereabouts]:
        with pytest.raises(PlacesError, match="Ray failed with LaterError: timed out: look at the cluster with"):
            ask()
    run.executor.carry(events.Release(2))  # an engine is out of use though its place is not given back


@pytest.mark.parametrize("is_alive", [True, False])
def test_late_weights_are_no_death_while_the_engine_answers(monkeypatch: pytest.MonkeyPatch, is_alive: bool) -> None:
    expected, run, held = undisturbed(monkeypatch), Run(monkeypatch), list[Worker]()
    go_on = Worker.go_on

    def late(worker: Worker) -> None:
        """The first load of step 1's weights takes as long as two limits."""
        if not any(name == "load" and arguments[1].version == 1 for name, arguments, _ in worker.calls[:1]):
            return go_on(worker)
        if not held:
            held.append(worker)
            run.ray.held_at = run.ray.now  # type: ignore[attr-defined]
        if worker is not held[0] or run.ray.now > run.ray.held_at + 2 * LIMITS.progress_s:  # type: ignore[attr-defined]
            return go_on(worker)
        if not is_alive:
            worker.beats -= 1  # which it has just had

    monkeypatch.setattr(Worker, "go_on", late)
    assert not run.go().is_failure and run.batches == expected and held
    whys = [why for why in run.whys() if "said nothing" in why]
    assert whys == ([] if is_alive else ["it was to load version 1, and has said nothing for 20 s"])


def functions_in(call: Callable[[], object]) -> list[str]:
    """The names of all functions that are called, every time."""
    called: list[str] = []
    sys.setprofile(lambda frame, what, _: called.append(frame.f_code.co_name) if what == "call" else None)
    call()
    sys.setprofile(None)
    return called


def test_looking_for_events_costs_no_more_with_more_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of functions while every engine has calls to answer and none has answered."""
    found = []
    for num_engines in (2, 50):
        with monkeypatch.context() as patch:
            platform.select("cpu")
            ray = FakeRay()
            executor = executor_on(patch, ray, fleet_of(num_engines), requests, {0: StoredVersion(0, 2, PROOFS)})
            for engine in range(num_engines):
                executor.carry(events.Start(engine, 0))
            while sum(isinstance(event, events.Started) for event in executor.events(1.0)) < num_engines:
                pass
            for engine in range(num_engines):
                executor.carry(events.Issue(engine, 0, Key(0, engine), (0, 1), engine, (None, None)))
            executor.events(0.0)
            assert all(len(worker.calls) == 1 + under_test.NUM_AHEAD for worker in ray.workers)
            found.append(functions_in(lambda executor=executor: executor.events(0.0)))  # type: ignore[misc]
            executor.close()
    assert found[0] == found[1] and "heard" in found[0]


def test_what_an_engine_said_before_it_was_killed_is_not_heard_after(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    run.executor.carry(events.Start(0, 0))
    run.executor.carry(events.Start(1, 0))
    while not all(worker.is_accepted for worker in run.ray.workers):
        assert run.executor.events(0.0) == []
        run.ray.pass_time(1.0)  # in the end both have started, and nobody has looked
    run.executor.carry(events.Kill(0, 0, "it is no longer wanted"))
    assert run.executor.events(0.0) == [events.Started(1, 0, NUM_SLOTS)]
    run.executor.close()
