"""A rank that comes to a halt is named by the others, wherever it happens, and nothing hangs; who works goes on."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launching.launch import ENGINE, REPO, TRAINER, Launched, ranks
from tests.launching.training import TinyWorld

pytestmark = pytest.mark.slow
SCRIPT = REPO / "tests" / "distributed" / "parallel" / "watch" / "run_stalled.py"
LIMITS_S = {"sample": 8, "learn": 6, "loop": 6, "save": 6}  # a run that goes on makes progress within them


def halted(
    world: TinyWorld, output_dir: Path, place: str, rank: int, record_property: Callable[[str, object], None]
) -> Launched:
    """A run in which ``rank`` comes to a halt at ``place``; it ends long before the limit of a collective."""
    config, modules = (world.rl, ENGINE) if place == "sample" else (world.sft, TRAINER)
    settings = (f"trainer.output_dir={output_dir}", f"trainer.stall_timeout_s={LIMITS_S[place]}")
    quick = ("validation.val_before_train=false", "checkpoint.save_freq=1")
    launched = ranks(SCRIPT, place, rank, "--config", config, *settings, *quick, modules=modules)
    end = time.monotonic()
    assert launched.returncode == 1, launched.stdout
    record_property("seconds", end - float(re.findall(r"halted at (\d+\.\d{3})", launched.stdout)[0]))
    return launched


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("place", "phase", "function"),
    [("sample", "generate", "build"), ("learn", "update", "optimizer_step"), ("save", "save", "save_if_due")],
)
def test_a_stopped_rank_is_named(
    tiny_world: TinyWorld,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    place: str,
    phase: str,
    function: str,
    rank: int,
) -> None:
    """In a spin loop of the engine's shared memory, in a collective of gloo, and in a save."""
    launched = halted(tiny_world, tmp_path, place, rank, record_property)
    other = 1 - rank
    (sentence,) = re.findall(r"^error: (.*)$", launched.stdout, re.MULTILINE)
    who, what = rf"rank {rank} \(host \S+, pid \d+\)", rf"\d+ s: last phase `{phase}`, step 1; its process is"
    assert re.match(f"{who} has made no progress for {what}", sentence), sentence
    assert sentence.endswith(f"the stacks of the ranks that still run are in {tmp_path / 'stacks'}")
    assert [path.name for path in (tmp_path / "stacks").iterdir()] == [f"rank_{other}.txt"]
    assert f" in {function}\n" in (tmp_path / "stacks" / f"rank_{other}.txt").read_text()


def test_a_rank_that_turns_in_circles_is_named_and_all_stacks_are_written(
    tiny_world: TinyWorld, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    launched = halted(tiny_world, tmp_path, "loop", 1, record_property)
    known = r"^error: rank 1 .* last phase `update`, step 1; it is working, or stuck"
    sentences = re.findall(known, launched.stdout, re.MULTILINE)
    assert len(sentences) == 2 and "error: rank 0" not in launched.stdout
    stacks = {path.name: path.read_text() for path in (tmp_path / "stacks").iterdir()}
    assert {name: " in turn_in_circles\n" in text for name, text in stacks.items()} == {
        "rank_0.txt": False,
        "rank_1.txt": True,
    }


def test_a_slow_engine_is_waited_for_and_a_dead_rank_is_not(tmp_path: Path) -> None:
    """The engines end further apart than a collective may take."""
    launched = ranks(
        REPO / "tests" / "distributed" / "parallel" / "watch" / "run_rendezvous.py", tmp_path / "stacks", timeout=250
    )
    assert sorted(re.findall(r"^COLLECTED .*$", launched.stdout, re.MULTILINE)) == ["COLLECTED 0 4", "COLLECTED 1 4"]
    (sentence,) = re.findall(r"^error: (.*)$", launched.stdout, re.MULTILINE)
    assert re.match(r"rank 1 \(host \S+, pid \d+\) has made no progress for \d+ s: last phase `generate`", sentence)
    assert launched.returncode == 1
