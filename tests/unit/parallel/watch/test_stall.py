"""Who is named, and when, on a clock of the test's own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, strategies as st

from mega_rl.parallel.watch.stall import START, Beat, StallDetector, Verdict

LIMIT, START_LIMIT, PERIOD = 100.0, 300.0, 5.0


@dataclass
class World:
    """Ranks that beat, work, wait and stop; the detector is told everything once a period."""

    num_ranks: int = 3
    now: float = 0.0
    stopped: set[int] = field(default_factory=set)
    working: set[int] = field(default_factory=lambda: {0, 1, 2})

    def __post_init__(self) -> None:
        self.detector = StallDetector(LIMIT, START_LIMIT, self.now)
        self.beats = [
            Beat(rank, f"host{rank}", "machine", 1000 + rank, "born", 0, 0, "generate", 7)
            for rank in range(self.num_ranks)
        ]

    def change(self, rank: int, **fields: object) -> None:
        self.beats[rank] = replace(self.beats[rank], **fields)  # type: ignore[arg-type]

    def pass_time(self, seconds: float) -> Verdict | None:
        """The first verdict within so many seconds."""
        end = self.now + seconds
        while self.now < end:
            self.now += PERIOD
            for rank, beat in enumerate(self.beats):
                if rank not in self.stopped:
                    self.change(rank, number=beat.number + 1, count=beat.count + (rank in self.working))
                self.detector.hear(self.beats[rank], self.now)
            self.detector.look(self.now)
            if found := self.detector.silent(self.now) or self.detector.stuck(self.now):
                return found
        return None


def named(verdict: Verdict | None) -> int:
    assert verdict is not None, "nobody was named"
    return verdict.rank


def test_a_run_that_moves_goes_on() -> None:
    assert World().pass_time(100 * LIMIT) is None


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_stopped_rank_is_named_with_all_that_is_known_of_it(rank: int) -> None:
    world = World()
    assert world.pass_time(50) is None
    world.stopped.add(rank)
    verdict = world.pass_time(LIMIT + PERIOD)
    assert verdict == Verdict(
        rank,
        "machine",
        1000 + rank,
        "born",
        f"rank {rank} (host host{rank}, pid {1000 + rank}) has made no progress for 100 s: last phase `generate`, step "
        "7; its process is gone or stopped, or keeps its interpreter busy",
    )
    assert world.now - 50 == LIMIT


def test_a_stopped_rank_is_named_although_the_others_came_to_a_halt_before_it() -> None:
    """They wait for what it was about to send, in calls that nobody can look into."""
    world = World(working={1})
    world.pass_time(50)
    world.working, world.stopped = set(), {1}
    assert named(world.pass_time(LIMIT + PERIOD)) == 1


def test_one_slow_engine_is_not_ended_while_it_comes_on() -> None:
    """A response of forty minutes, and every other rank waits for it."""
    world = World(working={2})
    for rank in (0, 1):
        world.change(rank, waits_for="the other ranks to end sampling", is_excused=True)
    assert world.pass_time(24 * LIMIT) is None
    world.working = set()
    verdict = world.pass_time(LIMIT + PERIOD)
    assert named(verdict) == 2 and verdict is not None and "it is working, or stuck" in verdict.sentence


def test_a_phase_that_begins_is_progress() -> None:
    world = World(working=set())
    for step in range(10):
        world.change(1, phase=f"phase {step}")
        assert world.pass_time(LIMIT - PERIOD) is None
        world.change(2, step=step)
        assert world.pass_time(LIMIT - PERIOD) is None


def test_who_came_to_a_halt_first_is_named() -> None:
    world = World(working={0, 1})
    world.pass_time(20)
    world.working = {0}
    world.pass_time(20)
    world.working = set()
    assert named(world.pass_time(2 * LIMIT)) == 2


def test_who_waits_for_others_is_named_last() -> None:
    world = World(working={1})
    world.change(0, waits_for="the other ranks", is_excused=True)
    world.change(2, waits_for="the other ranks", is_excused=True)
    world.pass_time(50)
    world.working = set()
    assert named(world.pass_time(LIMIT + PERIOD)) == 1
    world.change(1, waits_for="the other ranks", is_excused=True)
    assert named(world.pass_time(PERIOD)) == 0


def test_what_it_waits_for_is_told() -> None:
    world = World(working=set())
    for rank in (1, 2):
        world.change(rank, waits_for="the other ranks", is_excused=True)
    world.change(0, waits_for="rollout engine 1, worker 0 (process 7), sampling")
    verdict = world.pass_time(LIMIT + PERIOD)
    assert named(verdict) == 0 and verdict is not None
    assert verdict.sentence.endswith("; it is waiting for rollout engine 1, worker 0 (process 7), sampling")


def test_a_start_may_take_longer_but_not_of_a_stopped_rank() -> None:
    world = World(working=set())
    world.change(1, phase=START, step=0)
    assert world.pass_time(START_LIMIT - PERIOD) is None
    assert world.pass_time(2 * PERIOD) is not None
    world = World(working=set(), stopped={2})
    world.change(2, phase=START, step=0)
    assert named(world.pass_time(LIMIT + PERIOD)) == 2


def test_a_rank_that_has_left_is_not_waited_for() -> None:
    world = World(working={0})
    for rank in (1, 2):
        world.change(rank, is_over=True)
        world.stopped.add(rank)
    assert world.pass_time(10 * LIMIT) is None
    world.change(0, is_over=True)
    world.stopped.add(0)
    assert world.pass_time(10 * LIMIT) is None


@given(pause=st.floats(LIMIT / 4 + 1, 1e6), before=st.integers(0, 10))
def test_a_judge_that_was_stopped_itself_begins_anew(pause: float, before: int) -> None:
    """The whole job was stopped and goes on, or this process alone was: what it has not heard means nothing."""
    world = World()
    world.pass_time(before * PERIOD)
    world.now += pause
    assert world.pass_time(10 * PERIOD) is None
    world.stopped.add(1)
    assert named(world.pass_time(LIMIT + PERIOD)) == 1


@given(st.text(max_size=20), st.booleans(), st.booleans())
def test_a_beat_arrives_as_it_was_sent(words: str, is_over: bool, is_decided: bool) -> None:
    verdict = Verdict(3, "m", 7, "b", words) if is_decided else None
    beat = Beat(3, words, "m", 7, "b", 5, 6, "save", 8, words, True, is_over, verdict)
    assert Beat.decoded(beat.encoded().encode()) == beat
