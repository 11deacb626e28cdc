"""A whole fleet on a Ray without processes: real scheduler, thread and executor; engines take their time and die."""

from __future__ import annotations

import pickle
import random
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mega_rl import platform
from mega_rl.config.schema.sampling import RolloutConfig
from mega_rl.fleet.engines import EngineLimits
from mega_rl.fleet.scheduler import FleetScheduler
from mega_rl.fleet.tickets import Key, Rules
from mega_rl.rollout.collect.collect import FleetGroup
from mega_rl.rollout.collect.handed_trajectories import OwnerAddress, hand_over
from mega_rl.rollout.engine import Request
from mega_rl.rollout.remote.weight_store import StoredVersion, StoreForm
from mega_rl.rollout.scheduling import scheduler_thread
from mega_rl.rollout.scheduling.scheduler_thread import Delivered, SchedulerThread
from mega_rl.types import HandedTrajectory, Prompt, Response, Score, Trajectory
from tests.pretended.owners import Owners
from tests.pretended.remote.fake_ray import PROOFS, Answer, FakeRay, Worker, executor_on

STEP_S = 0.025  # of an engine
EXPERTS = np.zeros((4, 48, 8), np.uint8)  # of the tokens of a response, where they are asked for
MAX_LENGTH = 2400  # steps of an engine for a response: 60 s
START_S, LOAD_S = 5.0, 1.0
DROPPED = 0.1  # of the groups
LIMITS = EngineLimits(progress_s=30.0, start_s=60.0, load_s=60.0, restarts=1000)


@dataclass(frozen=True)
class FleetRun:
    """What became of a run."""

    num_responses: int  # that were delivered in kept groups
    num_lost: int
    num_doubled: int
    num_wrong: int  # of other weights or another request
    num_deaths: int
    num_calls: int  # of workers
    num_bytes: int  # that workers answered rank 0 when they were told to sample on, pickled
    num_handed: int  # responses that engines handed to other ranks than 0 or to its node, those nobody heard of too
    num_forgotten: int  # of these, when all steps are over
    time_s: float  # that has passed for the engines
    thread_s: float  # processor time of the scheduler's thread, without what engines cost there


def length(request: Request) -> int:
    """Steps of an engine: most responses are short, and some take as long as they may."""
    return min(MAX_LENGTH, 1 + int(random.Random(request.seed).lognormvariate(6.0, 1.0)))


class TimedWorker(Worker):
    """Its calls take time; ``proceed`` ends with the first response that does."""

    def __init__(self, ray: TimedRay, process: int, rank: int) -> None:
        super().__init__(process, rank)
        self._ray = ray
        self._owners: Sequence[OwnerAddress] = ()
        self._steps: dict[int, int] = {}  # by attempt
        self._doing: tuple[float, Answer, Any] | None = None  # when it ends, and what is answered then

    def go_on(self) -> None:
        if self.state != "runs":
            super().go_on()
        while self._doing is None and self.calls:
            name, arguments, answer = self.calls.pop(0)
            self._ray.num_calls += 1
            begin = self.num_steps
            value = getattr(self, f"do_{name}")(*arguments)
            took_s = {"start": START_S, "load": LOAD_S}.get(name, STEP_S * (self.num_steps - begin))
            self._doing = self._ray.now + took_s, answer, value
            self._end()
        self._end()

    def _end(self) -> None:
        if self._doing is not None and self._ray.now >= self._doing[0] and self.state == "runs":
            _, answer, answer.value = self._doing
            self._doing = None
            answer.come()

    def do_issue(
        self, step: int, attempt: int, samples: Sequence[int], requests: Sequence[Request], *pictures: Any
    ) -> None:
        self._steps[attempt] = step
        self.todo |= {(attempt, sample): (r, length(r)) for sample, r in zip(samples, requests, strict=True)}

    def do_attach(self, form: StoreForm, owners: Sequence[OwnerAddress]) -> None:
        self._owners = owners

    def do_proceed(self, max_steps: int) -> list[tuple[int, int, Response]]:
        if not self.todo:
            return []
        ended = super().do_proceed(min([max_steps, *(left for _, left in self.todo.values())]))
        told = [(a, s, hand_over(one, self._owners, self._steps[a], a, s)) for a, s, one in ended]
        self._ray.num_bytes += len(pickle.dumps(told, protocol=5))
        return told

    def answer(self, request: Request) -> Trajectory:
        found = super().answer(request)
        return replace(found, routed_experts=EXPERTS) if request.with_routing else found


class TimedRay(FakeRay):
    """Kills a working engine now and then."""

    def __init__(self, num_deaths: int, each_s: float) -> None:
        super().__init__(lambda process, rank: TimedWorker(self, process, rank))
        self.num_deaths, self.num_calls, self.num_bytes, self.spent_s = 0, 0, 0, 0.0
        self._wanted, self._each_s, self._next_s = num_deaths, each_s, 2 * START_S
        self._random = random.Random(0)

    def pass_time(self, seconds: float) -> None:
        begin = time.thread_time()
        super().pass_time(seconds)
        if self.num_deaths < self._wanted and self.now >= self._next_s:
            working = [worker for worker in self.workers if worker.state == "runs" and worker.todo]
            if working:
                self._next_s = self.now + self._each_s
                self._random.choice(working).state = "gone"
                self.num_deaths += 1
        self.spent_s += time.thread_time() - begin


class MeasuredThread(SchedulerThread):
    """Knows how much of a processor its thread has used."""

    thread_s = 0.0

    def _run(self) -> None:
        super()._run()
        self.thread_s = time.thread_time()


def requests(key: Key, samples: Sequence[int], with_routing: bool = False) -> list[Request]:
    prompt = Prompt(1_000_000 * key.step + key.ticket, (5, 6), "", "", "test")
    seed = 100 * prompt.index
    return [Request(prompt, sample, seed + sample, max_tokens=8, with_routing=with_routing) for sample in samples]


def score(key: Key, trajectory: Response) -> Future[Score]:
    found: Future[Score] = Future()
    found.set_result(Score(float(random.Random(100 * key.step + key.ticket).random() > DROPPED)))
    return found


def is_kept(group: FleetGroup) -> bool:
    return group.scores[0].value > 0


def run_fleet(
    num_engines: int, rules: Rules, num_deaths: int, death_each_s: float, num_nodes: int = 1, with_routing: bool = False
) -> FleetRun:
    """A whole run whose trainer takes no time, on so many nodes."""
    platform.select("cpu")
    ray, stored = TimedRay(num_deaths, death_each_s), {0: StoredVersion(0, 2, PROOFS)}
    rollout = RolloutConfig(mode="pinned", placement="separate", num_engines=num_engines)
    counts: Counter[str] = Counter()
    asked = partial(requests, with_routing=with_routing)
    with pytest.MonkeyPatch.context() as patch, Owners(num_nodes if num_nodes > 1 else 0) as owners:
        patch.setattr(scheduler_thread, "time", SimpleNamespace(monotonic=lambda: ray.now))
        executor = executor_on(patch, ray, rollout, asked, stored, owners=owners.addresses)
        scheduler = FleetScheduler(rules, LIMITS, range(num_engines))
        thread = MeasuredThread(scheduler, executor, score, is_kept, {}, limit_s=1e6)
        try:
            for step in range(rules.total_steps):
                _count(counts, step, rules, thread.take(step), owners)
                stored[step + 1] = StoredVersion(step + 1, 2, PROOFS)
                thread.published(step + 1)
        finally:
            thread.close()
        num_handed = sum(map(len, owners.taken))
        num_forgotten = sum(len(one.forget_before(rules.total_steps)) for one in owners.handed)
    wanted = rules.total_steps * rules.num_groups * rules.group_size
    return FleetRun(
        counts["responses"],
        wanted - counts["responses"],
        counts["doubled"],
        counts["wrong"],
        ray.num_deaths,
        ray.num_calls,
        ray.num_bytes,
        num_handed,
        num_forgotten,
        ray.now,
        thread.thread_s - ray.spent_s,
    )


def _count(counts: Counter[str], step: int, rules: Rules, delivered: Delivered, owners: Owners) -> None:
    """Responses of a step: of every kept group as many as it has samples, each of its weights and request."""
    assert all(len(group.trajectories) == rules.group_size for group in delivered.dropped.values())
    seen: set[tuple[int, int]] = set()
    for key, group in delivered.kept.items():
        for wanted, told in zip(requests(key, range(rules.group_size)), group.trajectories, strict=True):
            assert isinstance(told, HandedTrajectory) == bool(owners.addresses), "told with its tokens"
            found = owners.whole(told)
            name = found.prompt.index, found.sample_index
            counts["doubled"] += name in seen
            counts["responses"] += name not in seen
            seen.add(name)
            tokens = [rules.oldest_version(step) + 1, wanted.prompt.index, wanted.seed]
            counts["wrong"] += found.sampled_ids.tolist() != tokens
