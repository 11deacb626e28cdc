"""Rollouts as rows of JSON, for people, for replay and for checkpoints; every number survives exactly."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mega_rl.errors import InputError
from mega_rl.rollout.collect.collect import PromptGroup
from mega_rl.types import Outcome, Prompt, PromptImage, Score, Span, Trajectory, TurnSpan, UnknownReward

PATTERN = "step_{:06d}.jsonl"


def to_rows(group: PromptGroup) -> list[dict[str, Any]]:
    """One row per trajectory, with plain values: its prompt, what followed the prompt, and its score.

    ``token_ids`` and ``logprobs`` are those of the tokens after the prompt, ``weight_version`` is the newest one. Only
    a trajectory of several turns or spans has the keys ``loss_mask`` (0 or 1, for the same tokens), ``spans`` and
    ``turns`` (whose indices count from the prompt's first token), only an episode has ``episode`` besides (its
    ``Outcome``), and only one with routing has ``routed_experts``: the array's ``dtype``, ``shape`` and, in base64, its
    bytes, little-endian. A prompt with pictures has ``images`` (their keys and places), and of the tokens of each only
    the first. A score that is not known is None: JSON has no NaN.
    """
    pairs = zip(group.trajectories, group.scores, strict=True)
    return [row_of_trajectory(trajectory) | {"score": row_of_score(score)} for trajectory, score in pairs]


def row_of_trajectory(trajectory: Trajectory) -> dict[str, Any]:
    """The same of one trajectory, without its score."""
    after_prompt = slice(len(trajectory.prompt.token_ids), None)
    row = {
        "prompt": row_of_prompt(trajectory.prompt),
        "sample_index": trajectory.sample_index,
        "token_ids": trajectory.token_ids[after_prompt].tolist(),
        "logprobs": trajectory.logprobs[after_prompt].tolist(),
        "text": trajectory.text,
        "finish_reason": trajectory.finish_reason,
        "weight_version": trajectory.newest_version,
    }
    if (routed := trajectory.routed_experts) is not None:
        data = base64.b64encode(routed.astype(routed.dtype.newbyteorder("<")).tobytes()).decode("ascii")
        row["routed_experts"] = {"dtype": routed.dtype.name, "shape": list(routed.shape), "data": data}
    if trajectory.episode is not None:
        row["episode"] = row_of_outcome(trajectory.episode)
    if trajectory.is_single_turn:
        return row
    return row | {
        "loss_mask": trajectory.loss_mask[after_prompt].astype(int).tolist(),
        "spans": [dataclasses.asdict(span) for span in trajectory.spans],
        "turns": [dataclasses.asdict(turn) for turn in trajectory.turns],
    }


def row_of_prompt(prompt: Prompt) -> dict[str, Any]:
    """Of a picture only its first token is written, and ``images`` only if there are any."""
    row = dataclasses.asdict(prompt)
    if not prompt.images:
        del row["images"]
        return row
    repeated = {place for image in prompt.images for place in range(image.first + 1, image.first + image.num_tokens)}
    kept = [token for place, token in enumerate(prompt.token_ids) if place not in repeated]
    return row | {"token_ids": kept, "images": [dataclasses.asdict(image) for image in prompt.images]}


def prompt_of_row(row: Mapping[str, Any]) -> Prompt:
    token_ids, images = list(row["token_ids"]), tuple(PromptImage(**image) for image in row.get("images", ()))
    for image in images:
        token_ids[image.first : image.first + 1] = [token_ids[image.first]] * image.num_tokens
    return Prompt(**{**row, "token_ids": tuple(token_ids), "images": images})


def row_of_outcome(outcome: Outcome) -> dict[str, Any]:
    failure = outcome.failure
    row = outcome._asdict() | {"failure": failure and dataclasses.asdict(failure), "metrics": dict(outcome.metrics)}
    return _without_empty_turns(row)


def _without_empty_turns(row: dict[str, Any]) -> dict[str, Any]:
    """The row without rewards of turns where there are none, as it was before there could be any."""
    return {name: value for name, value in row.items() if value or name != "turn_rewards"}


def outcome_of_row(row: Mapping[str, Any]) -> Outcome:
    failure = row["failure"] and UnknownReward(**row["failure"])
    return Outcome(**{**row, "failure": failure, "turn_rewards": tuple(row.get("turn_rewards", ()))})


def row_of_score(score: Score) -> dict[str, Any]:
    row = dataclasses.asdict(score) | {"value": score.value if score.is_known else None}
    return _without_empty_turns(row)


def trajectory_of_row(row: Mapping[str, Any]) -> Trajectory:
    """The trajectory of a row; keys that do not belong to a trajectory (advantage, ...) are ignored."""
    prompt = prompt_of_row(row["prompt"])
    values = [row[key] for key in ("token_ids", "logprobs", "text", "finish_reason", "weight_version")]
    single = Trajectory.single_turn(prompt, row["sample_index"], *values)
    if "routed_experts" in row:
        single = dataclasses.replace(single, routed_experts=_routed_experts(row["routed_experts"]))
    if "loss_mask" not in row:
        return single
    return dataclasses.replace(
        single,
        loss_mask=np.array([0] * len(prompt.token_ids) + row["loss_mask"], np.bool_),
        spans=tuple(Span(**span) for span in row["spans"]),
        turns=tuple(TurnSpan(**turn) for turn in row["turns"]),
        episode=outcome_of_row(row["episode"]) if "episode" in row else None,
    )


def _routed_experts(row: Mapping[str, Any]) -> npt.NDArray[np.unsignedinteger[Any]]:
    dtype = {"uint8": np.uint8, "uint16": np.uint16}[row["dtype"]]
    data = np.frombuffer(base64.b64decode(row["data"], validate=True), np.dtype(dtype).newbyteorder("<"))
    return data.reshape(row["shape"]).astype(dtype)


def to_group(rows: Iterable[Mapping[str, Any]]) -> PromptGroup:
    """The inverse of ``to_rows``."""
    listed = list(rows)
    return PromptGroup(
        tuple(trajectory_of_row(row) for row in listed), tuple(score_of_row(row["score"]) for row in listed)
    )


def score_of_row(row: Mapping[str, Any]) -> Score:
    unknown = {name: UnknownReward(**why) for name, why in row["unknown"].items()}
    value = math.nan if row["value"] is None else row["value"]
    return Score(value, row["parts"], unknown, tuple(row.get("turn_rewards", ())))


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


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add rows to a file of one step, all of them in one write."""
    text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False, default=str) + "\n" for row in rows)
    with path.open("ab", buffering=0) as file:
        file.write(text.encode())


def read_step(directory: Path, step: int) -> list[dict[str, Any]]:
    """The rows of one step.

    Raises:
        InputError: there is no file for the step, or a line of the file is not a row.
    """
    path = directory / PATTERN.format(step)
    if not path.is_file():
        raise InputError(
            f"rollout.replay={directory} has no {path.name}: give a directory with the rollouts of every step, or set "
            "trainer.total_steps to the steps that it has"
        )
    rows = []
    # Not splitlines(), which also splits at other characters that a text may hold.
    for number, line in enumerate(path.read_text(encoding="utf-8").removesuffix("\n").split("\n"), start=1):
        try:
            row = json.loads(line)
            trajectory_of_row(row)
        except (ValueError, KeyError, TypeError, OverflowError, AssertionError) as error:
            raise InputError(
                f"{path}:{number} is not a recorded rollout ({type(error).__name__}: {error}); record the step again"
            ) from error
        rows.append(row)
    return rows
