"""The nodes that engines are on, seen from the trainer's rank 0: their processes, and how versions get there."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from mega_rl.errors import InputError
from mega_rl.observe.pulse import Pulse
from mega_rl.rollout.remote.fleet.kept_engine import BESIDE
from mega_rl.rollout.remote.fleet.node_agent import NodeAgent
from mega_rl.rollout.remote.weight_store import Location, Store

FAN_OUT = 2  # nodes that a node passes a version on to
LOOK_S = 5.0  # between two looks at this node
NUM_CALLS = 4  # that a node's helper answers at a time: it may give while it takes


class Nodes:
    """No method waits for another node."""

    def __init__(self, ray: Any, store: Store) -> None:
        """``store``: of this node."""
        self._ray, self._store, self.form = ray, store, store.form
        self._own = ray.get_runtime_context().get_node_id()
        self._here = NodeAgent(store.form, store.location)
        self._helpers: dict[str, Any] = {}  # node -> its actor; of this node only if there are others
        self._fetched: dict[int, dict[str, Any]] = defaultdict(dict)  # version -> node -> Ray's reference to a location
        self._looked_s = time.monotonic()
        self._is_direct: set[int] = set()  # versions that failed to arrive somewhere: every node asks this one

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

    def location(self, node: str, version: int, failed: Any = None) -> Any:
        """Where a node has a version, or Ray's reference to that, which is there once the version is.

        Args:
            failed: such a reference that failed: the version is copied anew, unless another engine had that done.
        """
        if node == self._own:
            return self._store.location_of(version)
        for old in [old for old in self._fetched if self.form.is_over(old, version)]:
            del self._fetched[old]
        there = self._fetched[version]
        if failed is not None and there.get(node) == failed:
            self.forget(node, version)
        if node not in there:
            sources = [self._own, *there]
            source = self._own if version in self._is_direct else sources[len(there) // FAN_OUT]
            before = there.get(source, self._store.location)
            there[node] = self._helpers[node].fetch.remote(version, self._helpers[source], before)
        return there[node]

    def forget(self, node: str, version: int) -> None:
        """The version did not arrive: it is copied anew when it is wanted again."""
        if self._fetched[version].pop(node, None) is not None:
            self._is_direct.add(version)

    def _helper(self, node: str, location: Location | None) -> Any:
        affinity = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        options = {"num_cpus": 0, "max_concurrency": NUM_CALLS, "max_restarts": -1, "scheduling_strategy": affinity}
        return (
            self._ray.remote(concurrency_groups={BESIDE: 1})(NodeAgent).options(**options).remote(self.form, location)
        )
