"""What a recorded trace says of every phase: its costliest operators and kernels, as a table.

A trace is in Chrome's format, as torch and torch_npu write it; times in it are microseconds.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NUM_ROWS = 10  # of one table
PHASE = "phase: "  # begins the name of the events that mark the phases
TABLE = "operators.md"
HOST, DEVICE = "host", "device"
_DEVICE_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")  # of torch's events
_ASCEND_DEVICE = "Ascend Hardware"  # the process whose events are torch_npu's kernels


@dataclass(frozen=True)
class Cost:
    """One operator or kernel within one phase."""

    name: str
    calls: int
    microseconds: float  # on the host without the operators that it calls itself


@dataclass(frozen=True)
class _Event:
    name: str
    begin: float
    end: float
    thread: tuple[Any, Any]


def read_events(directory: Path) -> list[dict[str, Any]]:
    """The events of the trace that a platform recorded in a directory; none if its profiler failed."""
    files = [*directory.glob("*.json.gz"), *directory.rglob("trace_view.json")]
    if not files:
        return []
    newest = max(files, key=lambda file: file.stat().st_mtime)  # one of a run before a resume may lie beside it
    with gzip.open(newest) if newest.suffix == ".gz" else newest.open("rb") as file:
        found = json.load(file)
    events: list[dict[str, Any]] = found["traceEvents"] if isinstance(found, dict) else found
    return events


def costs_of(events: Iterable[dict[str, Any]]) -> dict[tuple[str, str], list[Cost]]:
    """(phase, host or device) -> its costs, the largest first.

    An event belongs to the innermost phase in which it begins; what begins in none is left out.
    """
    events = list(events)
    ascend = {e["pid"] for e in events if e.get("ph") == "M" and e.get("args", {}).get("name") == _ASCEND_DEVICE}
    phases: list[_Event] = []
    kinds: dict[str, list[_Event]] = {HOST: [], DEVICE: []}
    for e in events:
        if e.get("ph") != "X" or e.get("cat") == "gpu_user_annotation":
            continue
        begin = float(e["ts"])
        event = _Event(str(e["name"]), begin, begin + float(e.get("dur", 0.0)), (e.get("pid"), e.get("tid")))
        if event.name.startswith(PHASE):
            phases.append(event)
        elif e.get("cat") in _DEVICE_KINDS or e.get("pid") in ascend:
            kinds[DEVICE].append(event)
        elif e.get("cat") == "cpu_op":
            kinds[HOST].append(event)
    found: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    starts = _Starts(phases)
    for place, of_place in kinds.items():
        own = _own_times(of_place) if place == HOST else [(event, event.end - event.begin) for event in of_place]
        for event, microseconds in own:
            phase = starts.phase_at(event.begin)
            if phase is not None:
                found[phase, place][event.name].append(microseconds)
    return {
        key: sorted((Cost(name, len(t), sum(t)) for name, t in of_key.items()), key=lambda c: -c.microseconds)
        for key, of_key in found.items()
    }


class _Starts:
    """The phase at any moment; phases nest."""

    def __init__(self, phases: Sequence[_Event]) -> None:
        borders = sorted({moment for phase in phases for moment in (phase.begin, phase.end)})
        inner = sorted(phases, key=lambda phase: (phase.begin, -phase.end))
        self._borders = borders
        self._names = [
            next((phase.name for phase in reversed(inner) if phase.begin <= moment < phase.end), None)
            for moment in borders
        ]

    def phase_at(self, moment: float) -> str | None:
        index = bisect_right(self._borders, moment) - 1
        name = self._names[index] if index >= 0 else None
        return None if name is None else name.removeprefix(PHASE)


def _own_times(events: Sequence[_Event]) -> list[tuple[_Event, float]]:
    """Each event with its time less that of the events directly within it on its thread."""
    own: list[tuple[_Event, float]] = []
    within: dict[tuple[Any, Any], list[int]] = defaultdict(list)  # thread -> places in ``own`` of what is open
    for event in sorted(events, key=lambda event: (event.begin, -event.end)):
        stack = within[event.thread]
        while stack and own[stack[-1]][0].end <= event.begin:
            stack.pop()
        if stack:
            outer, microseconds = own[stack[-1]]
            own[stack[-1]] = (outer, microseconds - (event.end - event.begin))
        stack.append(len(own))
        own.append((event, event.end - event.begin))
    return own


def as_text(costs: dict[tuple[str, str], list[Cost]], title: str) -> str:
    """Markdown: the costliest rows of every phase, the device's before the host's, the costliest phase first."""
    lines = [f"# {title}", ""]
    totals = {key: sum(cost.microseconds for cost in found) for key, found in costs.items()}
    phases = sorted({phase for phase, _ in costs}, key=lambda p: -max(totals.get((p, k), 0.0) for k in (HOST, DEVICE)))
    for phase in phases:
        for place in (DEVICE, HOST):
            if (phase, place) not in costs:
                continue
            total = totals[phase, place]
            lines += [f"## {phase}: {place}, {total / 1e3:,.1f} ms", "", "| operator | calls | ms | share |"]
            lines.append("|---|---:|---:|---:|")
            for cost in costs[phase, place][:NUM_ROWS]:
                name = cost.name.replace("|", "\\|")
                share = cost.microseconds / max(total, 1e-9)
                lines.append(f"| {name} | {cost.calls:,} | {cost.microseconds / 1e3:,.1f} | {share:.1%} |")
            lines.append("")
    return "\n".join(lines)
