"""How far engines are, asked once for all workers of a node, and never of the workers themselves."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import Future

from mega_rl.fleet.events import Event, Pulsed
from mega_rl.observe.pulse import Pulse
from mega_rl.rollout.remote.fleet.calls import Life
from mega_rl.rollout.remote.fleet.nodes import Nodes

PULSE_S = 1.0  # between two questions


class Pulses:
    """One thread calls all methods."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes, self._due_s = nodes, 0.0
        # By node: what it was asked about, and its answer; a node without an answer is not asked again.
        self._asked: dict[str, tuple[list[Life], Future[list[Pulse | None]]]] = {}

    def heard(self, lives: Iterable[Life]) -> list[Event]:
        """What nodes have said of engines that are alive, once in ``PULSE_S``; they are asked about the busy ones."""
        if (now := time.monotonic()) < self._due_s:
            return []
        self._due_s = now + PULSE_S
        said: list[Event] = []
        for node in [node for node, (_, answer) in self._asked.items() if answer.done()]:
            asked, answer = self._asked.pop(node)
            # A node's agent that is gone is started again by Ray, or Ray tells of the engines.
            if answer.exception() is None:
                said += _said(asked, answer.result())
        busy: defaultdict[str, list[Life]] = defaultdict(list)
        for life in lives:
            if life.is_busy and life.pulses_at and life.node not in self._asked:
                busy[life.node].append(life)
        for node, found in busy.items():
            self._asked[node] = found, self._nodes.pulses(node, [place for life in found for place in life.pulses_at])
        return said


def _said(lives: Iterable[Life], answers: Iterable[Pulse | None]) -> list[Event]:
    """Of engines all of whose workers have moved since the last time."""
    said: list[Event] = []
    rest = iter(answers)
    for life in lives:
        before, life.pulses = life.pulses, [next(rest) for _ in life.pulses_at]
        found = [pulse for pulse in life.pulses if pulse is not None]
        is_alive = len(found) == len(before) == len(life.pulses) and all(
            new != old for new, old in zip(life.pulses, before, strict=True)
        )
        if is_alive:
            said.append(Pulsed(life.engine, life.number, min(pulse.steps for pulse in found)))
    return said
