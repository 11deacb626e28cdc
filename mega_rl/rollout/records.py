"""Rollouts as rows of JSON, for people, for replay and for checkpoints; every number survives exactly."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mega_rl.errors import InputError
from mega_rl.rollout.collect import Group
from mega_rl.types import Completion, Prompt, Score, UnknownReward

PATTERN = "step_{:06d}.jsonl"


def to_rows(group: Group) -> list[dict[str, Any]]:
    """One row per response: the fields of ``Completion``, its prompt and its score, with plain values.

    A score that is not known is None: JSON has no NaN.
    """
    pairs = zip(group.completions, group.scores, strict=True)
    return [dataclasses.asdict(completion) | {"score": _from_score(score)} for completion, score in pairs]


def _from_score(score: Score) -> dict[str, Any]:
    return dataclasses.asdict(score) | {"value": score.value if score.is_known else None}


def to_completion(row: Mapping[str, Any]) -> Completion:
    """The completion of a row; fields that it does not have (advantage, ...) are left aside."""
    known = {field.name: row[field.name] for field in dataclasses.fields(Completion)}
    prompt = dict(known["prompt"], token_ids=tuple(known["prompt"]["token_ids"]))
    sequences = {name: tuple(known[name]) for name in ("token_ids", "logprobs")}
    return Completion(**{**known, **sequences, "prompt": Prompt(**prompt)})


def to_group(rows: Iterable[Mapping[str, Any]]) -> Group:
    """The inverse of ``to_rows``."""
    listed = list(rows)
    return Group(tuple(to_completion(row) for row in listed), tuple(_to_score(row["score"]) for row in listed))


def _to_score(row: Mapping[str, Any]) -> Score:
    unknown = {name: UnknownReward(**why) for name, why in row["unknown"].items()}
    value = math.nan if row["value"] is None else row["value"]
    return Score(value, row["parts"], unknown)


def write_step(directory: Path, step: int, rows: Iterable[Mapping[str, Any]], num_kept: int) -> Path:
    """Write the rows of one step, whole or not at all, and remove all but the newest ``num_kept`` files (-1: none)."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / PATTERN.format(step)
    fresh = path.with_name(f".{path.name}.new")
    with fresh.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, allow_nan=False, default=str) + "\n")
    fresh.replace(path)
    if num_kept > 0:
        for old in sorted(directory.glob("step_*.jsonl"))[:-num_kept]:
            old.unlink()
    return path


def read_step(directory: Path, step: int) -> list[dict[str, Any]]:
    """The rows of one step.

    Raises:
        InputError: no file for the step, or a line of it that is not a row.
    """
    path = directory / PATTERN.format(step)
    if not path.is_file():
        raise InputError(
            f"rollout.replay={directory} has no {path.name}: give a directory with the rollouts of every step, or set "
            "trainer.total_steps to the steps that it has"
        )
    rows = []
    # Not splitlines(): texts may hold other characters that it takes for ends of lines.
    for number, line in enumerate(path.read_text(encoding="utf-8").removesuffix("\n").split("\n"), start=1):
        try:
            row = json.loads(line)
            to_completion(row)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{path}:{number} is not a recorded rollout ({type(error).__name__}: {error}); record the step again"
            ) from error
        rows.append(row)
    return rows
