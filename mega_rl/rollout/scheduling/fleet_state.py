"""What a scheduler knows, as plain values of a checkpoint and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mega_rl.fleet.tickets import Key
from mega_rl.rollout.collect.records import row_of_score, row_of_trajectory, score_of_row, trajectory_of_row
from mega_rl.rollout.partial import PartialResponse
from mega_rl.types import Response, Score, Trajectory

Scores = dict[Key, tuple[Score, ...]]  # of the groups that are decided
MAX_TOKENS = 4_000_000  # of responses under way in a checkpoint, where one takes about 30 bytes


def encoded(
    state: Mapping[str, Any], scores: Mapping[Key, tuple[Score, ...]], whole: Callable[[Response], Trajectory]
) -> dict[str, Any]:
    """The state of a ``Commit``: its trajectories as rows of ``records``, its groups with their scores.

    Args:
        whole: gets a trajectory from the rank that owns it.
    """
    saved = _saved(state)

    def group(step: int, row: Mapping[str, Any]) -> dict[str, Any]:
        key = Key(step, row["ticket"])
        found = scores[key] if row["is_kept"] is not None else ()
        results = {str(sample): row_of_trajectory(whole(trajectory)) for sample, trajectory in row["results"].items()}
        tails = {s: prefix.trajectory() for s, prefix in row["prefixes"].items() if (*key, s) in saved}
        prefixes = {str(sample): row_of_trajectory(tail) for sample, tail in tails.items()}
        return {**row, "results": results, "prefixes": prefixes, "scores": [row_of_score(score) for score in found]}

    steps = {str(step): [group(step, row) for row in rows] for step, rows in state["steps"].items()}
    return {**state, "steps": steps}


def _saved(state: Mapping[str, Any]) -> set[tuple[int, int, int]]:
    """Step, ticket and sample of the responses under way that a checkpoint holds: the longest, which took longest."""
    found = [
        (prefix.num_sampled, (step, row["ticket"], sample))
        for step, rows in state["steps"].items()
        for row in rows
        for sample, prefix in row["prefixes"].items()
    ]
    saved, left = set(), MAX_TOKENS
    for num_tokens, place in sorted(found, reverse=True):
        left -= num_tokens
        if left < 0:
            break
        saved.add(place)
    return saved


def decoded(state: Mapping[str, Any]) -> tuple[dict[str, Any], Scores]:
    """The inverse of ``encoded``."""
    scores: Scores = {}

    def group(step: int, row: Mapping[str, Any]) -> dict[str, Any]:
        if row["is_kept"] is not None:
            scores[Key(step, row["ticket"])] = tuple(map(score_of_row, row["scores"]))
        results = {int(sample): trajectory_of_row(one) for sample, one in row["results"].items()}
        prefixes = {int(s): PartialResponse.of(trajectory_of_row(one)) for s, one in row["prefixes"].items()}
        return {**row, "results": results, "prefixes": prefixes}

    steps = {int(step): [group(int(step), row) for row in rows] for step, rows in state["steps"].items()}
    return {**state, "steps": steps}, scores
