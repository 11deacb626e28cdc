"""``tools/check_env.py --trial loop``: a short GRPO with every agreement on view."""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.launching.launch import REPO, run

pytestmark = pytest.mark.slow


def figures_of_the_loop(platform: str) -> dict[str, float]:
    """What the command found, every row of it ok: the words of an agreement -> its figure."""
    command = (
        sys.executable,
        str(REPO / "tools" / "check_env.py"),
        "--platform",
        platform,
        "--trial",
        "loop",
        "--json",
    )
    launched = run(command).check()
    said, _ = json.JSONDecoder().raw_decode(launched.stdout, launched.stdout.index('{\n  "schema"'))
    assert said["verdict"] == "ok" and {row["check"] for row in said["findings"]} == {"loop"}
    agreements = [re.fullmatch(r"(.+): (\S+), at most \S+", row["found"]) for row in said["findings"]]
    return {found[1]: float(found[2]) for found in agreements if found}


def test_the_trial_of_the_loop() -> None:
    figures = figures_of_the_loop("cpu")
    assert len(figures) == 4 and figures["trainer and engine, mean of the tokens"] < 1e-5, figures
