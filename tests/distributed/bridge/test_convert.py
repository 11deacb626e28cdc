"""Converted checkpoints in their users' hands: Megatron at several layouts, transformers, and a model of 1 GB."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.launching.launch import REPO, ranks, run_copy
from tests.models import families

pytestmark = pytest.mark.slow
RELATIVE = 2e-5  # float32 logits, two implementations of four layers
PEAK_BYTES = 0.2e9  # less than the largest tensor
FREE_BYTES = 5e9  # the model and its conversions
NUM_CASES = 4  # of run_convert.py


def test_every_family_gets_its_certificates(tmp_path: Path) -> None:
    """TP2 PP2, EP2 where there are experts, and back: bit-exact, with the logits of transformers on both sides."""
    script = REPO / "tests" / "contract" / "run_convert_certificates.py"
    launched = ranks(script, tmp_path, nproc=0).check()
    (line,) = [line for line in launched.stdout.splitlines() if line.startswith("CERTIFIED ")]
    errors = json.loads(line.removeprefix("CERTIFIED "))
    assert list(errors) == list(families.CONTRACT.own)
    assert all(error < RELATIVE for pair in errors.values() for error in pair), errors


def test_the_trainer_starts_from_them_and_its_own_are_converted(tmp_path: Path) -> None:
    launched = ranks(REPO / "tests" / "distributed" / "bridge" / "run_convert.py", tmp_path).check()
    done = [line for line in launched.stdout.splitlines() if line.startswith("CONVERTED ")]
    assert len(done) == NUM_CASES, done


def test_peak_memory_of_a_large_model(tmp_path: Path) -> None:
    """Of 1 GB of weights, in every direction: no tensor is held whole. The benchmark of the pages measures it."""
    if shutil.disk_usage(tmp_path).free < FREE_BYTES:
        pytest.skip(f"less than {FREE_BYTES / 1e9:.0f} GB free under {tmp_path}: set TMPDIR to a larger disk")
    figures = tmp_path / "figures.json"
    options = ("--quick", "--gigabytes", 1, "--work-dir", tmp_path, "--json", figures)
    run_copy(Path("benchmarks/weights/convert.py"), *options).check()
    results = json.loads(figures.read_text())
    assert results["num_bytes"] > 0.95e9 and len(results["peak_bytes"]) == 3
    assert all(0 < peak <= PEAK_BYTES for peak in results["peak_bytes"].values()), results
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]
