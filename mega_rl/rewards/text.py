"""Rewards on the form of a response. Each takes (data_source, solution_str, ground_truth, extra_info)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def format_regex(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any],
    pattern: str,
    score: float = 1.0,
) -> float:
    """``score`` where the pattern is found in the response, else 0.

    Args:
        pattern: a Python regular expression, searched with ``.`` matching newlines; anchor it with ``^`` and ``$`` to
            describe the whole response.
    """
    return score if re.search(pattern, solution_str, re.DOTALL) else 0.0
