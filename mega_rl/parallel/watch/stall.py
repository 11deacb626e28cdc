"""Who holds a run up: decided from the beats of the ranks and a clock, without threads and without a store."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

START = "start"  # the phase before the first step
CHECKS_PER_LIMIT = 20  # a watch looks this often within its limit


@dataclass(frozen=True)
class Verdict:
    """The rank that a run ends for."""

    rank: int
    machine: str
    pid: int
    born: str
    sentence: str


@dataclass(frozen=True)
class Beat:
    """What one rank tells the others."""

    rank: int
    host: str
    machine: str  # tells apart hosts, their starts, and spaces of process ids
    pid: int
    born: str  # when the process began: with it a process id is of one process only
    number: int  # of beats so far: a process that is stopped sends no others
    count: int  # pieces of progress
    phase: str
    step: int
    waits_for: str = ""  # in words; empty: for nothing
    is_excused: bool = False  # it waits for other ranks
    is_over: bool = False  # it has left the run in good order
    verdict: Verdict | None = None

    def encoded(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def decoded(cls, text: bytes) -> Beat:
        values: dict[str, Any] = json.loads(text)
        verdict = values.pop("verdict")
        return cls(**values, verdict=verdict and Verdict(**verdict))


@dataclass
class _Heard:
    beat: Beat
    beat_at: float  # when its number changed last, seconds
    moved_at: float  # when its progress changed last, seconds


class StallDetector:
    """Decides from what was heard; the clock is its caller's, in seconds, and never goes back.

    A rank whose beats stay away for ``limit_s`` is stopped, or something keeps its interpreter for itself. A rank that
    still beats and comes on no more may wait for another one, and most waits inside of libraries cannot be seen. So
    this is decided only when no rank at all has come on for the limit: then the rank that stood still first is named,
    one that waits for others only if all do.

    Args:
        limit_s: how long nothing may happen.
        start_limit_s: the same while models and engines are built, of which little can be counted.
        now: the time.
    """

    def __init__(self, limit_s: float, start_limit_s: float, now: float) -> None:
        self._limit_s, self._start_limit_s = limit_s, start_limit_s
        self._heard: dict[int, _Heard] = {}
        self._last_look = now

    def hear(self, beat: Beat, now: float) -> None:
        """Take in the newest beat of a rank, the same one any number of times."""
        known = self._heard.get(beat.rank)
        if known is None:
            self._heard[beat.rank] = _Heard(beat, now, now)
            return
        if beat.number != known.beat.number:
            known.beat_at = now
        if (beat.count, beat.phase, beat.step) != (known.beat.count, known.beat.phase, known.beat.step):
            known.moved_at = now
        known.beat = beat

    def look(self, now: float) -> None:
        """Be told that time passes, often: a detector that was stopped itself has heard nobody, and starts anew."""
        if now - self._last_look > self._limit_s / 4:
            for heard in self._heard.values():
                heard.beat_at = heard.moved_at = now
        self._last_look = now

    def silent(self, now: float) -> Verdict | None:
        """A rank that has sent no beat for the limit, the one that was silent first."""
        silent = [h for h in self._heard.values() if now - h.beat_at >= self._limit_s and not h.beat.is_over]
        return self._verdict(min(silent, key=lambda heard: heard.beat_at), now) if silent else None

    def stuck(self, now: float) -> Verdict | None:
        """The rank that holds the others up, if none has come on for the limit.

        That is one whose beats stay away, else the one that came to a halt first.
        """
        running = [h for h in self._heard.values() if not h.beat.is_over]
        if not running:
            return None
        limit_s = max(self._start_limit_s if h.beat.phase == START else self._limit_s for h in running)
        if any(now - h.moved_at < limit_s for h in running):
            return None

        def order(heard: _Heard) -> tuple[bool, bool, float, int]:
            return not self._is_quiet(heard, now), heard.beat.is_excused, heard.moved_at, heard.beat.rank

        return self._verdict(min(running, key=order), now)

    def _is_quiet(self, heard: _Heard, now: float) -> bool:
        return now - heard.beat_at >= self._limit_s / 4

    def _verdict(self, heard: _Heard, now: float) -> Verdict:
        beat = heard.beat
        if self._is_quiet(heard, now):
            why = "its process is gone or stopped, or keeps its interpreter busy"
        elif beat.waits_for:
            why = f"it is waiting for {beat.waits_for}"
        else:
            why = "it is working, or stuck"
        sentence = (
            f"rank {beat.rank} (host {beat.host}, pid {beat.pid}) has made no progress for "
            f"{now - heard.moved_at:.0f} s: last phase `{beat.phase}`, step {beat.step}; {why}"
        )
        return Verdict(beat.rank, beat.machine, beat.pid, beat.born, sentence)
