"""How much of sampling a run hides behind training: a real scheduler, engines and a trainer that sleep.

    python -m benchmarks.asynchronous.overlap [--steps N] [--groups N] [--pace SECONDS] [--quick] [--json F]

The scheduler thread of a run deals tickets to pretended engines. An engine makes so many tokens a second for all of its
responses together; it and the trainer only sleep, so neither slows the other down on a machine with few cores, and what
is left is what the scheduler's rules and its thread cost. Lengths are log-normal (sigma 0.5), drawn by ticket and
sample.

Three parts. *Equal times*: two engines, which take the given seconds for a step's tokens if neither waits, and a
trainer that takes as long; the slower part is the longer of what the synchronous run waits for a step and what the
trainer takes; beside it stands what ``tools/simulate.py`` predicts of the same lengths and speeds. *One slow engine*:
one engine is four times slower than the other, and the trainer takes no time; the fluid limit is the speed of both
together if neither ever waited. The first steps, which fill the pipeline, are not counted. *Reference pass*: what a
synchronous step could hide of it behind its own sampling, by what may be computed before all responses have ended; no
time passes for it, it is arithmetic.
"""

from __future__ import annotations

import argparse
import heapq
import math
import multiprocessing
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.report import publish, table
from mega_rl.fleet import events
from mega_rl.fleet.engines import EngineLimits
from mega_rl.fleet.scheduler import FleetScheduler
from mega_rl.fleet.tickets import Key, Rules
from mega_rl.rollout.scheduling.scheduler_thread import SchedulerThread
from mega_rl.simulation.choice import SimulatedBatch, SimulatedSetting, simulate
from mega_rl.simulation.cluster import Cluster
from mega_rl.simulation.lengths import LogNormal
from mega_rl.types import Prompt, Score, Trajectory

GROUP = 8  # responses of a group
SIGMA = 0.5  # of the logarithm of a length
SLOWER = 4  # times
TOKENS = 1000  # of a response of mean length, in the simulation
WARM_UP = 4  # steps that are not counted
NEVER = 1e9
ROUNDING = 1e-6  # tokens; of a clock that counts from the start of the machine
MODES = (("synchronous", 0, True), ("pinned", 1, True), ("pinned", 2, True), ("pinned", 4, True)) + (
    ("in_flight", 1, False),
    ("in_flight", 2, False),
)


def length(key: Key, sample: int) -> float:
    """Tokens of a response, of mean 1."""
    return random.Random(f"{key.step}/{key.ticket}/{sample}").lognormvariate(-(SIGMA**2) / 2, SIGMA)


@dataclass
class Engine:
    life: int
    speed: float  # tokens a second, of all responses together
    at_s: float  # until when its tokens are made
    version: int = -1
    loading: int | None = None
    left: dict[tuple[int, int], tuple[float, Trajectory]] = field(default_factory=dict)  # tokens, the answer to come

    def next_end_s(self) -> float:
        """When a response ends, if no other comes."""
        return (
            self.at_s + min(left for left, _ in self.left.values()) * len(self.left) / self.speed
            if self.left
            else NEVER
        )


class PacedExecutor:
    """A ``FleetExecutor`` of engines that make tokens as time passes."""

    def __init__(self, speeds: Sequence[float]) -> None:
        self._speeds = speeds
        self._engines: dict[int, Engine] = {}
        self._said: list[events.Event] = []

    def carry(self, decision: events.Start | events.Kill | events.Release | events.Load | events.Issue) -> None:
        assert not isinstance(decision, events.Release), "none leaves"
        number, life = decision.engine, decision.life
        if isinstance(decision, events.Start):
            self._engines[number] = Engine(life, self._speeds[number], time.monotonic())
            self._said.append(events.Started(number, life))
        elif isinstance(decision, events.Kill):
            del self._engines[number]
        elif isinstance(decision, events.Load):
            self._engines[number].version = decision.version
            self._said.append(events.Loaded(number, life, decision.version))
        else:
            engine = self._engines[number]
            self._advance(number, time.monotonic())
            for sample in decision.samples:
                prompt = Prompt(decision.key.ticket, (1,), "", "", "")
                answer = Trajectory.single_turn(prompt, sample, (2,), (-1.0,), "", "stop", engine.version)
                engine.left[decision.attempt, sample] = length(decision.key, sample), answer

    def events(self, wait_s: float) -> list[events.Event]:
        until = time.monotonic() + wait_s
        while not self._said:
            now = time.monotonic()
            for number in self._engines:
                self._advance(number, now)
            if self._said or now >= until:
                break
            following = min((engine.next_end_s() for engine in self._engines.values()), default=NEVER)
            time.sleep(max(0.0, min(until, following) - now))
        said, self._said = self._said, []
        return said

    def _advance(self, number: int, now: float) -> None:
        """Make the tokens of an engine up to now; whoever ends on the way leaves its share to the others."""
        engine = self._engines[number]
        while engine.left and engine.at_s < now:
            end_s = engine.next_end_s()
            made = (min(end_s, now) - engine.at_s) * engine.speed / len(engine.left)
            engine.at_s = min(end_s, now)
            for place, (left, answer) in list(engine.left.items()):
                engine.left[place] = left - made, answer
                if left - made <= ROUNDING:
                    del engine.left[place]
                    version = answer.spans[0].version
                    self._said.append(events.Answered(number, engine.life, *place, version, answer))
        engine.at_s = now

    def close(self) -> None:
        self._engines.clear()


def score(key: Key, trajectory: Trajectory) -> Future[Score]:
    found: Future[Score] = Future()
    found.set_result(Score(0.0))
    return found


@dataclass(frozen=True)
class Figures:
    """Of the counted steps of one run."""

    step_s: float
    wait_s: float  # of the trainer, a step
    tokens_per_s: float


def measured(groups: int, steps: int, eta: int, is_pinned: bool, speeds: Sequence[float], train_s: float) -> Figures:
    """Run the loop of a trainer that sleeps ``train_s`` a step."""
    rules = Rules(groups, GROUP, steps + eta, eta, is_pinned)  # the last counted steps have others in the air too
    scheduler = FleetScheduler(rules, EngineLimits(slots=10_000), range(len(speeds)))
    thread = SchedulerThread(scheduler, PacedExecutor(speeds), score, lambda scores: True, {}, limit_s=NEVER)
    ends, waits, tokens = [], [], 0.0
    try:
        for step in range(steps):
            if step:
                thread.published(step)
            begin = time.monotonic()
            delivered = thread.take(step)
            waits.append(time.monotonic() - begin)
            time.sleep(train_s)
            ends.append(time.monotonic())
            if step >= WARM_UP:
                tokens += sum(length(key, sample) for key in delivered.kept for sample in range(GROUP))
    finally:
        thread.close()
    seconds = ends[-1] - ends[WARM_UP - 1]
    return Figures(seconds / (steps - WARM_UP), statistics.mean(waits[WARM_UP:]), tokens / seconds)


def drawn(step: int, num_groups: int, group_size: int) -> npt.NDArray[np.int64]:
    """The simulator's ``Lengths``: the same ones, in tokens."""
    rows = [[length(Key(step, ticket), sample) for sample in range(group_size)] for ticket in range(num_groups)]
    return np.maximum(1, (TOKENS * np.array(rows)).round()).astype(np.int64)


def predicted(groups: int, steps: int, pace_s: float, mode: str, eta: int) -> float:
    """Seconds of a step of two engines and a trainer of equal times, simulated."""
    per_response_s = 2 * pace_s / (groups * GROUP * TOKENS)
    cluster = Cluster(2, 10_000, 0.0, per_response_s, pace_s, prefill_tokens_per_s=math.inf)
    return simulate(SimulatedSetting(mode, eta, 1, cluster), SimulatedBatch(groups, GROUP, drawn), steps).outcome.step_s


def all_measured(groups: int, steps: int, pace_s: float) -> dict[str, list[dict[str, Any]]]:
    """Both parts in all modes, side by side: they only sleep, and have the same disturbances."""
    speed = groups * GROUP / pace_s
    parts = {"equal": ([speed / 2] * 2, pace_s), "slow": ([speed, speed / SLOWER], 0.0)}
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(len(parts) * len(MODES), mp_context=context) as pool:
        under_way = {
            part: [pool.submit(measured, groups, steps, eta, is_pinned, *rest) for _, eta, is_pinned in MODES]
            for part, rest in parts.items()
        }
        found = {part: [one.result() for one in of_part] for part, of_part in under_way.items()}
    predicted_s = [predicted(groups, steps, pace_s, mode, eta) for mode, eta, _ in MODES]
    names = [{"mode": mode, "max_staleness": eta} for mode, eta, _ in MODES]
    synchronous = found["equal"][0]
    slower_s = max(synchronous.wait_s, pace_s)
    equal = [
        {
            "step_s": f.step_s,
            "wait_s": f.wait_s,
            "throughput": synchronous.step_s / f.step_s,
            "slower": f.step_s / slower_s,
            "predicted_s": simulated_s,
            "of_measured": simulated_s / f.step_s,
        }
        for f, simulated_s in zip(found["equal"], predicted_s, strict=True)
    ]
    slow = [{"step_s": f.step_s, "of_fluid_limit": f.tokens_per_s / sum(parts["slow"][0])} for f in found["slow"]]
    return {
        part: [n | r for n, r in zip(names, rows, strict=True)] for part, rows in (("equal", equal), ("slow", slow))
    }


# What a synchronous step samples: responses that an engine takes at a time, sigma and the longest length.
SAMPLED = {
    "all at once": (512, 1.0, 20480),
    "all at once, many cut": (512, 1.0, 2048),
    "in 4 waves": (32, 1.0, 20480),
    "in 4 waves, many cut": (32, 1.0, 2048),
}
# What may be computed early: into how many parts the prompts are cut, and whether the parts wait for each other.
EARLY = {
    "8 parts, in the order of their prompts": (8, True),
    "groups, in the order of their prompts": (128, True),
    "8 parts, whichever has ended": (8, False),
    "groups, whichever has ended": (128, False),
}
NUM_GROUPS, NUM_ENGINES, MEDIAN = 128, 16, 750  # groups of 16 responses
FIXED_S, PER_RESPONSE_S = 5.8e-3, 6e-5  # of a decoding step; docs/simulate.md
PASS = 0.15  # of the time of the sampling: the forward pass over everything that was sampled


def ends_of(lengths: npt.NDArray[np.int64], slots: int) -> npt.NDArray[np.float64]:
    """When each response [group, sample] ends; groups go in their order to the engine with the fewest responses."""
    ends, size = np.zeros(lengths.shape), lengths.shape[1]
    for engine in range(NUM_ENGINES):
        waiting = [(g, s) for g in range(engine, len(lengths), NUM_ENGINES) for s in range(size)][::-1]
        made, now, under_way = 0.0, 0.0, list[tuple[float, int, int]]()  # tokens of a response that was always there
        while waiting or under_way:
            while waiting and len(under_way) < slots:
                place = waiting.pop()
                heapq.heappush(under_way, (made + lengths[place], *place))
            step_s = FIXED_S + PER_RESPONSE_S * len(under_way)
            end, *place_ended = heapq.heappop(under_way)
            now, made = now + (end - made) * step_s, end
            ends[tuple(place_ended)] = now
    return ends


def hidden(lengths: npt.NDArray[np.int64], ends: npt.NDArray[np.float64], num_parts: int, is_ordered: bool) -> float:
    """Share of the pass that is over when the last response ends; no part is begun before all of it has ended."""
    parts = np.array_split(np.arange(len(lengths)), num_parts)
    ready = [(float(ends[part].max()), PASS * ends.max() * lengths[part].sum() / lengths.sum()) for part in parts]
    now = 0.0
    for end, seconds in ready if is_ordered else sorted(ready):
        now = max(now, end) + seconds
    last = float(ends.max())
    return max(0.0, 1 - (now - last) / (PASS * last))


def all_hidden(num_steps: int) -> list[dict[str, Any]]:
    """Mean over steps, for everything of ``EARLY`` and ``SAMPLED``."""
    found: dict[str, dict[str, Any]] = {name: {"early": name} for name in EARLY}
    for sampled, (slots, sigma, longest) in SAMPLED.items():
        lengths = [LogNormal(MEDIAN, sigma, longest)(step, NUM_GROUPS, 16) for step in range(num_steps)]
        ends = [ends_of(of_step, slots) for of_step in lengths]
        for name, rule in EARLY.items():
            shares = [hidden(*of_step, *rule) for of_step in zip(lengths, ends, strict=True)]
            found[name][sampled] = statistics.mean(shares)
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help=f"the first {WARM_UP} are not counted")
    parser.add_argument("--groups", type=int, default=32, help=f"groups of {GROUP} responses in a step")
    parser.add_argument("--pace", type=float, default=5.0, help="seconds that the engines take for a step's tokens")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.steps, options.groups, options.pace = WARM_UP + 2, 2, 0.02
    if options.steps <= WARM_UP:
        parser.error(f"--steps {options.steps}: the first {WARM_UP} are not counted, so give {WARM_UP + 1} or more")
    if options.groups < 1 or options.pace <= 0:
        parser.error(f"--groups {options.groups} and --pace {options.pace:g}: both must be above 0")
    arguments = options.groups, options.steps, options.pace
    found = all_measured(*arguments)
    found["reference"] = all_hidden(num_steps=1 if options.quick else 8)
    first = ["mode, max_staleness", "step s", "trainer waits s", "throughput / synchronous", "step / slower part"]
    first += ["simulated step s", "simulated / measured"]
    second = ["mode, max_staleness", "step s", "throughput / fluid limit"]
    texts = [
        table(header, [[f"{row['mode']}, {row['max_staleness']}", *list(row.values())[2:]] for row in rows])
        for header, rows in ((first, found["equal"]), (second, found["slow"]))
    ]
    third = table(["hidden, by what is computed early", *SAMPLED], [list(row.values()) for row in found["reference"]])
    text = f"Equal times:\n\n{texts[0]}\n\nOne engine {SLOWER}x slower:\n\n{texts[1]}\n\nReference pass:\n\n{third}"
    results = {**found, "groups": options.groups, "steps": options.steps, "pace_s": options.pace}
    publish("Overlap of sampling and training", text, "cpu", results, options.json)


if __name__ == "__main__":
    main()
