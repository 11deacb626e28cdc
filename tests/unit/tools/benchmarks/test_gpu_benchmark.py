"""``benchmarks/gpu/run.sh`` on the CPU: a slice of it as a user starts it, and what becomes of slices that fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import run as gpu
from tests.launching.launch import run


@pytest.mark.slow
def test_a_slice_writes_its_figures_and_its_table(tmp_path: Path) -> None:
    """The trainer's speed, with the plan of its memory; vLLM is not imported on the way."""
    arguments = ("--device", "cpu", "--quick", "--out", str(tmp_path), "--slices", "mfu:7B")
    launched = run(("benchmarks/gpu/run.sh", *arguments), env={"PYTHON": sys.executable}).check()
    found = json.loads((tmp_path / "gpu.json").read_text())
    rows = found["slices"]["mfu:7B"]["rows"]
    assert [(row["length"], row["recompute"]) for row in rows] == [(32, "none"), (64, "selective")]
    assert all(row["tflops"] > 0 and row["planned_bytes"] > 0 and row["mfu"] is None for row in rows)
    assert "cpu" in found["machine"] and "error" not in found["slices"]["mfu:7B"]
    table = (tmp_path / "gpu.md").read_text()
    assert table in launched.stdout and "### Model FLOPs utilisation of the trainer" in table
    assert len([line for line in table.splitlines() if line.startswith("| 7B |")]) == 2


def test_a_slice_that_fails_is_recorded_with_what_it_had(tmp_path: Path) -> None:
    out = str(tmp_path / "slice.json")
    code = "import sys; open(sys.argv[1], 'w').write('{\"rows\": [1]}'); print('why'); sys.exit(3)"
    found = gpu.run_slice([sys.executable, "-c", code, out], {}, 60.0)
    assert found["rows"] == [1] and found["error"] == "ended with 3: why"
    sleeper = "import sys, time; print('begun', flush=True); time.sleep(600)"
    slow = gpu.run_slice([sys.executable, "-c", sleeper, str(tmp_path / "other.json")], {}, 1.0)
    assert slow["error"].startswith("took longer than 1 s") and "rows" not in slow


def test_the_other_slices_go_on_and_earlier_results_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, str]] = []

    def run_slice(argv: list[str], environ: dict[str, str], limit_s: float) -> dict[str, object]:
        started.append((argv[3], environ["MEGA_RL_PLATFORM"]))
        assert "--out" in argv
        if argv[3] == "sync":
            return {"seconds": 1.0, "error": "ended with 1: CUDA error"}
        return {"seconds": 2.0, "machine": "a machine", "losses": [2.0, 1.0] if "cpu" in argv[3] else [2.0, 1.1]}

    monkeypatch.setattr(gpu, "run_slice", run_slice)
    names = "sync,losses:cpu:float32,losses:device:bfloat16"
    assert gpu.main(["--out", str(tmp_path), "--slices", names]) == 1
    assert started == [("sync", "cuda"), ("losses:cpu:float32", "cpu"), ("losses:device:bfloat16", "cuda")]
    table = (tmp_path / "gpu.md").read_text()
    assert "| sync | ended with 1: CUDA error |" in table and "Machine: a machine" in table
    assert "| device:bfloat16 | 2 | 1.1 | 0.1 |" in table
    monkeypatch.setattr(gpu, "run_slice", lambda argv, environ, limit_s: {"seconds": 1.0})
    assert gpu.main(["--out", str(tmp_path), "--slices", "sync"]) == 0
    assert set(json.loads((tmp_path / "gpu.json").read_text())["slices"]) == set(names.split(","))


def test_what_the_machine_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "NEEDED", ("torch", "no_such_package.part", "no_such_package"))
    assert gpu.main(["--out", str(tmp_path / "out")]) == 2 and not (tmp_path / "out").exists()
    assert "lacks no_such_package.part, no_such_package: put their wheels" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        gpu.main(["--slices", "mfu:9B"])
