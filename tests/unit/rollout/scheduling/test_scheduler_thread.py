"""The thread between a scheduler and the loop: what it hands over, and that whatever ends it is raised at once."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from mega_rl.errors import InputError
from mega_rl.fleet import events
from mega_rl.fleet.engines import EngineLimits
from mega_rl.fleet.executor import Requests
from mega_rl.fleet.scheduler import FleetScheduler
from mega_rl.fleet.tickets import Key, Rules
from mega_rl.rollout.collect.collect import PromptGroup
from mega_rl.rollout.engine import Request
from mega_rl.rollout.requests import make_requests
from mega_rl.rollout.scheduling import scheduler_thread
from mega_rl.rollout.scheduling.fleet_state import decoded, encoded
from mega_rl.rollout.scheduling.scheduler_thread import SchedulerThread
from mega_rl.types import Prompt, Score, Trajectory
from tests.pretended.fleet_engines import PretendedExecutor
from tests.pretended.owners import not_handed

MANY_LIVES = EngineLimits(slots=3, restarts=10_000)
RULES = Rules(num_groups=2, group_size=2, total_steps=4, eta=1, budget=4)


def requests(key: Key, samples: Sequence[int]) -> list[Request]:
    prompt = Prompt(10 * key.step + key.ticket, (1, 2), "x", "0", "digits")
    made = make_requests([prompt], n=RULES.group_size, step=key.step, seed=3, max_tokens=6, temperature=1.0)
    return [made[sample] for sample in samples]


def score(key: Key, trajectory: Trajectory) -> Future[Score]:
    found: Future[Score] = Future()
    found.set_result(Score(float(trajectory.token_ids.sum() % 5)))
    return found


def differ(group: PromptGroup) -> bool:
    return len({score.value for score in group.scores}) > 1


@contextmanager
def running(
    engines: int = 2,
    death: int = 0,
    limits: EngineLimits = MANY_LIVES,
    scoring: Callable[[Key, Trajectory], Future[Score]] = score,
    state: tuple[dict[str, object], dict[Key, tuple[Score, ...]]] | None = None,
    executor: Callable[[Requests], PretendedExecutor] | None = None,
    limit_s: float = 60.0,
    seed: int = 0,
    rules: Rules = RULES,
) -> Iterator[tuple[SchedulerThread, PretendedExecutor]]:
    made = executor(requests) if executor else PretendedExecutor(requests, lambda v: v, True, seed=seed, death=death)
    scheduler = FleetScheduler(rules, limits, range(engines), None if state is None else state[0])
    thread = SchedulerThread(scheduler, made, scoring, differ, {} if state is None else state[1], limit_s)
    try:
        yield thread, made
    finally:
        thread.close()
    assert made.is_closed


def rest(thread: SchedulerThread, first: int = 0) -> list[object]:
    """All steps from ``first``, each published when it has been taken."""
    found = []
    for step in range(first, RULES.total_steps):
        if step > first:
            thread.published(step)
        found.append(thread.take(step))
    return found


def test_what_is_delivered_depends_on_no_engine_and_a_checkpoint_goes_on_exactly() -> None:
    with running(engines=1) as (thread, _):
        whole = rest(thread)
    assert all(step.kept for step in whole) and any(step.dropped for step in whole)
    with running(engines=3, death=50, seed=4) as (thread, _):
        assert [thread.take(0), thread.published(1)][0] == whole[0]
        assert thread.take(1) == whole[1]
        thread.saved(2)  # before its weights are published: what it waits for needs only older ones
        state = thread.committed(2, wait_s=60.0)
    assert state is not None and list(state[0]["steps"]) == [2]
    state = decoded(encoded(*state, not_handed))
    with running(engines=2, death=50, seed=5, state=state) as (thread, executor):
        assert thread.committed(2, wait_s=0.0) is None
        assert rest(thread, first=2) == whole[2:]
    assert set(dict.fromkeys(key.step for key in state[1])) == {2}


class Slow(PretendedExecutor):
    """Engines that answer for no step that is not asked for yet."""

    newest = 0

    def events(self, wait_s: float) -> list[events.Event]:
        held, newest = getattr(self, "_held", []), self.newest  # which the test's thread changes
        said = [*held, *super().events(wait_s)]
        self._held = [one for one in said if self._step_of(one) > newest]
        return [one for one in said if self._step_of(one) <= newest]

    @staticmethod
    def _step_of(event: events.Event) -> int:
        return event.result.prompt.index // 10 if isinstance(event, events.Answered) else 0


def test_a_saved_state_keeps_its_scores_however_late_it_is_closed() -> None:
    rules = Rules(num_groups=2, group_size=2, total_steps=5, eta=2, budget=4)
    made: list[Slow] = []

    def executor(requests: Requests) -> Slow:
        made.append(Slow(requests, lambda v: v, True, seed=1, death=0))
        return made[0]

    engines = 8  # more than hold answers back, which are to be free for groups in the place of others
    with running(engines, executor=executor, rules=rules) as (thread, _):
        for step in range(4):
            if step == 2:
                thread.saved(2)
            if step:
                thread.published(step)
            made[0].newest = step
            thread.take(step)
        state = thread.committed(2, wait_s=60.0)
    assert state is not None and list(state[0]["steps"]) == [2, 3]
    assert {key.step for key in decoded(encoded(*state, not_handed))[1]} == {2, 3}


def test_without_engines_the_loop_is_told_at_once() -> None:
    with running(engines=2, death=1000, limits=EngineLimits(restarts=1)) as (thread, _):
        for _ in range(2):  # and again
            with pytest.raises(InputError, match=r"no rollout engine is left \(engine \d: it was killed\)"):
                thread.take(0)
        with pytest.raises(InputError, match="no rollout engine"):
            thread.committed(1, wait_s=0.0)


def test_what_scoring_and_engines_raise_is_raised_in_the_loop() -> None:
    def failing(key: Key, trajectory: Trajectory) -> Future[Score]:
        found: Future[Score] = Future()
        found.set_exception(InputError("the reward exact_match is gone"))
        return found

    with running(scoring=failing) as (thread, _), pytest.raises(InputError, match="exact_match is gone"):
        thread.take(0)

    class Broken(PretendedExecutor):
        def carry(self, decision: events.Start | events.Kill | events.Load | events.Issue) -> None:
            raise ValueError("a defect")

    broken = lambda wanted: Broken(wanted, lambda v: v, True)  # noqa: E731
    with running(executor=broken) as (thread, _), pytest.raises(ValueError, match="a defect"):
        thread.take(0)


def test_a_wait_has_a_limit_that_names_who_is_waited_for() -> None:
    class Silent(PretendedExecutor):
        def events(self, wait_s: float) -> list[events.Event]:
            return [event for event in super().events(wait_s) if not isinstance(event, events.Answered)]

    silent = lambda wanted: Silent(wanted, lambda v: v, True)  # noqa: E731
    sentence = r"the samples of step 1 cannot be waited for any longer: nothing came for 0.3 s from engine 0 \("
    with running(engines=1, executor=silent, limit_s=0.3) as (thread, _), pytest.raises(RuntimeError, match=sentence):
        thread.take(0)


def test_a_thread_that_hangs_in_a_call_is_waited_for_no_longer_than_the_limit() -> None:
    is_over = threading.Event()

    class Hanging(PretendedExecutor):
        def events(self, wait_s: float) -> list[events.Event]:
            is_over.wait(60)
            return super().events(wait_s)

    hanging = lambda wanted: Hanging(wanted, lambda v: v, True)  # noqa: E731
    with running(engines=1, executor=hanging, limit_s=0.3) as (thread, _):
        with pytest.raises(RuntimeError, match="nothing came for 0.3 s"):
            thread.take(0)
        is_over.set()


def test_waits_for_a_checkpoint_in_pieces_are_one_wait() -> None:
    """The limit counts from the first of them, and a look without a wait has none."""

    class Silent(PretendedExecutor):
        def events(self, wait_s: float) -> list[events.Event]:
            return [event for event in super().events(wait_s) if not isinstance(event, events.Answered)]

    silent = lambda wanted: Silent(wanted, lambda v: v, True)  # noqa: E731
    with running(engines=1, executor=silent, limit_s=0.5) as (thread, _):
        for _ in range(3):
            assert thread.committed(1, wait_s=0.0) is None
        until = time.monotonic() + 30
        with pytest.raises(RuntimeError, match="what the checkpoint of step 1 has to hold cannot be waited for"):
            while time.monotonic() < until:
                assert thread.committed(1, wait_s=0.01) is None


def test_time_in_which_the_thread_had_no_turns_is_nobodys_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """200 s pass in ten turns of a thread that sleeps, and the loop looks in each of them; its limit is 50 s."""
    passed = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0])
    monkeypatch.setattr(scheduler_thread, "time", clock)
    monkeypatch.setattr(scheduler_thread, "TICK_S", 0.005)

    class Held(PretendedExecutor):
        def events(self, wait_s: float) -> list[events.Event]:
            if not self.num_issued or passed[0] >= 200.0:
                return super().events(wait_s)
            passed[0] += 20.0
            time.sleep(0.05)
            return []

    held = lambda wanted: Held(wanted, lambda v: v, True)  # noqa: E731
    with running(engines=1, executor=held, limit_s=50.0) as (thread, _):
        assert thread.take(0).kept
    assert passed[0] >= 200.0


@pytest.mark.parametrize("is_thread_awake", [True, False])
def test_only_time_in_which_the_thread_had_turns_counts_for_the_limits_of_engines(
    monkeypatch: pytest.MonkeyPatch, is_thread_awake: bool
) -> None:
    """100 s pass while an engine has work: in one turn of the thread, which slept, or in turns of half a second."""
    passed = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0])
    monkeypatch.setattr(scheduler_thread, "time", clock)
    whys: list[str] = []

    class Held(PretendedExecutor):
        """Engines whose answers come when the time has passed."""

        def events(self, wait_s: float) -> list[events.Event]:
            if not self.num_issued or passed[0] >= 100.0:
                return super().events(wait_s)
            passed[0] += 0.5 if is_thread_awake else 100.0
            return []

        def carry(self, decision: events.Start | events.Kill | events.Release | events.Load | events.Issue) -> None:
            if isinstance(decision, events.Kill) and passed[0] < 1000.0:
                whys.append(decision.why)
            super().carry(decision)

    held = lambda wanted: Held(wanted, lambda v: v, True)  # noqa: E731
    limits = EngineLimits(slots=3, progress_s=20.0, restarts=10_000)
    with running(engines=1, executor=held, limits=limits, limit_s=1000.0) as (thread, _):
        thread.take(0)
        passed[0] = 1000.0  # what is ended from now on is of the end
    late = [why for why in whys if "20 s were not enough for it to go on" in why]
    assert len(late) == len(whys) and bool(late) == is_thread_awake, whys


class Tail(PretendedExecutor):
    """Engines that hold every answer back and say how far they are; 0.05 s pass whenever they are asked."""

    def __init__(self, requests: Requests, until_s: float, steps_until_s: float = math.inf) -> None:
        """``until_s``: answers come then; ``steps_until_s``: until then engines make steps."""
        super().__init__(requests, lambda v: v, True)
        self.until_s, self.steps_until_s = until_s, steps_until_s
        self.now_s = 0.0
        self._held: list[events.Event] = []
        self._num_steps = 0

    def events(self, wait_s: float) -> list[events.Event]:
        self.now_s += 0.05
        self._num_steps += self.now_s < self.steps_until_s
        said = super().events(0.0)
        self._held += [event for event in said if isinstance(event, events.Answered)]
        others = [event for event in said if not isinstance(event, events.Answered)]
        if self.now_s >= self.until_s:
            self._held, others = [], [*others, *self._held]
        return [*others, *(events.Pulsed(name, engine.life, self._num_steps) for name, engine in self._engines.items())]


def tail(monkeypatch: pytest.MonkeyPatch, limits: EngineLimits, limit_s: float, **times: float) -> Tail:
    """One step of a fleet of such engines, whose time is that of the thread."""
    made: list[Tail] = []
    clock = SimpleNamespace(monotonic=lambda: made[0].now_s if made else 0.0)
    monkeypatch.setattr(scheduler_thread, "time", clock)
    monkeypatch.setattr(scheduler_thread, "TICK_S", 0.01)

    def executor(requests: Requests) -> Tail:
        made.append(Tail(requests, **times))
        return made[0]

    with running(engines=1, executor=executor, limits=limits, limit_s=limit_s) as (thread, _):
        assert thread.take(0).kept
    return made[0]


def test_a_response_may_last_five_times_every_limit_while_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = EngineLimits(progress_s=20.0, start_s=20.0, load_s=20.0, restarts=0)
    assert tail(monkeypatch, limits, limit_s=40.0, until_s=200.0).now_s >= 200.0


def test_a_response_that_does_not_grow_ends_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = EngineLimits(progress_s=20.0, start_s=20.0, load_s=20.0, restarts=0)
    with pytest.raises(InputError, match="20 s were not enough for it to go on with"):
        tail(monkeypatch, limits, limit_s=40.0, until_s=200.0, steps_until_s=100.0)


def test_pulses_without_a_step_are_no_reason_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = EngineLimits(progress_s=1e9, start_s=1e9, load_s=1e9)
    with pytest.raises(RuntimeError, match="nothing came for 40 s from engine 0"):
        tail(monkeypatch, limits, limit_s=40.0, until_s=1e9, steps_until_s=100.0)
