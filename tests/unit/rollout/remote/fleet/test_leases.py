"""Whom kept engines obey, which of them the next trainer takes over, and when they end: a Ray that answers at once.

``tests/distributed/rollout/remote/fleet/test_kept_engines.py`` has the same with a real one.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mega_rl.config.schema.learning import EnvironmentConfig
from mega_rl.config.schema.sampling import RolloutConfig
from mega_rl.config.schema.sections import RunConfig
from mega_rl.errors import InputError
from mega_rl.fleet.executor import PlacesError
from mega_rl.rollout.remote.engine_process import EngineSpec, WorkerPlace
from mega_rl.rollout.remote.fleet import lease_actor, leases
from mega_rl.rollout.remote.fleet.kept_engine import KeptEngine, digest
from mega_rl.rollout.remote.fleet.lease_actor import Fenced, LeaseActor
from mega_rl.rollout.remote.fleet.leases import EngineLease, Guarded, LeasedPlaces, keeping
from mega_rl.stages.run.episodes import plan_there

SPEC = EngineSpec("", RolloutConfig(placement="separate"), 64, "float32", "cpu", is_deterministic=False, num_threads=1)


class RayError(Exception): ...


class ActorError(RayError): ...


class TaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


@dataclass(eq=False)
class Answer:
    value: Any = None
    error: Exception | None = None


@dataclass(eq=False)
class Actor:
    """Carries a call out as soon as it is made. ``state``: runs, hangs or gone."""

    held: Any
    state: str = "runs"

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Answer:
            if self.state != "runs":
                return Answer(error=ActorError() if self.state == "gone" else TimeoutError())
            try:
                return Answer(getattr(self.held, name)(*arguments))
            except InputError as error:
                return Answer(error=TaskError(error))
            except SystemExit:
                self.state = "gone"
                return Answer(error=ActorError())

        return SimpleNamespace(remote=remote, options=lambda **_: SimpleNamespace(remote=remote))


@dataclass(eq=False)
class Group:
    is_removed: bool = False
    has_room: bool = True

    def wait(self, timeout: float) -> bool:
        return self.has_room and not self.is_removed


@dataclass
class FakeRay:
    """A cluster."""

    named: dict[str, Actor] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    has_room: bool = True
    exceptions: Any = field(
        default_factory=lambda: SimpleNamespace(RayError=RayError, RayTaskError=TaskError, RayActorError=ActorError)
    )

    @property
    def util(self) -> Any:
        strategies = SimpleNamespace(
            PlacementGroupSchedulingStrategy=lambda group, part: group,
            NodeAffinitySchedulingStrategy=lambda node, soft: node,
        )
        return SimpleNamespace(
            placement_group=lambda bundles, strategy: (
                self.groups.append(Group(has_room=self.has_room)) or self.groups[-1]
            ),
            remove_placement_group=lambda group: setattr(group, "is_removed", True),
            placement_group_table=lambda group: {"state": "REMOVED" if group.is_removed else "CREATED"},
            scheduling_strategies=strategies,
        )

    def remote(self, kind: Any = None, **_: Any) -> Any:
        def options(name: str, namespace: str, scheduling_strategy: Any, get_if_exists: bool = False, **_: Any) -> Any:
            assert kind is not LeaseActor or scheduling_strategy == "the trainer's node"

            def made(*arguments: Any) -> Actor:
                found = self.named.get(name)
                if found is None or found.state == "gone" or not get_if_exists:
                    self.named[name] = Actor(kind(*arguments))
                return self.named[name]

            return SimpleNamespace(remote=made)

        return SimpleNamespace(options=options) if kind is not None else self.remote

    def get(self, found: Any, timeout: float | None = None) -> Any:
        if isinstance(found, list):
            return [self.get(one) for one in found]
        if found.error is not None:
            raise RayError("no answer") if isinstance(found.error, TimeoutError) else found.error
        return found.value

    def wait(self, answers: Sequence[Answer], **_: Any) -> tuple[list[Answer], list[Answer]]:
        return [answer for answer in answers if not isinstance(answer.error, TimeoutError)], []

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "the trainer's node")

    def get_actor(self, name: str, namespace: str) -> Actor:
        if self.named[name].state == "gone":
            raise ValueError(name)
        return self.named[name]

    def kill(self, actor: Actor) -> None:
        actor.state = "gone"


class Worker(KeptEngine):
    """Its start takes no time, and it is on no node."""

    def whereabouts(self) -> WorkerPlace:
        return WorkerPlace("a node", 7, 3)

    def open(self, spec: EngineSpec) -> Any:
        return None

    def start(self, spec: EngineSpec, tensor_rank: int, point: Any) -> None:
        self._digest = digest(spec)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    found = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", found)
    monkeypatch.setattr(leases, "KeptEngine", Worker)
    monkeypatch.setattr(leases, "time", SimpleNamespace(sleep=lambda seconds: None))
    monkeypatch.setattr(leases, "threading", SimpleNamespace(**vars(leases.threading) | {"Thread": NoThread}))
    monkeypatch.setattr(lease_actor, "threading", SimpleNamespace(Thread=NoThread))
    monkeypatch.setattr(lease_actor, "os", SimpleNamespace(_exit=sys.exit))
    return found


class NoThread:
    def __init__(self, **_: Any) -> None: ...

    def start(self) -> None: ...


def trainer(ray: FakeRay, num_engines: int = 2, size: int = 2, spec: EngineSpec = SPEC) -> LeasedPlaces:
    return LeasedPlaces(ray, num_engines, size, {"num_cpus": 1}, spec, EngineLease("of the run", 600.0))


def begin(places: LeasedPlaces, engines: int, spec: EngineSpec = SPEC) -> list[list[Any]]:
    """The actors of new engines, which were called as ``RayExecutor`` calls them."""
    found = [places.workers(engine) for engine in range(engines)]
    for workers in found:
        calls = [worker.whereabouts.remote() for worker in workers]
        point = workers[0].open.remote(spec)
        calls += [point, *(worker.start.remote(spec, rank, point) for rank, worker in enumerate(workers))]
        assert not any(call.error for call in calls)
    return [[worker.actor for worker in workers] for workers in found]


def test_the_next_trainer_has_the_engines_and_the_one_before_is_refused(ray: FakeRay) -> None:
    first = trainer(ray)
    actors = begin(first, 2)
    guarded = Guarded(actors[0][0], first._token)
    second = trainer(ray)
    assert (first.num_survivors, second.num_survivors) == (0, 2) and len(ray.groups) == 2
    survivor = second.survivor(1)
    assert survivor is not None and [worker.actor for worker in survivor.workers] == actors[1]
    assert survivor.whereabouts == [("a node", 7, 3)] * 2 and second.survivor(1) is None
    assert ray.get(survivor.workers[0].process_id.remote()) == os.getpid()
    for refused in (lambda: ray.get(guarded.process_id.remote()), lambda: ray.get(guarded.rest.remote())):
        with pytest.raises(TaskError, match="another trainer has attached to the rollout engines of this run"):
            refused()
    with pytest.raises(Fenced):
        first.check()
    first.close()
    second.check()
    assert not any(group.is_removed for group in ray.groups), "they are not the first one's to end"
    second.close()
    assert all(group.is_removed for group in ray.groups) and ray.named["keeper"].state == "gone"


def harm(kind: str, actors: list[Any]) -> None:
    if kind == "starts still":
        actors[0].held._digest = ""
    elif kind == "was called halfway":  # its other worker has not been called
        actors[0].held._num_calls += 1
    else:
        actors[1].state = kind


@pytest.mark.parametrize("kind", ["gone", "hangs", "starts still", "was called halfway"])
def test_an_engine_that_is_of_no_use_is_ended_and_started_anew(ray: FakeRay, kind: str) -> None:
    actors = begin(trainer(ray), 2)
    harm(kind, actors[1])
    second = trainer(ray)
    assert second.survivor(0) is not None and second.survivor(1) is None and second.num_survivors == 1
    assert [group.is_removed for group in ray.groups] == [False, True, False]
    assert all(worker.actor not in actors[1] for worker in second.workers(1))


def test_other_settings_of_engines_and_fewer_engines(ray: FakeRay) -> None:
    begin(trainer(ray), 2)
    scheduler_only = replace(SPEC.rollout, num_engines=7, engine_timeout_s=5.0, engine_restarts=1, max_staleness=2)
    third = trainer(ray, num_engines=1, spec=replace(SPEC, rollout=scheduler_only))
    assert third.num_survivors == 1 and [group.is_removed for group in ray.groups] == [False, True]
    other = replace(SPEC, rollout=replace(SPEC.rollout, kv_cache_bytes=1 << 20))
    assert trainer(ray, num_engines=1, spec=other).num_survivors == 0 and ray.groups[0].is_removed
    assert digest(replace(SPEC, max_model_len=65)) != digest(SPEC)


def test_fewer_engines_are_those_that_are_left_whatever_their_numbers(ray: FakeRay) -> None:
    """The node of the first one is gone, and the run is started again with one less."""
    actors = begin(trainer(ray), 3)
    for worker in actors[0]:
        worker.state = "gone"
    second = trainer(ray, num_engines=2)
    found = [second.survivor(engine) for engine in range(2)]
    assert [[worker.actor for worker in one.workers] for one in found if one] == [actors[2], actors[1]]
    assert [group.is_removed for group in ray.groups] == [True, False, False], "and nothing was reserved"
    third = trainer(ray, num_engines=2)
    assert third.num_survivors == 2 and (again := third.survivor(0)) and again.workers[0].actor is actors[2][0]
    third.close()
    assert all(group.is_removed for group in ray.groups)


def test_engines_with_an_environment_are_of_use_if_their_episodes_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(steps: int = 1, **environment: Any) -> str:
        config = RunConfig(environment=EnvironmentConfig("my_env.py:Env", **environment))
        config.trainer.total_steps = steps
        made = plan_there(config, "/a model")
        assert made.environment.name == f"{tmp_path}/my_env.py:Env", "engines begin in another directory"
        return digest(pickle.loads(pickle.dumps(replace(SPEC, episodes=made))))

    monkeypatch.chdir(tmp_path)
    file = tmp_path / "my_env.py"
    file.write_text("class Env: ...")
    first = of()
    assert of(steps=2) == first != of(max_turns=9) and of(options={"a": 1}) not in (first, of(options={"a": 2}))
    file.write_text("class Env: pass")
    assert of() != first
    tools = EnvironmentConfig("tools", {"functions": ["calculate", "my_env.py:f", {"name": "my_env.py:g"}]})
    functions = plan_there(RunConfig(environment=tools), "").environment.options["functions"]
    assert functions == ["calculate", f"{file}:f", {"name": f"{file}:g"}]


def test_what_a_trainer_had_only_reserved_is_freed(ray: FakeRay) -> None:
    trainer(ray)
    assert trainer(ray).num_survivors == 0
    assert [group.is_removed for group in ray.groups] == [True, True, False, False]


def test_a_keeper_that_is_gone_or_does_not_answer_is_replaced(ray: FakeRay) -> None:
    places = trainer(ray)
    begin(places, 2)
    ray.named["keeper"].state = "gone"
    places.check()
    assert trainer(ray).num_survivors == 2, "the new one was told what there is"
    ray.named["keeper"].state = "hangs"
    assert trainer(ray).num_survivors == 0


def test_a_keeper_that_cannot_be_reached_does_not_end_the_run(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is gone, and Ray does not know of that yet: it gives out the old one again and again."""
    places = trainer(ray)
    begin(places, 2)
    ray.named["keeper"].state = "gone"
    again = SimpleNamespace(remote=lambda: ray.named["keeper"])
    monkeypatch.setattr(ray, "remote", lambda kind: SimpleNamespace(options=lambda **_: again), raising=False)
    places.check()
    with pytest.raises(PlacesError, match="gave no answer in 120 s, 3 times"):
        places.reserve(2)


def test_a_trainer_whose_keeper_is_gone_takes_nothing_from_the_next_one(ray: FakeRay) -> None:
    first = trainer(ray)
    begin(first, 2)
    ray.named["keeper"].state = "gone"  # with the host of the first trainer, which is suspended meanwhile
    second = trainer(ray)
    begin(second, 2)
    first._keeper = Actor(None, "gone")
    with pytest.raises(Fenced):
        first.check()
    first._beat()  # ends
    first.close()
    second.check()
    assert ray.named["keeper"].state == "runs" and not any(group.is_removed for group in ray.groups[2:])


def test_no_failure_ends_the_words_to_the_keeper(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    places, failures = trainer(ray), [RuntimeError("no answer"), RayError("late"), OSError("unreachable")]
    said: list[str] = []

    def ask(method: str) -> None:
        said.append(method)
        if failures:
            raise failures.pop(0)

    monkeypatch.setattr(places, "_ask", ask)
    monkeypatch.setattr(places, "_is_closing", SimpleNamespace(wait=lambda seconds: len(said) == 5))
    places._beat()
    assert said == ["hear"] * 5 and [record.getMessage() for record in caplog.records] == [
        "the lease actor of the rollout engines could not be told that the run goes on: no answer"
    ]


def test_without_room_for_one_more_engine_the_others_are_left_to_the_lease(ray: FakeRay) -> None:
    begin(trainer(ray), 2)
    ray.has_room = False
    ray.available_resources = lambda: {}  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="no room for an engine"):
        trainer(ray, num_engines=3)
    assert [group.is_removed for group in ray.groups] == [False, False, True]
    assert ray.named["keeper"].state == "runs" and trainer(ray).num_survivors == 2
    ray.named.clear()
    with pytest.raises(InputError, match="no room for an engine"):
        trainer(ray)
    assert ray.named["keeper"].state == "gone", "nothing is lost"


def test_a_place_that_the_keeper_does_not_know_is_given_back(ray: FakeRay) -> None:
    places = trainer(ray)
    places.reserve(2)  # and its actors are not there yet
    ray.named["keeper"].state = "gone"
    places.release(2)
    assert [group.is_removed for group in ray.groups] == [False, False, True]


def test_everything_ends_with_the_lease(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    places = trainer(ray)
    held: LeaseActor = ray.named["keeper"].held
    ticks: list[float] = []

    def tick(seconds: float) -> None:
        ticks.append(seconds)
        if len(ticks) == 100:
            places.check()  # a word of the trainer
        assert not any(group.is_removed for group in ray.groups)

    monkeypatch.setattr(lease_actor, "time", SimpleNamespace(sleep=tick))
    with pytest.raises(SystemExit):
        held._watch()
    assert sum(ticks[99:]) == 600.0 and all(group.is_removed for group in ray.groups)


def test_a_run_is_known_by_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert keeping(tmp_path, 600.0) is None, "a Ray of our own ends with the trainer"
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    found, copy = keeping(tmp_path, 600.0), tmp_path / "copy"
    copy.mkdir()
    (copy / leases.RUN_NAME).write_bytes((tmp_path / leases.RUN_NAME).read_bytes())
    assert found is not None and keeping(tmp_path, 600.0) == found != keeping(copy, 600.0)
