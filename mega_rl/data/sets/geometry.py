"""Problems about a picture: Geometry3K, in the columns in which it is published."""

from __future__ import annotations

import hashlib

from mega_rl.data.pictures.pictures import MARK, encoded_pictures, is_usable
from mega_rl.data.rows.rows import Row
from mega_rl.data.sets.counting import Dropped, Record, fold
from mega_rl.data.sets.problems import MATH_INSTRUCTION, problem_record, texts
from mega_rl.data.sets.turns import turns_of

UNEVEN = "more or fewer pictures than places for them"
UNUSABLE = "a picture that cannot be decoded, or that training refuses"


def geo3k(row: Row) -> Record:
    """``images``, ``problem`` with ``<image>`` for each, and ``answer``; the written rows have the pictures' bytes."""
    problem, answer = texts(row, "problem", "answer")
    if row.get("images") is None:
        raise row.missing("`images`")
    pictures = list(encoded_pictures(row))
    if problem.count(MARK) != len(pictures):
        raise Dropped(UNEVEN)
    if not all(map(is_usable, pictures)):
        raise Dropped(UNUSABLE)
    record = problem_record(
        "hiyouga/geometry3k", turns_of(f"{problem} {MATH_INSTRUCTION}"), answer, {"question": problem}, problem
    )
    images = [{"bytes": content, "path": None} for content in pictures]
    # The same words are asked of many pictures.
    shown = "".join(hashlib.sha256(content).hexdigest() for content in pictures)
    return Record({**record.fields, "images": images}, fold(problem) + shown, truth=record.truth)
