"""A checkpoint is data: no file of it can run code, whatever the environment asks of torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mega_rl.bridge.files.torch_dist.manifest import WEIGHTS
from mega_rl.megatron.checkpoint.checkpoint import GENERATORS
from tests.launching.launch import run_copy

pytestmark = pytest.mark.slow  # as a module

SCRIPT = Path("tests/unit/megatron/checkpoint/run_hostile_checkpoint.py")
ATTACKS = {  # attack -> the file that it is in
    "index": f"{WEIGHTS}/.metadata",
    "index_through_torch": f"{WEIGHTS}/.metadata",
    "object": f"{WEIGHTS}/__0_0.distcp",
    "common": f"{WEIGHTS}/common.pt",
    "generators": GENERATORS,
}


def results(directory: Path, *options: str) -> dict[str, Any]:
    """Attack -> what the reader read or said, and whether code of the checkpoint has run."""
    run_copy(SCRIPT, "--dir", directory, *options, env={"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}).check()
    found: dict[str, Any] = json.loads((directory / "results.json").read_text())
    return found


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results(tmp_path_factory.mktemp("guarded"))


def test_a_good_one_is_read(guarded: dict[str, Any]) -> None:
    assert guarded["none"] == ["[0.0, 1.0, 2.0, 3.0] {'plain': 1}", False]


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_file_runs_code(guarded: dict[str, Any], attack: str) -> None:
    said, has_run = guarded[attack]
    assert not has_run, said
    assert said.startswith("InputError: checkpoint ") and f"/{attack} cannot be read (" in said, said
    assert "\n" not in said and said.endswith("; use an older one, or checkpoint.resume=never"), said


def test_without_the_guard_every_one_does(tmp_path: Path) -> None:
    """So that the tests above are about attacks, and not about files that do nothing."""
    found = results(tmp_path, "--unguarded")
    assert [attack for attack, (_, has_run) in found.items() if has_run] == list(ATTACKS), found
    assert all((tmp_path / attack / file).is_file() for attack, file in ATTACKS.items())
