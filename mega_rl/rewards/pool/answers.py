"""What a reward worker may say. A reward runs in its worker and can write anything there: all of it is checked."""

from __future__ import annotations

import math
from typing import Any

from mega_rl.rewards.functions.registry import IMAGES
from mega_rl.rewards.pool.process import FORGED, WorkerFailure
from mega_rl.rewards.pool.worker import (
    CAUSES,
    GARBLED,
    KINDS,
    MAX_DETAIL_LENGTH,
    MAX_FIGURE_NAME,
    MAX_FIGURES,
    MAX_REFUSAL_LENGTH,
    MAX_VALUE,
    SCORE,
    Answer,
)  # fmt: skip


def garbled() -> WorkerFailure:
    """The failure that something other than the worker's own code wrote to the channel."""
    return WorkerFailure(GARBLED, FORGED)


def read_kinds(message: dict[str, Any], num_rewards: int) -> list[str]:
    """The kinds of the rewards, which a worker sends when it has loaded them; beside them, that one takes pictures.

    Raises:
        WorkerFailure: anything else came.
    """
    kinds = message.get("ready")
    if not {"ready"} <= message.keys() <= {"ready", IMAGES} or message.get(IMAGES, True) is not True:
        raise garbled()
    if not isinstance(kinds, list) or len(kinds) != num_rewards:
        raise garbled()
    if not all(isinstance(kind, str) and kind in KINDS for kind in kinds):
        raise garbled()
    return kinds


def read_refusal(message: dict[str, Any]) -> str | None:
    """Why a worker does not load the rewards; None if it does not say so in a sentence."""
    match message:
        case {"refused": str(refusal), **rest} if not rest and 0 < len(refusal) <= MAX_REFUSAL_LENGTH:
            return _printable(refusal)
    return None


def read_answers(message: dict[str, Any], number: int, num_samples: int) -> list[Answer]:
    """The answers to call ``number``, one per sample.

    Raises:
        WorkerFailure: the worker says that it is unfit to go on, or anything else came.
    """
    if type(message.get("number")) is not int or message["number"] != number:  # True is 1 as well
        raise garbled()
    if message.keys() == {"number", "unfit"}:
        failure = _failure(message["unfit"])
        raise WorkerFailure(*failure)
    answers = message.get("answers")
    if message.keys() != {"number", "answers"} or not isinstance(answers, list) or len(answers) != num_samples:
        raise garbled()
    return [_answer(answer) for answer in answers]


def _answer(answer: Any) -> Answer:
    if isinstance(answer, float):
        return _value(answer)
    return _figures(answer) if isinstance(answer, dict) else _failure(answer)


def _figures(answer: dict[str, Any]) -> dict[str, float]:
    """A value with figures beside it."""
    if SCORE not in answer or len(answer) > MAX_FIGURES + 1:
        raise garbled()
    for name, figure in answer.items():
        if not name.isidentifier() or len(name) > MAX_FIGURE_NAME or not isinstance(figure, float):
            raise garbled()
        _value(figure)
    return answer


def _value(value: float) -> float:
    if not math.isfinite(value) or abs(value) > MAX_VALUE:
        raise garbled()  # a worker says of such a value that it is no number
    return value


def _failure(pair: Any) -> tuple[str, str]:
    """Cause and detail of a value that is not known."""
    match pair:
        case [str(cause), str(detail)] if cause in CAUSES and len(detail) <= MAX_DETAIL_LENGTH:
            return cause, _printable(detail)
    raise garbled()


def _printable(text: str) -> str:
    """The text without halves of characters, which no file takes."""
    return text.encode(errors="replace").decode()
