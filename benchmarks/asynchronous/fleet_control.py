"""What the control of a fleet costs the trainer's first process, by the number of engines.

    python -m benchmarks.asynchronous.fleet_control [--engines N ...] [--whole N] [--ray] [--json F]

Counts are of functions that are called, and of engines that are looked at: they are the same on every machine. The
engines are objects in this process: what is measured is the scheduler, its thread and the executor of a run, not Ray.
Groups are dropped while every engine is full, and while nothing waits and some engines have no work. The whole fleet
samples 10,240 responses of at most 60 s while 100 engines die; the share of a core is the processor time of the
scheduler's thread for all of them, without that of the engines that are pretended there, divided by 60 s. --ray adds
what Ray itself takes in that thread for each call to a worker, measured with a Ray that is started here.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from benchmarks.report import publish, table
from mega_rl import platform
from mega_rl.config.schema.sampling import RolloutConfig
from mega_rl.fleet import events
from mega_rl.fleet.engines import EngineLimits
from mega_rl.fleet.scheduler import FleetScheduler
from mega_rl.fleet.tickets import Key, Rules
from mega_rl.rollout.remote.weight_store import StoredVersion
from mega_rl.rollout.scheduling.fleet_record import FleetRecord
from tests.pretended.remote.fake_ray import PROOFS, FakeRay, executor_on
from tests.pretended.remote.large_fleet import requests, run_fleet

GROUP_SIZE = 16
TARGET_MS = 20.0  # of a look for events, where none has come
STEP_S = 60.0
NUM_CALLS = 2000  # of Ray
ROWS = {
    "look_functions": "a look for events, nothing ready: functions called",
    "look_ms": f"ms (at most {TARGET_MS:g})",
    "pulse_ms": "ms of one with pulses, once a second",
    "answer_functions": "an answer: functions called",
    "answer_looked_at": "engines looked at",
    "answer_ms": "ms",
    "drop_functions": "a dropped group, all engines full: functions called",
    "drop_looked_at": "engines looked at",
    "drop_ms": "ms",
    "tail_functions": "a dropped group, some engines idle: functions called",
    "tail_looked_at": "engines looked at",
    "tail_ms": "ms",
    "tick_ms": "a look at the limits of engines, once a second: ms",
}


def functions_in(call: Callable[[], object]) -> int:
    """How many functions are called."""
    counts: Counter[str] = Counter()

    def count(frame: FrameType, what: str, argument: Any) -> None:
        counts["functions"] += what in ("call", "c_call")

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return counts["functions"]


def milliseconds(calls: list[Callable[[], object]]) -> float:
    """The median of them."""
    found = []
    for call in calls:
        begin = time.perf_counter()
        call()
        found.append(1000 * (time.perf_counter() - begin))
    return statistics.median(found)


def idle(num_engines: int) -> dict[str, float]:
    """A look for events while every engine has two calls to sample on and none has answered."""
    with pytest.MonkeyPatch.context() as patch:
        ray = FakeRay()
        rollout = RolloutConfig(mode="pinned", placement="separate", num_engines=num_engines)
        executor = executor_on(patch, ray, rollout, requests, {0: StoredVersion(0, 2, PROOFS)})
        for engine in range(num_engines):
            executor.carry(events.Start(engine, 0))
        num_started = 0
        while num_started < num_engines:
            num_started += sum(isinstance(event, events.Started) for event in executor.events(1.0))
        for engine in range(num_engines):
            executor.carry(events.Issue(engine, 0, Key(0, engine), (0,), engine, (None,)))
        executor.events(0.0)
        found = {"look_functions": functions_in(lambda: executor.events(0.0))}
        found["look_ms"] = milliseconds([lambda: executor.events(0.0)] * 200)
        found["pulse_ms"] = milliseconds([lambda: _later(ray, executor)] * 20)
        executor.close()
    return found


def _later(ray: FakeRay, executor: Any) -> None:
    """A look a second after the last one, when nodes are asked how far their engines are."""
    ray.now += 1.0
    executor.events(0.0)


class Serving:
    """A scheduler and its record; with 8 groups for each engine all are full and more waits, with 1 nothing does."""

    def __init__(self, num_engines: int, num_groups: int) -> None:
        """``num_groups``: for each engine."""
        groups = num_groups * num_engines
        rules = Rules(groups, GROUP_SIZE, 1, budget=2 * groups)
        self.scheduler = FleetScheduler(rules, EngineLimits(slots=4 * GROUP_SIZE), range(num_engines))
        self.record = FleetRecord(self.scheduler)
        self.issues: list[events.Issue] = []
        self.whole: list[Key] = []
        self._take(self.scheduler.begin(0.0))
        for engine in range(num_engines):
            self.handle(events.Started(engine, 0))
        for engine in range(num_engines):
            self.handle(events.Loaded(engine, 0, 0))

    def handle(self, event: events.Event) -> None:
        decisions = self.scheduler.handle(event, 1.0)
        self.record.hear(event, decisions)
        self._take(decisions)

    def _take(self, decisions: list[events.Decision]) -> None:
        self.issues += [one for one in decisions if isinstance(one, events.Issue)]
        self.whole += [one.key for one in decisions if isinstance(one, events.ScoreGroup)]

    def answers(self, number: int) -> list[Callable[[], object]]:
        """Of whole groups, of engines spread over the fleet."""
        chosen = self.issues[:: max(1, len(self.issues) // (number // GROUP_SIZE))][: number // GROUP_SIZE]
        said = [
            events.Answered(issue.engine, 0, issue.attempt, sample, 0, SimpleNamespace(num_sampled=100))
            for issue in chosen
            for sample in issue.samples
        ]
        return [lambda one=one: self.handle(one) for one in said]  # type: ignore[misc]

    def drops(self, number: int) -> list[Callable[[], object]]:
        return [lambda key=key: self.handle(events.Scored(key, False)) for key in self.whole[:number]]  # type: ignore[misc]


def scheduling(num_engines: int) -> dict[str, float]:
    """The scheduler's work and its record's: for an answer, for a dropped group, and once a second."""
    found: dict[str, float] = {}
    full, tail = Serving(num_engines, 8), Serving(num_engines, 1)
    for call in tail.answers(512):
        call()
    of_each = ("answer", full, full.answers), ("drop", full, full.drops), ("tail", tail, tail.drops)
    for name, serving, calls_of in of_each:
        calls, looks = calls_of(512), serving.scheduler._serving
        before, counted = looks.num_looked_at, calls[: len(calls) // 2]
        found[f"{name}_functions"] = statistics.fmean(map(functions_in, counted))
        found[f"{name}_looked_at"] = (looks.num_looked_at - before) / len(counted)
        found[f"{name}_ms"] = milliseconds(calls[len(calls) // 2 :])
    found["tick_ms"] = milliseconds([lambda: full.handle(events.Ticked())] * 50)
    return found


def ray_call_s() -> float:
    """Processor time of a thread that calls a worker and has its answer told, seconds."""
    import ray

    class Worker:
        def proceed(self, max_steps: int) -> list[int]:
            return []

    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        workers = [ray.remote(num_cpus=0)(Worker).remote() for _ in range(2)]
        ready: SimpleQueue[Any] = SimpleQueue()
        ray.get([worker.proceed.remote(16) for worker in workers])
        begin = time.thread_time()
        for call in range(NUM_CALLS):
            workers[call % 2].proceed.remote(16).future().add_done_callback(ready.put)
        for _ in range(NUM_CALLS):
            ready.get().result()
        return (time.thread_time() - begin) / NUM_CALLS
    finally:
        ray.shutdown()


def whole(num_engines: int, call_s: float) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
    groups = max(2, 640 * num_engines // 1024)
    deaths = 100 * num_engines // 1024
    found = run_fleet(num_engines, Rules(groups, GROUP_SIZE, 1, budget=2 * groups), deaths, death_each_s=0.5)
    share = (found.thread_s + call_s * found.num_calls) / STEP_S
    what = "the scheduler's thread, of a core, if they come in 60 s" + (", with Ray's part" if call_s else "")
    rows = [
        ("responses", found.num_responses),
        ("engines that died", found.num_deaths),
        ("responses lost", found.num_lost),
        ("responses doubled", found.num_doubled),
        ("responses of other weights or requests", found.num_wrong),
        ("calls of workers", found.num_calls),
        (what, f"{100 * share:.1f} %"),
    ]
    return rows, {**vars(found), "ray_call_s": call_s, "share": share}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[64, 256, 1024], help="(default: 64 256 1024)")
    parser.add_argument("--whole", type=int, default=1024, help="engines of the whole fleet; 0: none (default: 1024)")
    parser.add_argument("--ray", action="store_true", help="measure Ray's part of a call too")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if min(options.engines) < 8 or 0 < options.whole < 8 or options.whole < 0:
        parser.error("give at least 8 engines")
    platform.select("cpu")
    found = [{"engines": number, **idle(number), **scheduling(number)} for number in options.engines]
    rows = [(words, *(one[key] for one in found)) for key, words in ROWS.items()]
    text = table(["cost", *(f"{number:,} engines" for number in options.engines)], rows)
    results: dict[str, Any] = {"control": found}
    if options.whole:
        rows_of_whole, results["whole"] = whole(options.whole, ray_call_s() if options.ray else 0.0)
        text += "\n\n" + table([f"a whole fleet of {options.whole:,} engines", ""], rows_of_whole)
    publish("Control of a fleet", text, "no device", results, options.json)


if __name__ == "__main__":
    main()
