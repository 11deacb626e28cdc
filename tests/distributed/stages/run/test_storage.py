"""Storage that two nodes do not share, that is full, or that loses what was written: one sentence on every rank, and
nothing that is not whole is ever taken for a checkpoint.

The disks are real ones: file systems in memory, mounted in namespaces of the test's own, for one rank or for all.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.launching.enclosure import needs_enclosure, run_enclosed
from tests.launching.launch import once

pytestmark = [needs_enclosure(), pytest.mark.slow]
SCRIPT = "tests/distributed/stages/run/run_storage.py"
RUN = f"import runpy, sys; sys.argv = [{SCRIPT!r}]; runpy.run_path({SCRIPT!r}, run_name='__main__')"
SENTENCES = {  # scenario -> parts of the sentence, and the checkpoints that are there afterwards
    "two_nodes_with_disks_of_their_own": (
        ("is not one directory for all ranks: rank 1 on ", "does not see there what rank 0 on "),
        [],
    ),
    "read_only_for_one": (("rank 1 on ", " cannot write ", "(Read-only file system, "), []),
    "full": (("rank 0 on ", " cannot write ", "(No space left on device, 0 bytes free)"), []),
    "full_within_the_shards": (
        ("the checkpoint of step 2 cannot be written", "(No space left on device, 0 bytes free)", "are untouched"),
        ["step_00000001"],
    ),
    "full_at_the_index": (
        ("the checkpoint of step 2 cannot be written", "(No space left on device, 0 bytes free)", "are untouched"),
        ["step_00000001"],
    ),
    "shards_lost": (
        ("the checkpoint of step 2 is not whole and gets no name: rank 1 on ", "wrote megatron/__1_0.distcp of ")
        + ("sees no such file there",),
        ["step_00000001"],
    ),
}


@once
def results() -> dict[str, Any]:
    """Scenario -> what the ranks said, and the checkpoints with what is wrong with them."""
    launched = run_enclosed(RUN)
    assert launched.returncode == 0, launched.stdout + launched.stderr
    found: dict[str, Any] = json.loads(launched.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("scenario", SENTENCES)
def test_every_rank_says_the_same_sentence(scenario: str, record_property: Callable[[str, object], None]) -> None:
    parts, checkpoints = SENTENCES[scenario]
    found = results()[scenario]
    record_property("seconds", found["seconds"])
    assert sorted(found["answers"]) == ["0", "1"], found["log"]
    said = set(found["answers"].values())
    assert len(said) == 1, found["log"]
    sentence = said.pop()
    assert sentence.startswith("InputError: ") and "\n" not in sentence
    assert [part for part in parts if part not in sentence] == [], sentence
    assert found["checkpoints"] == dict.fromkeys(checkpoints)
    assert not [name for name in found["left"] if name.startswith(".probe_")]
