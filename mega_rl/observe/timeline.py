"""Who was busy with what, and when: spans of time, and the trace file that Chrome's and Perfetto's viewers open."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

MICROSECONDS = 1e6


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
    named = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": lane}}
        for lane, number in numbers.items()
    ]
    order = [
        {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": number, "args": {"sort_index": number}}
        for number in numbers.values()
    ]
    return [
        *named,
        *order,
        *(
            {
                "ph": "X",
                "name": activity.name,
                "cat": activity.lane.partition(" ")[0],
                "pid": 0,
                "tid": numbers[activity.lane],
                "ts": activity.begin_s * MICROSECONDS,
                "dur": (activity.end_s - activity.begin_s) * MICROSECONDS,
                "args": dict(activity.details),
            }
            for activity in activities
        ),
    ]


def write_trace(path: Path, activities: Sequence[Activity]) -> None:
    """Write a file for chrome://tracing or ui.perfetto.dev, whole or not at all."""
    fresh = path.with_name(f".{path.name}.new")
    with fresh.open("w", encoding="utf-8") as file:
        json.dump({"traceEvents": trace_events(activities), "displayTimeUnit": "ms"}, file)
    fresh.replace(path)
