"""``tests/launching/side_by_side.py``, which runs the parts of the suite: no failure is lost, and every closing line is
shown.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.launching.launch import run, started

MAKEFILE = """
slow:
	@until test -e {directory}/failed; do sleep 0.02; done
	@printf 'one\\n== 3 passed ==\\n'
fails:
	@printf 'E   3 is not 4\\nFAILED test_it - 3 is not 4\\n== 1 failed ==\\n'; touch {directory}/failed; exit 1
waits:
	@echo ready; exec sleep 600
"""


def script(directory: Path, *targets: str) -> list[str]:
    (directory / "Makefile").write_text(MAKEFILE.format(directory=directory))
    return [
        "env",
        "-C",
        str(directory),
        "-u",
        "MAKEFLAGS",
        sys.executable,
        "-m",
        "tests.launching.side_by_side",
        *targets,
    ]


def test_a_failure_ends_no_other_target_and_is_not_lost(tmp_path: Path) -> None:
    failed = run(script(tmp_path, "fails", "slow"))
    lines = failed.stdout.splitlines()
    assert failed.returncode == 1 and lines[-2:] == ["== 1 failed ==", "== 3 passed =="]
    assert lines[-4:-2] == ["[fails] E   3 is not 4", "[fails] FAILED test_it - 3 is not 4"]
    assert {"[fails] == 1 failed ==", "[slow] one", "[slow] == 3 passed =="} <= set(lines)
    good = run(script(tmp_path, "slow")).check()
    assert good.stdout.splitlines()[-1] == "== 3 passed =="


def test_who_ends_it_ends_its_targets(tmp_path: Path) -> None:
    with started(script(tmp_path, "waits")) as running:
        running.wait_for("[waits] ready", 60)
        running.process.terminate()
        assert running.wait(60) == 1
