"""Whatever a reward answers, and whatever it writes to the channel: accepted and right, or unknown with its cause."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, strategies as st

from mega_rl.rewards.functions.forms import is_equal
from mega_rl.rewards.functions.math import boxed, dapo_math, exact_match, gsm8k
from mega_rl.rewards.functions.registry import BoundReward
from mega_rl.rewards.functions.text import repetition
from mega_rl.rewards.pool.answers import read_answers, read_kinds, read_refusal
from mega_rl.rewards.pool.pool import WorkerPool
from mega_rl.rewards.pool.process import FORGED, WorkerFailure, _sealed_memory
from mega_rl.rewards.pool.worker import (
    CAUSES,
    GARBLED,
    KINDS,
    MAX_DETAIL_LENGTH,
    MAX_REFUSAL_LENGTH,
    MAX_VALUE,
    WorkerProgress,
    answer,
)
from tests.fuzzing import TEXTS, VALUES, cases
from tests.pretended.reward_workers import ENDED, PretendedWorker, pretended_pool, right

ANSWERS = st.one_of(
    st.floats(),
    st.floats(-1e30, 1e30),
    st.tuples(st.sampled_from([*CAUSES, "bored", ""]), TEXTS).map(list),
    VALUES,
)
MESSAGES = st.one_of(
    st.dictionaries(st.sampled_from(["number", "answers", "unfit", "ready", "refused", "x"]), VALUES, max_size=3),
    st.fixed_dictionaries(
        {"number": st.just(7) | VALUES, "answers": st.lists(ANSWERS, min_size=1, max_size=3) | VALUES},
        optional={"x": VALUES},
    ),
    st.fixed_dictionaries({"number": st.just(7), "unfit": ANSWERS}),
    st.fixed_dictionaries({"ready": st.lists(st.sampled_from([*KINDS, "no"]) | VALUES, max_size=2) | VALUES}),
    st.fixed_dictionaries({"refused": VALUES}),
)


def is_answer(value: Any) -> bool:
    """The definition of what a worker may say about a sample."""
    return math.isfinite(value) and abs(value) <= MAX_VALUE if isinstance(value, float) else is_failure(value)


def is_failure(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(text, str) for text in value)
        and value[0] in CAUSES
        and len(value[1]) <= MAX_DETAIL_LENGTH
    )


def printable(value: Any) -> Any:
    return value if isinstance(value, float) else (value[0], value[1].encode(errors="replace").decode())


@cases(1000)
@given(MESSAGES)
def test_messages(message: dict[str, Any]) -> None:
    is_right = (
        message.keys() == {"number", "answers"}
        and type(message["number"]) is int
        and message["number"] == 7
        and isinstance(message["answers"], list)
        and len(message["answers"]) == 2
        and all(map(is_answer, message["answers"]))
    )
    unfit = message["unfit"] if message.keys() == {"number", "unfit"} else None
    is_unfit = type(message.get("number")) is int and message["number"] == 7 and is_failure(unfit)
    try:
        answers = read_answers(message, 7, 2)
        assert is_right and answers == [printable(value) for value in message["answers"]]
    except WorkerFailure as failure:
        assert not is_right
        assert failure.args == (printable(unfit) if is_unfit else (GARBLED, FORGED))
    try:
        kinds = read_kinds(message, 1)
        assert message == {"ready": kinds} and len(kinds) == 1 and kinds[0] in KINDS
    except WorkerFailure as failure:
        assert failure.args == (GARBLED, FORGED)
    refusal = read_refusal(message)
    assert refusal is None or (refusal.encode() and len(refusal) <= MAX_REFUSAL_LENGTH)


LINES = st.one_of(
    st.binary(max_size=60),
    MESSAGES.map(lambda message: json.dumps(message).replace('"number": 7', '"number": NUMBER').encode() + b"\n"),
    ANSWERS.map(
        lambda value: json.dumps({"number": "N", "answers": [value]}).replace('"N"', "NUMBER").encode() + b"\n"
    ),
    st.tuples(st.integers(0, 40), st.binary(max_size=6), st.integers(0, 40)).map(
        lambda cut: right(2.0)[: cut[0]] + cut[1] + right(2.0)[cut[2] :]
    ),
    st.tuples(st.sampled_from([b"[", b'{"a":', b" ", b"\xff", b"9", b"\n"]), st.sampled_from([1, 70_000, 1 << 20])).map(
        lambda parts: parts[0] * (parts[1] // len(parts[0])) + b"\n"
    ),
    st.tuples(st.just(right(3.0)), st.binary(min_size=1, max_size=20)).map(b"".join),
)


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with pretended_pool(PretendedWorker, 1) as made:
        yield made


def told_by(line: bytes) -> Any:
    """What the bytes tell of the sample if they are a message in the right form; else that they garble."""
    try:
        message = json.loads(line.replace(b"NUMBER", b"7"))
    except (ValueError, RecursionError):
        return GARBLED, FORGED
    match message:
        case {"number": int(number), "answers": [value], **rest} if not rest and is_answer(value):
            pass
        case {"number": int(number), "unfit": value, **rest} if not rest and is_failure(value):
            pass
        case _:
            return GARBLED, FORGED
    is_own = b"NUMBER" in line and type(number) is int and number == 7
    return printable(value) if is_own else (GARBLED, FORGED)


@cases(300)
@given(LINES)
def test_bytes_on_the_channel(pool: WorkerPool, data: bytes) -> None:
    ((first, hostile, last),) = pool.submit([right(0.25), data, right(0.75)]).result(timeout=100)
    assert (first, last) == (0.25, 0.75)
    head, end, rest = data.partition(b"\n")
    if not end:  # nothing whole, and then the worker died
        assert hostile in (ENDED.args, (GARBLED, FORGED))
    elif not rest:
        assert hostile == told_by(head)
    else:  # what follows comes too late, or garbles the answer
        assert hostile in (told_by(head), (GARBLED, FORGED))


RETURNED = st.one_of(
    VALUES,
    st.floats(),
    st.sampled_from([1e308, -1e308, 1e31, 1e30, math.inf, -0.0, 10**400, True, 1j, b"1", object(), [1.0], (1.0,)]),
)


@cases(300)
@given(st.lists(RETURNED, min_size=1, max_size=4))
def test_values_that_a_reward_returns(values: list[Any]) -> None:
    reward = BoundReward(lambda solution_str, **rest: values[int(solution_str)], {})
    samples = [("s", str(index), "t", {}, 1) for index in range(len(values))]
    with patch("mega_rl.rewards.pool.worker._has_children", lambda: False):  # the tests' process may have some
        answers = answer(reward, samples, 1.0, WorkerProgress(_sealed_memory(WorkerProgress.SIZE)))
    message = json.loads(json.dumps({"number": 7, "answers": answers}))
    for value, told in zip(values, read_answers(message, 7, len(values)), strict=True):
        if isinstance(told, float):
            assert told == float(value) and abs(told) <= MAX_VALUE
        else:
            assert told[0] in ("not_a_number", "raised")


PIECES = st.sampled_from(
    [
        "1",
        "2",
        "12",
        "000",
        ",",
        ".",
        "-",
        "+",
        "/",
        " ",
        "=",
        "x",
        "y",
        "{",
        "}",
        "(",
        ")",
        "$",
        "%",
        "^",
        "°",
        "²",
        "\n",
    ]
    + [
        "\\frac",
        "\\sqrt",
        "\\text{",
        "\\boxed{",
        "\\left(",
        "\\circ",
        "\\,",
        "{,}",
        "cm",
        "m",
        " degrees",
        "Answer: ",
        "####",
    ]
    + ["\\pi", "\\", "or", "٣", "𝟙", "\ud800", "½"]
)
FORMS = st.lists(PIECES, max_size=12).map("".join) | TEXTS


@cases(1000)
@given(FORMS, FORMS)
def test_graders_give_a_number_for_any_text(response: str, truth: str) -> None:
    assert is_equal(truth, truth) and is_equal(response, truth) == is_equal(truth, response)
    for grader in (exact_match, boxed, dapo_math, repetition):
        assert -1.0 <= grader("s", response, truth, {}) <= 1.0
    try:
        assert gsm8k("s", response, truth, {}) in (0.0, 1.0)
    except ValueError as error:
        assert "is not a number" in str(error)


@cases(300)
@given(st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6))
def test_an_integer_is_right_in_every_form_and_no_other_one_is(number: int, other: int) -> None:
    for form in (
        "{}",
        "${}$",
        "x = {}",
        "{} cm",
        "{}^\\circ",
        "{}.0",
        " {}. ",
        "\\text{{{}}}",
        "n={} \\text{{ units}}",
        "{:,}",
    ):
        text = form.format(number)
        assert dapo_math("s", f"Answer: {text}", str(number), {}) == 1.0, text
        assert boxed("s", f"\\boxed{{{text}}}", str(other), {}) == float(number == other), text
