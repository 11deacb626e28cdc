"""A reward of our own: partial credit for a number that is near the right one; of one sample, and of a batch."""

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


def closeness_of_batch(
    data_sources: list[str],
    solution_strs: list[str],
    ground_truths: list[str],
    extra_infos: list[Mapping[str, Any]],
    tolerance: float = 0.5,
) -> list[float]:
    """The same for many samples at once: one value per sample, none of which depends on the other samples."""
    rows = zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
    return [closeness(*row, tolerance=tolerance) for row in rows]
