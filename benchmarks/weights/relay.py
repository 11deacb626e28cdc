"""How long a version takes from the trainer's node to all others, and how many nodes anybody gives to at a time.

    python -m benchmarks.weights.relay [--nodes N] [--gigabytes N] [--rate N] [--json F]

The relay is the one of every run (``Relay``, ``ChunkWindow``); the network is pretended, and time with it: each node
sends and receives so many bytes a second, one chunk after another. Ideal: the bytes of a version through one link.
Lost: a node ends, amid a version, and nobody is told; whoever copies from it asks for another after 20 s.
"""

from __future__ import annotations

import argparse
import heapq
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.report import publish, table
from mega_rl.fleet.relay import ChunkWindow, Order, Relay
from mega_rl.rollout.remote.fleet.node_agent import CHUNK_BYTES, FETCH_S, SILENCE_S, WAIT_S

LATENCY_S = 0.002  # of a question, and of its answer beside its bytes
ROOT, VERSION, STAMP = "root", 0, 2


@dataclass
class Copying:
    """A node that carries out an order."""

    order: Order
    window: ChunkWindow
    heard_s: float
    is_told: bool = False  # whether the relay knows how it ended


class Waiting:
    """Done once, whoever is the first to say so."""

    def __init__(self, do: Callable[[], None]) -> None:
        self._do: Callable[[], None] | None = do

    def __call__(self) -> None:
        do, self._do = self._do, None
        if do is not None:
            do()


class PretendedNetwork:
    """A root and other nodes, all of which want one version at once."""

    def __init__(self, num_nodes: int, num_chunks: int, chunk_s: float) -> None:
        """``chunk_s``: for a chunk through a link."""
        self.now, self._num_chunks, self._chunk_s = 0.0, num_chunks, chunk_s
        self.relay = Relay(ROOT, slot_of=lambda version: 0)
        self.nodes = [f"node {number}" for number in range(num_nodes)]
        self._events: list[tuple[float, int, Callable[[], None]]] = []  # a heap
        self._numbers = count()
        self._copying: dict[str, Copying] = {}
        self._sends: defaultdict[str, float] = defaultdict(
            float
        )  # node -> when its link has sent all that it was given
        self._receives: defaultdict[str, float] = defaultdict(float)
        self.sent: defaultdict[str, int] = defaultdict(int)  # chunks, by node
        self._waiting: defaultdict[str, list[Callable[[], None]]] = defaultdict(list)  # for chunks of a node
        self.dead: set[str] = set()
        self.whole: dict[str, float] = {}  # node -> when it had the version
        self.most_streams: defaultdict[str, int] = defaultdict(int)
        for number, node in enumerate(self.nodes):
            self.relay.want(node, VERSION, STAMP, number)
        self._obey()

    def at(self, time_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), do))

    def run(self) -> float:
        """Until all that live have the version; returns how long that took."""
        while len(self.whole.keys() - self.dead) < len(self.nodes) - len(self.dead):
            self.now, _, do = heapq.heappop(self._events)
            do()
        return self.now

    def _obey(self) -> None:
        for order in self.relay.orders():
            copying = self._copying.get(order.node)
            window = ChunkWindow(self._num_chunks) if copying is None else copying.window
            window.ask_another()
            self._copying[order.node] = new = Copying(order, window, self.now)
            self._ask(new)
            self.at(self.now + FETCH_S, partial(self._tell, new))
        for node in [ROOT, *self.nodes]:
            self.most_streams[node] = max(self.most_streams[node], self.relay.num_streams(node))

    def _is_current(self, copying: Copying) -> bool:
        node = copying.order.node
        return self._copying[node] is copying and node not in self.dead and not copying.window.is_whole

    def _tell(self, copying: Copying) -> None:
        """The node's agent answers the trainer, every so often."""
        if not self._is_current(copying):
            return
        self.relay.came(copying.order, copying.window.have, is_whole=False)
        if self.now > copying.heard_s + SILENCE_S:
            self.relay.failed(copying.order, is_silent=True)
            self._obey()
        else:
            self.at(self.now + FETCH_S, partial(self._tell, copying))

    def _ask(self, copying: Copying) -> None:
        while (number := copying.window.next()) is not None:
            self.at(self.now + LATENCY_S, partial(self._give, copying, number, self.now + WAIT_S))

    def _give(self, copying: Copying, number: int, until_s: float) -> None:
        source, node = copying.order.source, copying.order.node
        if source in self.dead or not self._is_current(copying):
            return
        have = self._num_chunks if source == ROOT else self._copying[source].window.have
        if have > number:
            # The chunk is at the receiver's link when it has left the sender's, which sends one after another.
            self._sends[source] = max(self._sends[source], self.now) + self._chunk_s
            self._receives[node] = max(self._receives[node] + self._chunk_s, self._sends[source])
            self.sent[source] += 1
            self.at(self._receives[node] + LATENCY_S, partial(self._come, copying, number, have, True))
        elif self.now < until_s:
            waits = Waiting(partial(self._give, copying, number, until_s))
            self._waiting[source].append(waits)
            self.at(until_s, waits)
        else:
            self.at(self.now + LATENCY_S, partial(self._come, copying, number, have, False))

    def _come(self, copying: Copying, number: int, have: int, has_come: bool) -> None:
        if not self._is_current(copying) or (copying.order.source in self.dead and not has_come):
            return
        copying.heard_s = self.now
        copying.window.answered(number, have, has_come)
        if has_come:
            copying.window.written(number)
            for waits in self._waiting.pop(copying.order.node, []):
                waits()
        if copying.window.is_whole:
            self.whole[copying.order.node] = self.now
            self.relay.came(copying.order, self._num_chunks, is_whole=True)
            self._obey()
        else:
            self._ask(copying)


def measured(num_nodes: int, num_bytes: float, rate: float, dead: int | None, chunk_bytes: int) -> dict[str, Any]:
    """``dead``: the node that ends halfway."""
    num_chunks = -int(-num_bytes // chunk_bytes)
    network = PretendedNetwork(num_nodes, num_chunks, chunk_bytes / rate)
    ideal_s = num_chunks * chunk_bytes / rate
    if dead is not None:
        network.at(ideal_s / 2, partial(network.dead.add, network.nodes[dead]))
    seconds = network.run()
    return {
        "seconds": seconds,
        "of_ideal": seconds / ideal_s,
        "root_streams": network.most_streams[ROOT],
        "most_streams": max(network.most_streams.values()),
        "root_sent": network.sent[ROOT] / num_chunks,
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--gigabytes", type=float, default=145, help="of a version: 145 for 70B in bfloat16")
    parser.add_argument("--rate", type=float, default=1.0, help="of a link, GB/s")
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args(argv)
    cases: list[int | None] = [None, 0, arguments.nodes // 2, arguments.nodes - 1]
    figures = arguments.nodes, arguments.gigabytes * 1e9, arguments.rate * 1e9
    found = {
        "nobody" if dead is None else f"node {dead + 1}": measured(*figures, dead, CHUNK_BYTES)
        for dead in dict.fromkeys(cases)
    }
    header = ("lost", "time, s", "of the ideal", "streams at the root", "streams at any node", "versions that it sent")
    what = f"{arguments.gigabytes:g} GB to {arguments.nodes} nodes at {arguments.rate:g} GB/s"
    rows = [[name, *one.values()] for name, one in found.items()]
    publish(f"Relay of {what}, pretended network", table(header, rows), "cpu", found, arguments.json)


if __name__ == "__main__":
    main()
