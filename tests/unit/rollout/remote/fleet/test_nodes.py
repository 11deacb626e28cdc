"""How a version gets from the trainer's node to others: with stand-ins for Ray, its actors and their answers."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mega_rl.bridge.series import Series
from mega_rl.errors import InputError
from mega_rl.rollout.remote.fleet import node_agent, nodes as under_test
from mega_rl.rollout.remote.fleet.kept_engine import BESIDE
from mega_rl.rollout.remote.fleet.node_agent import NodeAgent
from mega_rl.rollout.remote.fleet.nodes import Nodes
from mega_rl.rollout.remote.weight_store import Location, Store, StoreForm

NORM = Series("model.norm.weight", ((0, 5),), "model.norm.weight", ((0, 5),))
FORM = StoreForm(((NORM,),), torch.float32, num_slots=2, salt=1)


class Actor:
    """Answers at once, with the node that it is on."""

    def __init__(self, node: str, asked: list[tuple[Any, ...]]) -> None:
        self.node = node
        self.fetch = SimpleNamespace(remote=lambda version, source, there: self._fetched(version, source, there))
        self.open = SimpleNamespace(remote=lambda: f"memory at {node}")
        self.kill = SimpleNamespace(remote=lambda processes: asked.append(("kill", node, processes)))
        self.asked = asked

    def _fetched(self, version: int, source: Actor, there: Any) -> str:
        self.asked.append(("fetch", version, self.node, source.node, there))
        return f"{version} at {self.node}"


class FakeRay:
    """Of the node "own"."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
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
        made = SimpleNamespace(node="")

        def options(**given: Any) -> Any:
            made.node = given["scheduling_strategy"]
            return SimpleNamespace(remote=lambda form, location: Actor(made.node, self.asked))

        return SimpleNamespace(options=options)


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


def test_each_node_takes_a_version_once_and_passes_it_on_to_two() -> None:
    ray, store = FakeRay(), Store(FORM)
    nodes = Nodes(ray, store)
    assert nodes.meet("own") is None
    for node in "abcde":
        assert nodes.meet(node) == f"memory at {node}" and nodes.meet(node) is None
    assert nodes.location("own", 0) == store.location_of(0) and not ray.asked
    for _ in range(2):
        assert [nodes.location(node, 0) for node in "abcde"] == [f"0 at {node}" for node in "abcde"]
    own = store.location
    assert ray.asked == [
        ("fetch", 0, "a", "own", own),
        ("fetch", 0, "b", "own", own),
        ("fetch", 0, "c", "a", "0 at a"),
        ("fetch", 0, "d", "a", "0 at a"),
        ("fetch", 0, "e", "b", "0 at b"),
    ]
    store.close()


def test_what_did_not_arrive_comes_from_the_first_node_next() -> None:
    ray, store = FakeRay(), Store(FORM)
    nodes = Nodes(ray, store)
    for node in "abc":
        nodes.meet(node)
        nodes.location(node, 0)
    nodes.forget("c", 0)
    nodes.location("c", 0)
    assert ray.asked[-2:] == [("fetch", 0, "c", "a", "0 at a"), ("fetch", 0, "c", "own", store.location)]
    assert nodes.location("b", 0, failed="0 at b") == "0 at b", "the reference that the stand-in gives for the new copy"
    assert ray.asked[-1] == ("fetch", 0, "b", "own", store.location)
    num_asked = len(ray.asked)
    assert nodes.location("b", 0, failed="an earlier one") == "0 at b" and len(ray.asked) == num_asked
    nodes.location("a", 2)
    nodes.location("a", 0)  # its slot was the newer one's meanwhile
    assert ray.asked[-1] == ("fetch", 0, "a", "own", store.location)
    nodes.kill("b", [7])
    assert ray.asked[-1] == ("kill", "b", [7])
    store.close()


def test_a_slot_is_copied_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stores on this machine stand for two nodes."""
    monkeypatch.setattr(node_agent, "CHUNK_BYTES", 3000)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda answer: answer))
    there, here = Store(FORM), Store(FORM)
    there.parameters(0, 1)["model.norm.weight"].copy_(torch.arange(5))
    asked: list[tuple[int, ...]] = []
    source = NodeAgent(FORM, there.location)

    def chunk(*where: int) -> Any:
        asked.append(where)
        return source.chunk(*where)

    helper = NodeAgent(FORM, here.location)
    found = helper.fetch(1, SimpleNamespace(chunk=SimpleNamespace(remote=chunk)), there.location)
    ends = {None: (3000, 4096), 1: (3000, 6000, 9000, 12000, 12288)}
    expected = [(0, slot, start, end) for slot, of in ends.items() for start, end in zip((0, *of), of, strict=False)]
    assert found == here.location_of(1) and asked == expected
    assert here.parameters(0, 1)["model.norm.weight"].tolist() == [0, 1, 2, 3, 4]
    assert here.parameters(0, 0)["model.norm.weight"].tolist() == [0] * 5, "the other version's slot"
    there.close()
    here.close()


def test_a_node_without_the_memory_says_which_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mega_rl.rollout.remote.weight_store.available_bytes", lambda: 0)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    helper = NodeAgent(FORM)
    # The engine that asked to open it may have ended before the refusal came: then a copy is the first to tell of it.
    for call in (helper.open, lambda: helper.fetch(0, None, Location(1, (3,)))):
        with pytest.raises(InputError, match=r"^on host .+, which has rollout engines, the weight store takes .* GB"):
            call()
