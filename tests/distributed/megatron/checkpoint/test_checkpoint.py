"""A checkpoint holds everything: resumed in new processes, at its own layout and at others, training goes on as before.

The saving launch is killed in the middle of its next checkpoint, so every resume also finds its way past that one.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from mega_rl.megatron.checkpoint import checkpoint
from tests.launching.launch import REPO, Launched, ranks
from tests.models.layouts import RESHARDED, Case

SCRIPT = REPO / "tests" / "distributed" / "megatron" / "checkpoint" / "run_checkpoint.py"
LAYOUTS_SCRIPT = SCRIPT.with_name("run_checkpoint_layouts.py")
SAVED_STEP, INTERRUPTED_STEP = 2, 4
RESUMED_AT = {  # number of ranks -> layouts; the first of two ranks is the one it was saved at
    2: (Case(2, tensor=2, sequence=True), Case(2, pipeline=2), Case(2)),
    1: (Case(1),),
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Launched]:
    """The shared directory after the launch that was killed while it saved, and what it said."""
    directory = tmp_path_factory.mktemp("checkpoints")
    return directory, ranks(SCRIPT, "save", "--dir", directory)


def test_save_rotates_until_it_is_killed(interrupted: tuple[Path, Launched]) -> None:
    directory, launched = interrupted
    assert "RECORDED" in launched.stdout and launched.returncode != 0
    names = sorted(p.name for p in (directory / "float32").iterdir())
    assert names == [f".step_{INTERRUPTED_STEP:08d}.incomplete", f"step_{SAVED_STEP:08d}"]
    older = checkpoint.directory_of(directory / "float32", SAVED_STEP)
    assert checkpoint.find(directory / "float32", "auto") == (older, [])


@pytest.mark.parametrize("num_ranks", RESUMED_AT)
def test_resumed_steps_are_the_same(interrupted: tuple[Path, Launched], num_ranks: int) -> None:
    directory, _ = interrupted
    cases = RESUMED_AT[num_ranks]
    arguments = ("resume", "--dir", directory, "--cases", json.dumps([asdict(case) for case in cases]))
    launched = ranks(SCRIPT, *arguments, nproc=num_ranks).check()
    assert [x for x in launched.stdout.splitlines() if x.startswith("RESUMED")] == [f"RESUMED {c.name}" for c in cases]


def test_every_file_of_a_checkpoint_counts(interrupted: tuple[Path, Launched], tmp_path: Path) -> None:
    """Whichever file of a newer checkpoint is shortened by one byte, the older one is chosen."""
    directory, _ = interrupted
    older = checkpoint.directory_of(tmp_path, 1)
    shutil.copytree(checkpoint.directory_of(directory / "float32", SAVED_STEP), older)
    newest = Path(shutil.copytree(older, checkpoint.directory_of(tmp_path, 2)))
    files = [p for p in newest.rglob("*") if p.is_file()]
    assert len(files) >= 5
    for path in files:
        content = path.read_bytes()
        path.write_bytes(content[:-1])
        found, sentences = checkpoint.find(tmp_path, "auto")
        assert found == older and str(newest) in sentences[0], path
        path.write_bytes(content)
    assert checkpoint.find(tmp_path, "auto") == (newest, [])


def test_every_axis_is_saved_and_resumed(tmp_path: Path) -> None:
    """Exactly at its own layout, to rounding at another; what Megatron cannot read is refused."""
    launched = ranks(LAYOUTS_SCRIPT, "--dir", tmp_path).check()
    expected = [f"RESUMED {f} {at.name} {case.name}" for f, at, others in RESHARDED for case in (at, *others)]
    assert [x for x in launched.stdout.splitlines() if x.startswith("RESUMED")] == expected
