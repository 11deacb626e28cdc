"""Who was busy with what, and when: spans of time, and the trace file that Chrome's and Perfetto's viewers open."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mega_rl.errors import InputError

MICROSECONDS = 1e6
TAIL_BYTES = 1 << 16
MAX_BYTES = 64 << 20  # of a growing file; a longer one is moved away, to the same name with .old


class Activity(NamedTuple):
    """One span of one lane."""

    lane: str  # who: "trainer", "engine 3"
    name: str  # what: a phase, "sampling", "waiting", "loading weights"
    begin_s: float
    end_s: float
    details: Mapping[str, Any] = {}


def lanes(activities: Iterable[Activity]) -> list[str]:
    """Every lane once: the trainer's first, then by their names, the numbers in them as numbers."""

    def place(lane: str) -> tuple[bool, str, int]:
        word, _, number = lane.rpartition(" ")
        return (lane != "trainer", word, int(number)) if number.isdecimal() else (lane != "trainer", lane, 0)

    return sorted({activity.lane for activity in activities}, key=place)


def trace_events(activities: Sequence[Activity]) -> list[dict[str, Any]]:
    """Trace events: one thread per lane, one complete event ("X", microseconds) per activity."""
    numbers = {lane: number for number, lane in enumerate(lanes(activities))}
    return [*named(list(numbers), numbers), *(_event(activity, numbers) for activity in activities)]


def named(names: Sequence[str], numbers: Mapping[str, int]) -> list[dict[str, Any]]:
    """Trace events ("M") that give the threads of these lanes their names and order."""
    return [
        {"ph": "M", "name": kind, "pid": 0, "tid": numbers[lane], "args": {key: value}}
        for lane in names
        for kind, key, value in (("thread_name", "name", lane), ("thread_sort_index", "sort_index", numbers[lane]))
    ]


def _event(activity: Activity, numbers: Mapping[str, int]) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": activity.name,
        "cat": activity.lane.partition(" ")[0],
        "pid": 0,
        "tid": numbers[activity.lane],
        "ts": activity.begin_s * MICROSECONDS,
        "dur": (activity.end_s - activity.begin_s) * MICROSECONDS,
        "args": dict(activity.details),
    }


def write_trace(path: Path, activities: Sequence[Activity]) -> None:
    """Write a file for chrome://tracing or ui.perfetto.dev, whole or not at all."""
    fresh = path.with_name(f".{path.name}.new")
    with fresh.open("w", encoding="utf-8") as file:
        json.dump({"traceEvents": trace_events(activities), "displayTimeUnit": "ms"}, file)
    fresh.replace(path)


class GrowingTrace:
    """A trace file that grows while a run goes on, and goes on when the run is resumed.

    It is a JSON array without its end, as both viewers read it. Any thread may call the methods.
    """

    def __init__(self, path: Path) -> None:
        """OSError if the file cannot be written now; later failures end the writing in silence."""
        self._path, self._waiting = path, list[Activity]()
        self._numbers: dict[str, int] = {}  # lane -> its thread, of those that this process has named
        self._lock = threading.Lock()
        self._is_writable = True
        if path.exists() and path.stat().st_size > MAX_BYTES:
            path.replace(path.with_name(f"{path.name}.old"))
        self.end_s = _end_s(path)  # of what an earlier start wrote
        if not path.exists():
            path.write_text("[\n", encoding="utf-8")

    def add(self, activity: Activity) -> None:
        with self._lock:
            self._waiting.append(activity)

    def flush(self) -> None:
        """Write what has been added."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
            if not waiting or not self._is_writable:
                return
            lines = "".join(f"{json.dumps(event)},\n" for event in self._events(waiting))
            try:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(lines)
            except OSError:
                self._is_writable = False

    def _events(self, activities: Sequence[Activity]) -> list[dict[str, Any]]:
        fresh = [lane for lane in lanes(activities) if lane not in self._numbers]
        self._numbers |= {lane: _thread(lane) for lane in fresh}
        return [*named(fresh, self._numbers), *(_event(activity, self._numbers) for activity in activities)]


def _end_s(path: Path) -> float:
    """When the last activity of a file ended; a line that a killed run has left half is cut off.

    Only its last lines are read: activities are written as they end.
    """
    if not path.exists():
        return 0.0
    with path.open("rb+") as file:
        begin = file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        found = file.read()
        whole = found.rfind(b"\n") + 1
        file.truncate(begin + whole)
    lines = found[:whole].splitlines()
    ends = [0.0]
    for line in lines:
        with suppress(ValueError, KeyError, TypeError, AttributeError):  # the first may be cut
            event = json.loads(line.rstrip(b","))
            ends.append((event["ts"] + event["dur"]) / MICROSECONDS)
    return max(ends)


def _thread(lane: str) -> int:
    """The same in every process: viewers take lanes apart by it."""
    word, _, number = lane.rpartition(" ")
    return 10 + int(number) if word == "engine" and number.isdecimal() else int(lane != "trainer")


def read_trace(path: Path) -> list[Activity]:
    """The activities of a file of ``GrowingTrace``; the last line may be cut.

    Raises:
        InputError: there is none, or it is another file.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from error
    lanes_of: dict[int, str] = {}
    found = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            event = json.loads(line.removesuffix(","))
            if event["ph"] == "M":
                lanes_of[event["tid"]] = event["args"].get("name", lanes_of.get(event["tid"], ""))
            else:
                begin = event["ts"] / MICROSECONDS
                end = begin + event.get("dur", 0.0) / MICROSECONDS
                found.append(Activity(lanes_of[event["tid"]], event["name"], begin, end, event["args"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number < len(lines):
                raise InputError(f"{path}, line {number}: this is no line of a timeline of a run") from error
    return found
