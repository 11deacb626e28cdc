"""The nodes that engines are on, seen from the trainer's rank 0: their processes, and how versions get there."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, partial
from queue import SimpleQueue
from typing import Any

from mega_rl.errors import InputError
from mega_rl.fleet.events import Load
from mega_rl.fleet.relay import Content, Order, Relay
from mega_rl.observe.pulse import Pulse
from mega_rl.rollout.remote.fleet.kept_engine import BESIDE
from mega_rl.rollout.remote.fleet.node_agent import Fetched, NodeAgent, State, chunks_of
from mega_rl.rollout.remote.weight_store import FIXED_STAMP, Location, Store, StoredVersion

LOOK_S = 5.0  # between two looks at this node
NUM_CALLS = 10  # that a node's helper answers at a time: it gives while it takes
TRIES = 2  # of a copy to a node, if the node itself fails


@dataclass(frozen=True)
class AwaitedLoad:
    """An engine's load, whose weights are on their way to its node."""

    load: Load
    node: str
    contents: tuple[tuple[Content, int], ...]  # what it needs there, with their stamps


@dataclass(frozen=True)
class Arrival:
    """What there is to say of a load that waited for weights."""

    load: Load
    location: Location | None = None  # where the weights are
    why: str | None = None  # they will not come; neither: more of them has come


class Nodes:
    """No method waits for another node."""

    def __init__(self, ray: Any, store: Store) -> None:
        """``store``: of this node."""
        self._ray, self._store, self.form = ray, store, store.form
        self._own = ray.get_runtime_context().get_node_id()
        self._here = NodeAgent(store.form, store.location)
        self._helpers: dict[str, Any] = {}  # node -> its actor; of this node only if there are others
        self._relay = Relay(self._own, store.form.slot)
        self._awaited: dict[int, AwaitedLoad] = {}  # by engine
        self._at: dict[int, str] = {}  # engine -> the node that has weights for it to read
        self._answers: SimpleQueue[tuple[Order, Future[Fetched]]] = SimpleQueue()
        self._locations: dict[str, Location] = {}
        self._failures: defaultdict[tuple[str, Content], int] = defaultdict(int)
        self._looked_s = time.monotonic()

    def check_own(self) -> None:
        """Look now and then whether Ray still has this node; Ray itself lets calls wait that it can no longer make.

        Raises:
            InputError: it has not.
        """
        if time.monotonic() < self._looked_s + LOOK_S:
            return
        self._looked_s = time.monotonic()
        if not any(node["Alive"] for node in self._ray.nodes() if node["NodeID"] == self._own):
            raise InputError(
                "Ray's process of the trainer's node (raylet) is gone, so no rollout engine can be started any more: "
                "start the run again, with a new Ray if this one was not of the run, and it goes on from its newest "
                "checkpoint"
            )

    def meet(self, node: str) -> Any | None:
        """Make ready for engines on this node.

        Returns:
            Ray's reference to an answer that fails if the node has not the memory of a store; None: it has.
        """
        if node == self._own or node in self._helpers:
            return None
        if self._own not in self._helpers:
            self._helpers[self._own] = self._helper(self._own, self._store.location)
        self._helpers[node] = self._helper(node, None)
        return self._helpers[node].open.remote()

    def kill(self, node: str, processes: Sequence[int]) -> None:
        if node == self._own:
            self._here.kill(processes)
        else:
            self._helpers[node].kill.remote(processes)

    def pulses(self, node: str, places: Sequence[tuple[int, int]]) -> Future[list[Pulse | None]]:
        """How far processes of a node are; see ``NodeAgent``."""
        if node == self._own:
            found: Future[list[Pulse | None]] = Future()
            found.set_result(self._here.pulses(places))
            return found
        asked = self._helpers[node].pulses.options(concurrency_group=BESIDE).remote(places)
        answer: Future[list[Pulse | None]] = asked.future()
        return answer

    def location(self, load: Load, node: str, stored: StoredVersion) -> Location | None:
        """Where a node has a version, for an engine, until that is ``done``; None: ``heard`` will tell."""
        if node == self._own:
            return self._store.location_of(stored.version)
        contents: list[tuple[Content, int]] = [(stored.version, stored.stamp)]
        if self._has_fixed:
            contents.append((None, FIXED_STAMP))
        self._at[load.engine] = node
        for content, stamp in contents:
            self._relay.want(node, content, stamp, load.engine)
        awaited = AwaitedLoad(load, node, tuple(contents))
        if self._is_there(awaited):
            return self._location(awaited)
        self._awaited[load.engine] = awaited
        self._send()
        return None

    def done(self, engine: int) -> None:
        """It reads no weights any more, and waits for none."""
        self._awaited.pop(engine, None)
        node = self._at.pop(engine, None)
        if node is not None:
            self._relay.done(node, engine)
            self._send()

    def forget(self, node: str, version: int) -> None:
        """What the node has of a version is of no use: it is copied anew when it is wanted again."""
        self._relay.forget(node, version)
        self._relay.forget(node, None)
        self._want_again(node)

    def heard(self) -> list[Arrival]:
        """
        Raises:
            InputError: a node has not the memory of a store.
        """
        found: list[Arrival] = []
        for _ in range(self._answers.qsize()):
            order, answer = self._answers.get()
            found += self._answered(order, answer)
        self._send()
        return found

    @cached_property
    def _has_fixed(self) -> bool:
        return bool(chunks_of(self.form, is_fixed=True))

    def _send(self) -> None:
        for order in self._relay.orders():
            self._fetch(order)

    def _fetch(self, order: Order) -> None:
        answer = self._helpers[order.node].fetch.remote(order, self._helpers[order.source]).future()
        answer.add_done_callback(partial(self._put, order))

    def _put(self, order: Order, answer: Future[Fetched]) -> None:
        self._answers.put((order, answer))  # in a thread of Ray's

    def _answered(self, order: Order, answer: Future[Fetched]) -> list[Arrival]:
        try:
            fetched = answer.result()
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, InputError):
                raise cause from None
            return self._has_failed(order, f"{type(error).__name__}: {cause or error}")
        self._locations[order.node] = fetched.location
        has_grown = self._relay.came(order, fetched.num_chunks, fetched.state is State.WHOLE)
        waiting = [one for one in self._awaited.values() if one.node == order.node]
        if fetched.state is State.WHOLE:
            self._failures.pop((order.node, order.content), None)
            there = [one for one in waiting if self._is_there(one)]
            for one in there:
                del self._awaited[one.load.engine]
            return [Arrival(one.load, self._location(one)) for one in there]
        if fetched.state is State.COMING and self._relay.is_current(order):
            self._fetch(order)
        elif fetched.state is State.GONE and order.source == self._own:
            return self._over(order)
        elif fetched.state in (State.SILENT, State.GONE):
            self._relay.failed(order, is_silent=fetched.state is State.SILENT)
        grown = [one for one in waiting if (order.content, order.stamp) in one.contents]
        return [Arrival(one.load) for one in grown] if has_grown else []

    def _over(self, order: Order) -> list[Arrival]:
        """The trainer has written newer weights in the place of these; whoever loads them finds that out."""
        if not self._relay.is_current(order):
            return []
        location, found = self._locations[order.node]._replace(slot=order.slot or 0), []
        for one in self._wanting(order):
            self._awaited.pop(one.load.engine)
            found.append(Arrival(one.load, location))
        self._relay.forget(order.node, order.content)
        return found

    def _has_failed(self, order: Order, why: str) -> list[Arrival]:
        """A node cannot copy: it is tried once more, for its helper may have been started again."""
        self._relay.lost(order.node)
        key = order.node, order.content
        self._failures[key] += 1
        if self._failures[key] >= TRIES:
            del self._failures[key]
            ended = self._wanting(order)
            for one in ended:
                del self._awaited[one.load.engine]
            sentence = f"it failed while waiting for weights to come to its node: {why}"
            return [Arrival(one.load, why=sentence) for one in ended]
        self._want_again(order.node)
        return []

    def _want_again(self, node: str) -> None:
        for one in [one for one in self._awaited.values() if one.node == node]:
            for content, stamp in one.contents:
                self._relay.want(node, content, stamp, one.load.engine)

    def _wanting(self, order: Order) -> list[AwaitedLoad]:
        wanted = order.content, order.stamp
        return [one for one in self._awaited.values() if one.node == order.node and wanted in one.contents]

    def _is_there(self, awaited: AwaitedLoad) -> bool:
        return all(self._relay.is_whole(awaited.node, *content) for content in awaited.contents)

    def _location(self, awaited: AwaitedLoad) -> Location:
        slot = self._relay.slot(awaited.node, awaited.load.version)
        assert slot is not None, "what is whole has a place"
        return self._locations[awaited.node]._replace(slot=slot)

    def _helper(self, node: str, location: Location | None) -> Any:
        affinity = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        options = {"num_cpus": 0, "max_concurrency": NUM_CALLS, "max_restarts": -1, "scheduling_strategy": affinity}
        return (
            self._ray.remote(concurrency_groups={BESIDE: 1})(NodeAgent).options(**options).remote(self.form, location)
        )
