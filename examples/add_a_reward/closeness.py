"""A reward of our own: partial credit for a number that is near the right one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def closeness(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any],
    tolerance: float = 0.5,
) -> float:
    """1 for the right number, falling linearly to 0 at a relative error of ``tolerance``; 0 without a number."""
    numbers = re.findall(r"-?[0-9]+(?:\.[0-9]+)?", solution_str)
    if not numbers:
        return 0.0
    truth = float(ground_truth)
    error = abs(float(numbers[-1]) - truth) / max(abs(truth), 1.0)
    return max(0.0, 1.0 - error / tolerance)
