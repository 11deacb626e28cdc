"""What the engines of a run do, moment by moment: for the timeline, for metrics of a step and for who asks."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mega_rl.fleet import events, membership, tickets
from mega_rl.fleet.engines import Condition, Engine
from mega_rl.fleet.events import Decision, Event
from mega_rl.fleet.scheduler import FleetScheduler
from mega_rl.observe.timeline import Activity, GrowingTrace

TIMELINE = "timeline.json"  # in the run's fleet/
WINDOW_S = 60.0  # of the tokens a second
FLEET, TRAINER = "fleet", "trainer"  # lanes, beside one for each engine
SHOWN_AS = {"generate": "waiting", "sync": "writing weights"}  # phases of the trainer
STARTING, LOADING, SAMPLING, IDLE, OUT = "starting", "loading weights", "sampling", "waiting", "out of use"


def doing(engine: Engine) -> str:
    if engine.condition is Condition.GONE:
        return OUT
    if engine.condition is Condition.STARTING:
        return STARTING
    if engine.loading is not None:
        return LOADING
    return SAMPLING if engine.load else IDLE


@dataclass
class Course:
    """One engine's."""

    doing: str
    since_s: float
    version: int  # of the weights that it samples with, or loads
    seconds: defaultdict[str, float] = field(
        default_factory=lambda: defaultdict(float)
    )  # by what it did, since the last step
    tokens: deque[tuple[float, int]] = field(default_factory=deque)  # when responses ended, and their tokens


class FleetRecord:
    """One thread calls ``hear``, any thread the other methods."""

    def __init__(self, scheduler: FleetScheduler, directory: Path | None = None) -> None:
        """``directory``: for the timeline; None: there is none."""
        self._scheduler = scheduler
        self._courses: dict[int, Course] = {}
        self._counts: Counter[str] = Counter()
        self._begin_s = self._figures_s = time.monotonic()
        self._trace = None if directory is None else GrowingTrace(directory / TIMELINE)
        # The timeline goes on where an earlier start left it.
        self._origin_s = self._begin_s - (0.0 if self._trace is None else self._trace.end_s)
        self._lock = threading.Lock()

    # What the scheduler's thread tells.

    def hear(self, event: Event | None, decisions: Sequence[Decision]) -> None:
        """Take in what happened, when the scheduler has handled it; None: it has just begun."""
        now = time.monotonic()
        heard = [*decisions] if event is None else [event, *decisions]
        touched = {engine for one in heard if (engine := getattr(one, "engine", None)) is not None}
        with self._lock:
            if isinstance(event, events.Answered):
                course = self._courses.get(event.engine)
                if course is not None and course.doing in (SAMPLING, LOADING):  # else it is late
                    course.tokens.append((now, event.result.num_sampled))
                    _forget(course.tokens, now)
            self._count(event, decisions, now)
            for number in touched:
                self._turn(number, now)

    def _count(self, event: Event | None, decisions: Sequence[Decision], now: float) -> None:
        if isinstance(event, events.Joined | events.Left):
            words = "joined" if isinstance(event, events.Joined) else "left"
            self._counts[words] += 1
            self._add(FLEET, f"engine {event.engine} {words}", now, now, {"engines": self._num_in_use()})
        for decision in decisions:
            if isinstance(decision, events.Start) and decision.life and not isinstance(event, events.Joined):
                self._counts["restarts"] += 1
            elif isinstance(decision, events.Kill) and not isinstance(event, events.Left):
                self._add(FLEET, f"engine {decision.engine} ended", now, now, {"why": decision.why})

    def _turn(self, number: int, now: float) -> None:
        """Begin a new activity of an engine if it does something else than before."""
        engine = self._scheduler.engines.get(number)
        if engine is None:
            return
        present, course = doing(engine), self._courses.get(number)
        version = engine.version if engine.loading is None else engine.loading
        if course is None:
            self._courses[number] = Course(present, now, version)
        elif (course.doing, course.version) != (present, version):
            self._end(number, course, now)
            course.doing, course.since_s, course.version = present, now, version

    def _end(self, number: int, course: Course, now: float) -> None:
        course.seconds[course.doing] += now - max(course.since_s, self._figures_s)
        if course.doing in (STARTING, LOADING, SAMPLING):
            details = {} if course.doing == STARTING else {"version": tickets.shown(course.version)}
            self._add(f"engine {number}", course.doing, course.since_s, now, details)

    def _add(self, lane: str, name: str, begin_s: float, end_s: float, details: Mapping[str, object]) -> None:
        if self._trace is not None:
            self._trace.add(Activity(lane, name, begin_s - self._origin_s, end_s - self._origin_s, details))

    def _num_in_use(self) -> int:
        return len(membership.in_use(self._scheduler.engines))

    # What others ask and tell.

    def of_trainer(self, phase: str, seconds: float, step: int) -> None:
        """A phase of the trainer has just ended, in a step that counts from 1; 0: before the first."""
        now = time.monotonic()
        details = {"step": step - 1} if step else {}  # from 0 in the timeline
        self._add(TRAINER, SHOWN_AS.get(phase, phase), now - seconds, now, details)

    def flush(self) -> None:
        """Write the timeline so far."""
        if self._trace is not None:
            self._trace.flush()

    def close(self) -> None:
        """End what goes on, and write it."""
        now = time.monotonic()
        with self._lock:
            for number, course in self._courses.items():
                self._end(number, course, now)
                course.since_s = now
        self.flush()

    def tokens_per_s(self) -> dict[int, float]:
        """By engine: of the responses that ended lately."""
        now = time.monotonic()
        seconds = max(1e-3, min(WINDOW_S, now - self._begin_s))
        with self._lock:
            for course in self._courses.values():
                _forget(course.tokens, now)
            return {n: sum(t for _, t in course.tokens) / seconds for n, course in self._courses.items()}

    def figures(self) -> dict[str, float]:
        """Metrics of the time since the last call."""
        now, window = time.monotonic(), self._scheduler.window
        with self._lock:
            engines = [engine for engine in list(self._scheduler.engines.values()) if doing(engine) != OUT]
            seconds: defaultdict[str, float] = defaultdict(float)
            for course in self._courses.values():
                course.seconds[course.doing] += now - max(course.since_s, self._figures_s)
                for name, value in course.seconds.items():
                    seconds[name] += value
                course.seconds.clear()
            self._figures_s = now
            counts = Counter(self._counts)
        there = sum(value for name, value in seconds.items() if name != OUT)
        return {
            "fleet/engines": float(len(engines)),
            "fleet/engines_serving": float(sum(engine.serves for engine in engines)),
            "fleet/busy_fraction": seconds[SAMPLING] / max(there, 1e-9),
            "fleet/loading_fraction": seconds[LOADING] / max(there, 1e-9),
            "fleet/responses_in_hand": float(window.num_under_way),
            "fleet/responses_waiting": float(window.num_waiting),
            "fleet/steps_in_the_air": float(window.num_begun - window.trained),
            "fleet/late_answers": float(window.num_refused),
            **{f"fleet/{name}": float(counts[name]) for name in ("restarts", "joined", "left")},
        }


def _forget(tokens: deque[tuple[float, int]], now: float) -> None:
    while tokens and tokens[0][0] < now - WINDOW_S:
        tokens.popleft()
