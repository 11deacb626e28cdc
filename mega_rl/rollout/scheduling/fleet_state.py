"""What a scheduler knows, as plain values of a checkpoint and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mega_rl.fleet.tickets import Key
from mega_rl.rollout.collect.records import row_of_score, row_of_trajectory, score_of_row, trajectory_of_row
from mega_rl.types import Score

Scores = dict[Key, tuple[Score, ...]]  # of the groups that are decided


def encoded(state: Mapping[str, Any], scores: Mapping[Key, tuple[Score, ...]]) -> dict[str, Any]:
    """The state of a ``Commit``: its trajectories as rows of ``records``, its groups with their scores."""

    def group(step: int, row: Mapping[str, Any]) -> dict[str, Any]:
        found = scores[Key(step, row["ticket"])] if row["is_kept"] is not None else ()
        parts = {part: {str(s): row_of_trajectory(t) for s, t in row[part].items()} for part in ("results", "prefixes")}
        return {**row, **parts, "scores": [row_of_score(score) for score in found]}

    steps = {str(step): [group(step, row) for row in rows] for step, rows in state["steps"].items()}
    return {**state, "steps": steps}


def decoded(state: Mapping[str, Any]) -> tuple[dict[str, Any], Scores]:
    """The inverse of ``encoded``."""
    scores: Scores = {}

    def group(step: int, row: Mapping[str, Any]) -> dict[str, Any]:
        if row["is_kept"] is not None:
            scores[Key(step, row["ticket"])] = tuple(map(score_of_row, row["scores"]))
        parts = {part: {int(s): trajectory_of_row(t) for s, t in row[part].items()} for part in ("results", "prefixes")}
        return {**row, **parts}

    steps = {int(step): [group(int(step), row) for row in rows] for step, rows in state["steps"].items()}
    return {**state, "steps": steps}, scores
