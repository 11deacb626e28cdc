"""The trace file of a timeline."""

from __future__ import annotations

import json
from pathlib import Path

from mega_rl.observe.timeline import Activity, lanes, write_trace


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
