"""What is tried out in a process of its own: ``python -m mega_rl.doctor.probes.NAME`` on the platform that
``MEGA_RL_PLATFORM`` names. A probe reports what it measured; whether that is good is judged by ``doctor.trials``.
"""

from __future__ import annotations

import json
from typing import Any

MARK = "mega_rl probe: "  # libraries print too


def report(**figures: Any) -> None:
    print(f"{MARK}{json.dumps(figures)}\n", end="", flush=True)  # one write: other processes print too


def read_reports(output: str) -> dict[str, Any]:
    """Every figure that a probe reported before it ended."""
    figures: dict[str, Any] = {}
    for line in output.splitlines():
        if line.startswith(MARK):
            figures |= json.loads(line.removeprefix(MARK))
    return figures
