"""The table of the costliest operators, from traces as torch and as torch_npu write them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from mega_rl.observe.analysis.trace import Cost, as_text, costs_of, read_events


def event(name: str, ts: float, dur: float, cat: str = "cpu_op", tid: int = 1, pid: Any = 1) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "tid": tid, "pid": pid}


PHASES = [
    event("phase: step", 0, 100, "user_annotation"),
    event("phase: update", 40, 50, "user_annotation"),
    event("phase: update", 40, 50, "gpu_user_annotation", pid=0),
]


def test_operators_count_in_the_innermost_phase_without_those_that_they_call() -> None:
    events = [
        *PHASES,
        event("aten::linear", 10, 20),
        event("aten::mm", 12, 15),
        event("aten::mm", 50, 5),
        event("aten::mm", 50, 7, tid=2),  # another thread, as the backward pass has
        event("aten::add", 90, 3),  # the phase has ended
        event("aten::before", 200, 3),  # in no phase
        event("gemm_kernel", 60, 25, "kernel", pid=0),
        event("Memcpy HtoD", 61, 2, "gpu_memcpy", pid=0),
    ]
    costs = costs_of(events)
    assert costs["step", "host"] == [Cost("aten::mm", 1, 15), Cost("aten::linear", 1, 5), Cost("aten::add", 1, 3)]
    assert costs["update", "host"] == [Cost("aten::mm", 2, 12)]
    assert costs["update", "device"] == [Cost("gemm_kernel", 1, 25), Cost("Memcpy HtoD", 1, 2)]
    assert len(costs) == 3


def test_kernels_of_an_ascend_device_are_known_by_their_process() -> None:
    """torch_npu writes times as texts and a list without a head."""
    events = [
        *PHASES,
        {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "Ascend Hardware"}},
        {**event("MatMulV2", 45, 6, cat="", pid=7), "ts": "45.0"},
        event("aten::mm", 44, 1),
    ]
    costs = costs_of(events)
    assert costs["update", "device"] == [Cost("MatMulV2", 1, 6)]
    assert costs["update", "host"] == [Cost("aten::mm", 1, 1)]


def test_the_table_has_ten_rows_a_phase_and_the_costliest_phase_first() -> None:
    many = [Cost(f"op|{n}", n, 1000.0 * n) for n in range(12, 0, -1)]
    text = as_text({("update", "host"): many, ("old_logprobs", "host"): [Cost("aten::mm", 2, 1e6)]}, "A step")
    assert text.index("## old_logprobs: host, 1,000.0 ms") < text.index("## update: host, 78.0 ms")
    rows = [line for line in text.splitlines() if line.startswith("| op")]
    assert len(rows) == 1 + 1 + 10 and "| op\\|12 | 12 | 12.0 | 15.4% |" in rows and "| op\\|2 |" not in text


def test_both_forms_of_a_trace_are_read(tmp_path: Path) -> None:
    (tmp_path / "cuda").mkdir()
    with gzip.open(tmp_path / "cuda" / "trace.json.gz", "wt") as file:
        json.dump({"traceEvents": PHASES}, file)
    inner = tmp_path / "npu" / "host_1_ascend_pt" / "ASCEND_PROFILER_OUTPUT"
    inner.mkdir(parents=True)
    (inner / "trace_view.json").write_text(json.dumps(PHASES))
    assert read_events(tmp_path / "cuda") == read_events(tmp_path / "npu") == PHASES
    assert read_events(tmp_path / "nothing") == []
