"""Who is seen to be alive, and how often nodes are asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from mega_rl.fleet.events import Pulsed
from mega_rl.observe.pulse import Pulse, read_pulse
from mega_rl.rollout.engine_checks import CheckPlan, EngineChecks
from mega_rl.rollout.remote.fleet import pulses as under_test
from mega_rl.rollout.remote.fleet.calls import Life
from mega_rl.rollout.remote.fleet.node_agent import NodeAgent
from mega_rl.rollout.remote.fleet.pulses import Pulses
from tests.launching.launch import REPO

WAIT_S = 60.0

CHECKS = EngineChecks(0, CheckPlan(50, 1.0, "float32", print))


class Nodes:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Sequence[tuple[int, int]], Future[list[Pulse | None]]]] = []

    def pulses(self, node: str, places: Sequence[tuple[int, int]]) -> Future[list[Pulse | None]]:
        self.asked.append((node, places, Future()))
        return self.asked[-1][-1]


class Asking:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, lives: list[Life]) -> None:
        self.now, self.nodes, self.lives = 0.0, Nodes(), lives
        monkeypatch.setattr(under_test, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.pulses = Pulses(self.nodes)  # type: ignore[arg-type]

    def after(self, *answers: Any) -> list[Any]:
        """What is said a while after each node has answered what it was asked last."""
        for (_, _, answer), found in zip(
            self.nodes.asked[len(self.nodes.asked) - len(answers) :], answers, strict=True
        ):
            answer.set_exception(found) if isinstance(found, Exception) else answer.set_result(found)
        self.now += under_test.PULSE_S
        return list(self.pulses.heard(self.lives))


def life(engine: int, node: str, *processes: int) -> Life:
    return Life(
        engine, 0, [], node, list(processes), load=1, checks=CHECKS, pulses_at=[(process, 5) for process in processes]
    )


def test_a_node_is_asked_once_about_all_its_busy_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    lives = [life(engine, "ab"[engine // 2], 2 * engine, 2 * engine + 1) for engine in range(4)]
    lives[3].load = 0
    asking = Asking(monkeypatch, lives)
    asking.pulses.heard(lives)
    asking.pulses.heard(lives)
    asked = [(node, [process for process, _ in places]) for node, places, _ in asking.nodes.asked]
    assert asked == [("a", [0, 1, 2, 3]), ("b", [4, 5])]
    assert asking.after() == [] and len(asking.nodes.asked) == 2, "nodes without an answer are not asked again"


def test_progress_is_that_of_the_slowest_worker_and_one_that_stands_still_is_no_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asking = Asking(monkeypatch, [life(0, "a", 1, 2), life(1, "a", 3, 4)])
    asking.pulses.heard(asking.lives)
    assert asking.after([Pulse(1, 5), Pulse(1, 4), Pulse(1, 5), Pulse(1, 5)]) == [], "nothing to compare them with"
    found = asking.after([Pulse(2, 7), Pulse(3, 6), Pulse(2, 7), Pulse(1, 5)])
    assert found == [Pulsed(0, 0, 6)], "the other has a worker that was stopped"
    assert asking.after([Pulse(4, 7), None, Pulse(3, 7), Pulse(2, 5)]) == [Pulsed(1, 0, 5)], "a process is gone"
    assert asking.after(RuntimeError("no agent")) == [] and len(asking.nodes.asked) == 5, "it is asked again"


def test_the_agent_of_a_node_reads_processes_that_run_stop_and_end() -> None:
    program = (
        "from mega_rl.observe.pulse import PulseWriter\nimport itertools, time\n"
        "steps = itertools.count(7)\nprint(PulseWriter(lambda: next(steps)).file, flush=True)\ntime.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=REPO, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    place = process.pid, int(process.stdout.readline())
    agent = NodeAgent(None)  # type: ignore[arg-type]
    try:
        (first,) = agent.pulses([place])
        assert first is not None and first.steps >= 7 and moved(place, first)
        os.kill(process.pid, signal.SIGSTOP)
        while state_of(process.pid) != "T":
            time.sleep(0.01)
        before = read_pulse(*place)
        assert before is not None and not moved(place, before, wait_s=1.0)
        os.kill(process.pid, signal.SIGCONT)
        assert moved(place, before)
    finally:
        process.kill()
        process.wait()
    assert agent.pulses([place]) == [None] and read_pulse(os.getpid(), 10**6) is None


def state_of(process: int) -> str:
    with open(f"/proc/{process}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0]


def moved(place: tuple[int, int], since: Pulse, wait_s: float = WAIT_S) -> bool:
    until = time.monotonic() + wait_s
    while read_pulse(*place) == since:
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def test_an_engine_that_dies_before_its_first_pulse_is_heard_of_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    asking = Asking(monkeypatch, [life(0, "here", 7)])
    asking.after()
    assert asking.after([None]) == [] and asking.after([None]) == []
