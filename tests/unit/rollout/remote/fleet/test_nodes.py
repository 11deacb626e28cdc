"""How a version gets from the trainer's node to others: with stand-ins for Ray, its actors and their answers."""

from __future__ import annotations

import sys
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mega_rl.bridge.series import Series
from mega_rl.errors import InputError
from mega_rl.fleet.events import Load
from mega_rl.fleet.relay import Order
from mega_rl.rollout.remote.fleet import node_agent, nodes as under_test
from mega_rl.rollout.remote.fleet.kept_engine import BESIDE
from mega_rl.rollout.remote.fleet.node_agent import GONE, Fetched, NodeAgent, State
from mega_rl.rollout.remote.fleet.nodes import Arrival, Nodes
from mega_rl.rollout.remote.weight_store import FIXED_STAMP, Location, Store, StoredVersion
from mega_rl.rollout.store_form import StoreForm
from tests.pretended.engine_process import sealed

NORM = Series("model.norm.weight", ((0, 3000),), "model.norm.weight", ((0, 3000),))
HEAD = Series("lm_head.weight", ((0, 5),), "lm_head.weight", ((0, 5),))
FORM = StoreForm(((NORM,),), torch.float32, num_slots=3, salt=1)
ADAPTED = StoreForm(((NORM, HEAD),), torch.float32, num_slots=3, salt=1, changing=((HEAD,),))


class LaterError(Exception):
    """``ray.exceptions.RayError``."""


class TaskFailed(LaterError):
    """``ray.exceptions.RayTaskError``."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


@dataclass(eq=False)
class Actor:
    """Remembers what it is asked for; a test answers."""

    node: str
    asked: list[tuple[str, Order, Future[Any]]] = field(default_factory=list)
    killed: list[Any] = field(default_factory=list)

    @property
    def fetch(self) -> Any:
        def remote(order: Order, source: Actor) -> Any:
            assert source.node == order.source
            self.asked.append((source.node, order, Future()))
            return SimpleNamespace(future=lambda: self.asked[-1][2])

        return SimpleNamespace(remote=remote)

    @property
    def open(self) -> Any:
        return SimpleNamespace(remote=lambda: f"memory at {self.node}")

    @property
    def kill(self) -> Any:
        return SimpleNamespace(remote=self.killed.append)


class FakeRay:
    """Of the node "own"."""

    exceptions = SimpleNamespace(RayError=LaterError)

    def __init__(self) -> None:
        self.actors: dict[str, Actor] = {}
        self.alive = True
        strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: node)
        self.util = SimpleNamespace(scheduling_strategies=strategies)

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "own")

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": "own", "Alive": self.alive}, {"NodeID": "other", "Alive": True}]

    def remote(self, concurrency_groups: dict[str, int]) -> Any:
        assert concurrency_groups == {BESIDE: 1}, "a copy of weights would hold pulses up"
        return self.actor_class

    def actor_class(self, kind: type) -> Any:
        assert kind is NodeAgent

        def options(**given: Any) -> Any:
            node = given["scheduling_strategy"]
            return SimpleNamespace(remote=lambda form, location: self.actors.setdefault(node, Actor(node)))

        return SimpleNamespace(options=options)


class Cluster:
    """The trainer's node, and others with an engine each."""

    def __init__(self, names: str, form: StoreForm = FORM) -> None:
        self.ray, self.store = FakeRay(), Store(form)
        self.nodes = Nodes(self.ray, self.store)
        for node in names:
            assert self.nodes.meet(node) == f"memory at {node}" and self.nodes.meet(node) is None

    def load(self, node: str, version: int = 0) -> Location | None:
        return self.nodes.location(Load(ord(node), 0, version), node, StoredVersion(version, 2 * version + 2, ()))

    def answer(self, node: str, answer: State | Exception, num_chunks: int = 1, index: int = 0) -> list[Arrival]:
        """To what was asked first of those that have no answer."""
        _, order, future = [one for one in self.ray.actors[node].asked if not one[2].done()][index]
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(Fetched(answer, num_chunks, Location(ord(node), (3,), order.slot or 0)))
        return self.nodes.heard()

    def asked(self, node: str) -> list[tuple[str, int | None]]:
        """Sources and versions."""
        return [(source, order.content) for source, order, _ in self.ray.actors[node].asked]


def test_a_node_that_ray_has_lost_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    now, ray = [0.0], FakeRay()
    monkeypatch.setattr(under_test, "time", SimpleNamespace(monotonic=lambda: now[0]))
    nodes = Nodes(ray, Store(FORM))
    ray.alive = False
    nodes.check_own()  # it has been there just now
    now[0] = under_test.LOOK_S
    with pytest.raises(InputError, match=r"\(raylet\) is gone.*goes on from its newest checkpoint"):
        nodes.check_own()
    ray.alive = True
    now[0] *= 2
    nodes.check_own()


def test_engines_of_the_trainers_node_need_no_copy_and_others_are_told_when_theirs_is_there() -> None:
    cluster = Cluster("ab")
    assert cluster.nodes.meet("own") is None
    assert cluster.nodes.location(Load(7, 0, 1), "own", StoredVersion(1, 4, ())) == cluster.store.location_of(1)
    assert cluster.load("a") is None and cluster.load("b") is None
    assert cluster.asked("a") == [("own", 0)] and cluster.asked("b") == [("a", 0)], "b copies while a does"
    load = Load(ord("a"), 0, 0)
    assert cluster.answer("a", State.COMING, 5) == [Arrival(load)] and len(cluster.asked("a")) == 2
    assert cluster.answer("a", State.COMING, 5) == [], "no more than before"
    assert cluster.answer("a", State.WHOLE, 9) == [Arrival(load, Location(ord("a"), (3,), 0))]
    assert cluster.load("a") == Location(ord("a"), (3,), 0), "another engine finds it there"
    cluster.nodes.kill("b", [7])
    assert cluster.ray.actors["b"].killed == [[7]]
    cluster.store.close()


def test_what_no_version_changes_comes_to_a_node_once() -> None:
    cluster = Cluster("a", ADAPTED)
    assert cluster.load("a", 0) is None
    assert cluster.asked("a") == [("own", 0), ("own", None)]
    assert cluster.answer("a", State.WHOLE) == [], "the other is on its way"
    assert [one.location for one in cluster.answer("a", State.WHOLE)] == [Location(ord("a"), (3,), 0)]
    cluster.nodes.done(ord("a"))
    cluster.load("a", 1)
    assert cluster.asked("a")[2:] == [("own", 1)]
    cluster.store.close()


def test_a_source_that_is_silent_is_replaced_and_one_at_the_end_of_its_versions_is_over() -> None:
    cluster = Cluster("ab")
    cluster.load("a")
    cluster.load("b")
    assert cluster.answer("b", State.SILENT, 0) == [] and cluster.asked("b") == [("a", 0), ("own", 0)]
    (arrival,) = cluster.answer("b", State.GONE)
    assert arrival.location is not None and arrival.load.engine == ord("b"), "its load will find newer weights there"
    assert cluster.answer("a", State.SILENT, 0) == [] and cluster.asked("a")[1:] == [("own", 0)], "there is no other"
    cluster.store.close()


def test_a_node_that_fails_is_tried_once_more() -> None:
    cluster = Cluster("ab")
    cluster.load("a")
    cluster.load("b")
    assert cluster.answer("a", LaterError("its actor was started again")) == []
    assert cluster.asked("b")[1:] == [("own", 0)], "what a had is not there any more"
    assert cluster.asked("a")[1:] == [("b", 0)]
    (arrival,) = cluster.answer("a", TaskFailed(ConnectionError("no route")))
    assert arrival.why == "it failed while waiting for weights to come to its node: TaskFailed: no route"
    cluster.nodes.done(ord("a"))
    assert len(cluster.asked("a")) == 2, "nobody waits"
    cluster.load("b", 1)
    with pytest.raises(InputError, match="the weight store takes"):
        cluster.answer("b", TaskFailed(InputError("on host b, the weight store takes 9 GB")), index=-1)
    cluster.store.close()


def test_what_an_engine_died_of_is_copied_anew() -> None:
    cluster = Cluster("a")
    cluster.load("a")
    cluster.answer("a", State.WHOLE)
    cluster.nodes.done(ord("a"))
    cluster.nodes.forget("a", 0)
    assert cluster.load("a") is None
    (_, first, _), (_, second, _) = cluster.ray.actors["a"].asked
    assert first.number != second.number, "it begins with nothing"
    cluster.store.close()


@dataclass
class Pair:
    """Two stores on this machine stand for two nodes; answers to calls are there at once."""

    there: Store
    source: NodeAgent
    agent: NodeAgent
    asked: list[tuple[Any, ...]] = field(default_factory=list)

    def give(self) -> Any:
        def remote(*where: Any) -> Any:
            self.asked.append(where)
            return self.source.give(*where)

        return SimpleNamespace(give=SimpleNamespace(remote=lambda *where: Reference(remote(*where))))

    def order(self, stored: StoredVersion, slot: int = 0, number: int = 0) -> Order:
        return Order("b", stored.version, stored.stamp, slot, "a", self.there.form.slot(stored.version), number)


@dataclass(eq=False)
class Reference:
    value: Any


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(node_agent, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(node_agent, "WAIT_S", 0.0)
    fake = SimpleNamespace(
        get=lambda answer: answer.value, wait=lambda answers, timeout: (answers, []), exceptions=FakeRay.exceptions
    )
    monkeypatch.setitem(sys.modules, "ray", fake)
    there = Store(FORM)
    found = Pair(there, NodeAgent(FORM, there.location), NodeAgent(FORM))
    yield found
    there.close()
    found.agent._store.close()


def filled(store: Store, version: int, value: float) -> StoredVersion:
    store.parameters(0, version)["model.norm.weight"].copy_(torch.arange(3000) + value)
    return sealed(store, version)


def held(agent: NodeAgent, slot: int) -> torch.Tensor:
    part = agent._store.form.plan(0).slot
    return part.parameters(agent._store.memory(0, slot))["model.norm.weight"]


def test_a_slot_is_copied_chunk_by_chunk_with_its_hashes_and_its_stamp(pair: Pair) -> None:
    stored = filled(pair.there, 1, 0.5)
    fetched = pair.agent.fetch(pair.order(stored, slot=1), pair.give())
    slot = FORM.plan(0).slot
    num_chunks = -(-(slot.num_bytes - 4096) // 3000)
    assert fetched.state is State.WHOLE and fetched.num_chunks == num_chunks == len(pair.asked)
    assert fetched.location.slot == 1 and fetched.location.process == pair.agent._store.location.process
    assert held(pair.agent, 1).equal(torch.arange(3000) + 0.5) and not held(pair.agent, 0).any()
    store = pair.agent._store
    assert store.stamp_of(0, 1) == stored.stamp
    assert slot.hashes_in(store.memory(0, 1)).tolist() == slot.hashes_in(pair.there.memory(0, 1)).tolist()
    assert pair.agent.fetch(pair.order(stored, slot=1), pair.give()).state is State.WHOLE
    assert len(pair.asked) == num_chunks, "nothing is copied twice"
    pair.agent.fetch(pair.order(stored, slot=1, number=1), pair.give())
    assert len(pair.asked) == 2 * num_chunks, "but for another order"


def test_a_node_gives_the_chunks_that_it_has_before_the_others_have_come(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And goes on from another source where the first one ended."""
    stored = filled(pair.there, 1, 0.5)
    order, give = pair.order(stored), pair.source.give
    gives = [number for number in range(2)]
    monkeypatch.setattr(pair.source, "give", lambda slot, stamp, n: give(slot, stamp, n) if n in gives else (2, None))
    monkeypatch.setattr(node_agent, "FETCH_S", 0.05)
    coming = pair.agent.fetch(order, pair.give())
    assert (coming.state, coming.num_chunks) == (State.COMING, 2)
    assert pair.agent._store.stamp_of(0, 0) % 2, "half written"
    have, chunk = pair.agent.give(0, stored.stamp, 1)
    assert have == 2 and chunk is not None
    assert pair.agent.give(0, stored.stamp, 2) == (2, None), "not yet"
    assert pair.agent.give(0, stored.stamp + 2, 0) == (GONE, None)
    monkeypatch.setattr(pair.source, "give", give)
    pair.asked.clear()
    other = order._replace(source="c")
    assert pair.agent.fetch(other, pair.give()).state is State.WHOLE
    assert min(number for _, _, number in pair.asked) == 2, "the first two are there"
    assert held(pair.agent, 0).equal(torch.arange(3000) + 0.5)


def test_a_silent_source_is_said_and_may_be_asked_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, now = filled(pair.there, 1, 0.5), [0.0]

    def wait(answers: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        now[0] += 1.0
        return [], answers

    ray = sys.modules["ray"]
    monkeypatch.setattr(node_agent, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(ray, "wait", wait)
    order, states = pair.order(stored), []
    while not states or states[-1] is State.COMING:
        states.append(pair.agent.fetch(order, pair.give()).state)
    assert states[-1] is State.SILENT and now[0] == pytest.approx(node_agent.SILENCE_S, abs=2.0)
    monkeypatch.setattr(ray, "wait", lambda answers, timeout: (answers, []))
    assert pair.agent.fetch(order, pair.give()).state is State.WHOLE
    monkeypatch.setattr(ray, "get", lambda answer: (_ for _ in ()).throw(LaterError("it is gone")))
    assert pair.agent.fetch(pair.order(filled(pair.there, 2, 0.0), number=1), pair.give()).state is State.SILENT


def test_a_chunk_that_was_rewritten_while_it_was_copied_is_not_given(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, memory = filled(pair.there, 1, 0.5), pair.source._store.memory

    def overtaken(worker: int, slot: int | None) -> torch.Tensor:
        """Looks at the stamp come first."""
        looks.append(slot)
        if len(looks) > 3:
            pair.there.stamp(slot, stored.stamp + 1)
        return memory(worker, slot)

    looks: list[int | None] = []
    assert pair.source.give(1, stored.stamp, 0)[0] > 0
    monkeypatch.setattr(pair.source._store, "memory", overtaken)
    assert pair.source.give(1, stored.stamp, 0) == (GONE, None) and len(looks) == 4


def test_what_is_copied_to_a_place_gives_way_to_what_is_wanted_there_next(pair: Pair) -> None:
    first, second = filled(pair.there, 1, 0.5), filled(pair.there, 2, 7.5)
    pair.agent.fetch(pair.order(first), pair.give())
    assert pair.agent.fetch(pair.order(second, number=1), pair.give()).state is State.WHOLE
    assert held(pair.agent, 0).equal(torch.arange(3000) + 7.5)
    assert pair.agent.give(0, first.stamp, 0) == (GONE, None)


def test_what_no_version_changes_is_given_by_its_own_stamp(monkeypatch: pytest.MonkeyPatch, pair: Pair) -> None:
    there = Store(ADAPTED)
    there.parameters(0, 1)["model.norm.weight"].fill_(3.0)
    sealed(there, 1)
    pair.source, agent = NodeAgent(ADAPTED, there.location), NodeAgent(ADAPTED)
    assert agent.fetch(Order("b", None, FIXED_STAMP, None, "a", None, 5), pair.give()).state is State.WHOLE
    found = ADAPTED.plan(0).fixed.parameters(agent._store.memory(0, None))
    assert list(found) == ["model.norm.weight"] and found["model.norm.weight"].eq(3.0).all()
    there.close()
    agent._store.close()


def test_a_node_without_the_memory_says_which_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mega_rl.rollout.remote.weight_store.available_bytes", lambda: 0)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    helper = NodeAgent(FORM)
    # The engine that asked to open it may have ended before the refusal came: then a copy is the first to tell of it.
    for call in (helper.open, lambda: helper.fetch(Order("b", 0, 2, 0, "a", 0, 0), None)):
        with pytest.raises(InputError, match=r"^on host .+, which has rollout engines, the weight store takes .* GB"):
            call()
