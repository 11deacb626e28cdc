"""What mega_rl calls of MindSpeed, as a record of the commit that docker/.env installs has it."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from pathlib import Path

import pytest

from mega_rl.platform.ascend.mindspeed_kernels import OFFERS
from tests.contract.mindspeed_interface.record import COMPILED, RECORD, USED, compiled, functions
from tests.launching.launch import REPO
from tests.pretended import mindspeed as pretended

RECORDED = json.loads(RECORD.read_text())


def checkout() -> Path | None:
    """The folder with the real MindSpeed, if it is on the path."""
    spec = importlib.util.find_spec("mindspeed")
    return Path(spec.origin).parent.parent if spec is not None and spec.origin else None


def test_the_record_is_of_the_commit_that_docker_installs() -> None:
    (commit,) = re.findall(r"^MINDSPEED=([0-9a-f]{40})$", (REPO / "docker" / ".env").read_text(), re.MULTILINE)
    assert RECORDED["commit"] == commit
    tracked = subprocess.run(("git", "grep", "-l", commit), cwd=REPO, capture_output=True, text=True).stdout.split()
    assert set(tracked) <= {"docker/.env", str(RECORD.relative_to(REPO)), "CHANGELOG.md"}, "one place, and its record"


def test_every_operator_that_is_taken_is_recorded() -> None:
    assert {offer.module for offer in OFFERS.values()} <= {"mindspeed." + file.replace("/", ".") for file in USED}
    assert set(RECORDED["functions"]) == {f"{file}: {name}" for file, names in USED.items() for name in names}
    assert None not in RECORDED["functions"].values()
    assert all(RECORDED["compiled"][f"{file}: {name}"] for file, name in COMPILED.items())


def test_the_pretended_package_has_the_recorded_functions(tmp_path: Path) -> None:
    assert functions(pretended.write(tmp_path)) == RECORDED["functions"]


@pytest.mark.skipif(checkout() is None, reason="MindSpeed is not there: put its checkout on PYTHONPATH")
def test_the_checkout_has_the_recorded_functions() -> None:
    root = checkout()
    assert root is not None
    assert functions(root) == RECORDED["functions"] and compiled(root) == RECORDED["compiled"]
