"""tools/compare.py: errors by hand, verdicts, files, and bad input."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from mega_rl.observe.analysis.compare import difference, throughput
from mega_rl.observe.metrics.from_files import LOSSES
from tests.launching.launch import Launched, run_copy

LOSS = [1.0, -2.0, 4.0, 1.0, 2.0, 2.0]


def write(directory: Path, losses: Sequence[float | None], rate: float, reward: float = 0.5) -> Path:
    directory.mkdir()
    rows = [
        {"step": i, "metrics": {"actor/loss": loss, "reward/mean": reward, "throughput/tokens_per_s": rate * (i + 1)}}
        for i, loss in enumerate(losses, start=1)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def compare(*arguments: object) -> Launched:
    return run_copy(Path("tools/compare.py"), *arguments)


def test_figures_by_hand() -> None:
    a = {step: {"x": value} for step, value in enumerate([1.0, -2.0, 5.0])}
    b = {step: {"x": value} for step, value in enumerate([1.5, -2.5])}
    found = difference(a, b, "x", 0.4)
    assert (found.num_steps, found.relative_error, found.passed) == (2, pytest.approx(1 / 3), True)
    assert not difference(a, b, "x", 0.3).passed
    assert difference(a, {0: {"x": None}}, "x", 0.3).passed is False  # not finite
    zeros = {0: {"x": 0.0}}
    assert difference(zeros, zeros, "x", 0.0).passed and math.isinf(difference(zeros, b, "x", None).relative_error)
    slow = {step: {"rate": 10.0} for step in range(1, 8)}
    fast = {step: {"rate": 10.0 if step <= 4 else 30.0} for step in range(1, 8)}
    rates = throughput(slow, fast, "rate", 2.5)
    assert (rates.first_steps, rates.steady, rates.passed) == (1.0, 3.0, True)


def test_pass_and_fail_with_plot_and_json(tmp_path: Path) -> None:
    a = write(tmp_path / "a", LOSS, 100.0)
    close = write(tmp_path / "close", [x * 1.01 for x in LOSS], 90.0, reward=0.51)
    far = write(tmp_path / "far", [x * 1.05 for x in LOSS], 90.0)
    png, figures = tmp_path / "curves" / "c.png", tmp_path / "figures.json"
    passed = compare(a, close, "--plot", png, "--json", figures).check()
    assert "1.00%" in passed.stdout and "pass" in passed.stdout and "FAIL" not in passed.stdout
    assert png.read_bytes().startswith(b"\x89PNG")
    reward, loss, speed = json.loads(figures.read_text())
    assert (reward["limit"], loss["limit"]) == (0.04, None)
    assert loss["relative_error"] == pytest.approx(0.01) and reward["relative_error"] == pytest.approx(0.02)
    assert speed["steady"] == pytest.approx(0.9) and speed["passed"]
    failed = compare(a, close, far, "--min-throughput", "0.95", "--metric", "actor/loss=0.02")
    assert failed.returncode == 1 and failed.stdout.count("FAIL") == 3 and failed.stdout.count("pass") == 1


@pytest.mark.parametrize("loss_name", LOSSES)
def test_runs_of_stages_from_files_are_compared_by_their_loss(tmp_path: Path, loss_name: str) -> None:
    runs = []
    for factor in (1.0, 1.019, 1.021):
        runs.append(tmp_path / f"run{factor}")
        runs[-1].mkdir()
        rows = [{"step": i, "metrics": {loss_name: loss * factor}} for i, loss in enumerate([3.0, 2.0, 1.0], start=1)]
        (runs[-1] / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    compared = compare(*runs, "--throughput", "")
    assert compared.returncode == 1 and compared.stdout.count("pass") == 1 and compared.stdout.count("FAIL") == 1
    other = tmp_path / "other"
    other.mkdir()
    (other / "metrics.jsonl").write_text('{"step": 1, "metrics": {"time/step_s": 1.0}}\n')
    refused = compare(other, runs[0])
    assert refused.returncode == 2 and "none of sft/loss, pt/loss, " in refused.stdout


def test_bad_input_is_one_sentence(tmp_path: Path) -> None:
    a = write(tmp_path / "a", LOSS, 100.0)
    for arguments, words in {
        (a, tmp_path / "none"): "none",
        (a, a, "--metric", "actor/los"): "--metric actor/los",
        (a, a, "--metric", "actor/loss=2%"): "'2%' is no number",
        (a, a, "--names", "one"): "--names has 1",
    }.items():
        refused = compare(*arguments)
        assert refused.returncode == 2 and "error: " in refused.stdout and words in refused.stdout, refused.stdout
