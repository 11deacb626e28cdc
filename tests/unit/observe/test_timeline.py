"""The trace file of a timeline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mega_rl.errors import InputError
from mega_rl.observe.timeline import Activity, GrowingTrace, lanes, read_trace, write_trace


def test_trace_file(tmp_path: Path) -> None:
    activities = [
        Activity("engine 10", "sampling", 0.0, 1.5, {"version": 3}),
        Activity("engine 2", "loading weights", 1.0, 1.25),
        Activity("trainer", "training", 0.5, 2.0, {"step": 7}),
    ]
    assert lanes(activities) == ["trainer", "engine 2", "engine 10"]
    write_trace(tmp_path / "trace.json", activities)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [(threads[e["tid"]], e["name"], e["ts"], e["dur"], e["args"]) for e in events if e["ph"] == "X"]
    assert spans == [
        ("engine 10", "sampling", 0.0, 1.5e6, {"version": 3}),
        ("engine 2", "loading weights", 1.0e6, 0.25e6, {}),
        ("trainer", "training", 0.5e6, 1.5e6, {"step": 7}),
    ]
    order = {threads[e["tid"]]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    assert sorted(order, key=lambda lane: order[lane]) == ["trainer", "engine 2", "engine 10"]
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_a_timeline_grows_over_resumes_and_a_cut_line_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    first, second = Activity("engine 3", "sampling", 0.5, 2.0, {"version": 1}), Activity("trainer", "update", 1.0, 3.0)
    trace = GrowingTrace(path)
    assert trace.end_s == 0.0
    trace.add(first)
    trace.flush()
    with path.open("a") as file:
        file.write('{"ph": "X", "na')  # killed
    assert read_trace(path) == [first]
    again = GrowingTrace(path)
    assert again.end_s == 2.0
    again.add(second)
    again.flush()
    assert read_trace(path) == [first, second]
    events = [json.loads(line.removesuffix(",")) for line in path.read_text().splitlines()[1:] if line.endswith("},")]
    assert {e["tid"] for e in events if e["ph"] == "X"} == {13, 0}, "a lane has one thread in every start"
    path.write_text("[\nrubbish\n[]\n")
    with pytest.raises(InputError, match="timeline.json, line 2: this is no line of a timeline"):
        read_trace(path)
    with pytest.raises(InputError, match="cannot be read"):
        read_trace(tmp_path)
