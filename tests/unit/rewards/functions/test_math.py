"""Grading by rule: tables of responses that were met in practice."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest

from mega_rl.config.schema.sampling import RewardConfig
from mega_rl.rewards.functions.forms import is_equal, parse_number
from mega_rl.rewards.functions.math import boxed, dapo_math, exact_match, gsm8k, last_boxed
from mega_rl.rewards.scorer import build_scorer
from mega_rl.types import Prompt, Trajectory


@pytest.mark.parametrize(
    ("response", "truth", "options", "expected"),
    [
        ("42", "42", {}, 1.0),
        (" 42\n", "42", {}, 1.0),
        ("042", "42", {}, 0.0),
        ("42 ", " 42", {}, 1.0),
        ("4 2", "42", {}, 0.0),
        ("Yes", "yes", {}, 0.0),
        ("Yes", "yes", {"case_sensitive": False}, 1.0),
    ],
)
def test_exact_match(response: str, truth: str, options: dict[str, bool], expected: float) -> None:
    assert exact_match("s", response, truth, {}, **options) == expected


@pytest.mark.parametrize(
    ("response", "truth", "strict", "flexible"),
    [
        ("#### 72", "72", 1, 1),
        ("#### 72", "72.0", 1, 1),
        ("####72", "72", 1, 1),
        ("so\n#### 72.", "72", 1, 1),
        ("#### 72.00", "72", 1, 1),
        ("#### $72", "72", 1, 1),
        ("#### $1,234.50", "1234.5", 1, 1),
        ("#### 1,234", "1,234", 1, 1),
        ("#### 72 apples", "72", 1, 1),
        ("#### -5", "-5", 1, 1),
        ("#### -$5", "-5", 1, 1),
        ("#### 5", "-5", 0, 0),
        ("#### 1 then #### 2", "2", 1, 1),
        ("#### 2 then #### 1", "2", 0, 0),
        ("#### 72 (of 100)", "72", 1, 0),
        ("#### seventy-two", "72", 0, 0),
        ("#### 1,2", "1", 0, 0),
        ("#### 72.5", "72", 0, 0),
        ("#### 7/2", "7", 0, 0),
        ("### 72", "72", 0, 1),
        ("The answer is 72.", "72", 0, 1),
        ("24 + 48 = 72", "72", 0, 1),
        ("it is 10-3", "3", 0, 1),
        ("it is -3", "3", 0, 0),
        ("pay .5", "0.5", 0, 1),
        ("none", "72", 0, 0),
        ("", "72", 0, 0),
        ("72 ####", "72", 0, 1),
        ("#### 72", "a long solution 1 2 3\n#### 72", 1, 1),
    ],
)
def test_gsm8k(response: str, truth: str, strict: float, flexible: float) -> None:
    assert gsm8k("s", response, truth, {}, method="strict") == strict
    assert gsm8k("s", response, truth, {}, method="flexible") == flexible


def test_gsm8k_rewards_are_configurable_and_a_missing_number_never_earns_the_format_score() -> None:
    options = {"correct": 2.0, "format_score": 0.1}
    assert [gsm8k("s", text, "7", {}, **options) for text in ("#### 7", "#### 8", "7")] == [2.0, 0.1, 0.0]


def test_gsm8k_refuses_a_ground_truth_that_is_no_number() -> None:
    with pytest.raises(ValueError, match="not a number"):
        gsm8k("s", "#### 7", "seven", {})


@pytest.mark.parametrize("method", ["strict", "flexible"])
def test_every_gsm8k_test_solution_earns_1_and_its_neighbour_0(gsm8k_dir: Path, method: str) -> None:
    rows = [json.loads(line) for line in (gsm8k_dir / "test.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 1319
    scorer = build_scorer([RewardConfig("gsm8k", options={"method": method})])
    right, wrong = [], []
    for index, row in enumerate(rows):
        truth = row["answer"].rpartition("####")[2].strip()
        prompt = Prompt(index, (1,), row["question"], truth, "openai/gsm8k")
        right.append(Trajectory.single_turn(prompt, 0, (1,), (0.0,), row["answer"], "stop", 0))
        wrong.append(Trajectory.single_turn(prompt, 1, (1,), (0.0,), row["answer"] + "1", "stop", 0))
    assert {score.value for score in scorer.score(right)} == {1.0}
    assert {score.value for score in scorer.score(wrong)} == {0.0}
    scorer.close()


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        (r"\boxed{42}", "42", 1.0),
        (r"\boxed{1} or \boxed{42}", "42", 1.0),
        (r"\boxed{42} or \boxed{1}", "42", 0.0),
        (r"\boxed{42} or \boxed{1", "42", 1.0),
        (r"$\boxed{\frac{1}{2}}$", "0.5", 1.0),
        (r"\boxed{\dfrac{2}{4}}", r"\frac12", 1.0),
        (r"\boxed{-\frac{1}{2}}", "-1/2", 1.0),
        (r"\boxed{1\frac{1}{2}}", "11/2", 0.0),
        (r"\boxed{1{,}000}", "1000", 1.0),
        (r"\boxed{1,000}", "1000", 1.0),
        (r"\boxed{1,2}", "12", 0.0),
        (r"\boxed{1\,000\text{ m}}", r"\boxed{1000\mathrm{m}}", 1.0),
        (r"\boxed{x^{2} + 1}", "x^{2}+1", 1.0),
        (r"\boxed{\left(1, 2\right)}", "(1,2)", 1.0),
        (r"\boxed{50\%}", "50", 1.0),
        (r"\boxed{1/0}", "1/0", 1.0),
        (r"\boxed{}", "", 0.0),
        ("42", "42", 0.0),
    ],
)
def test_boxed(response: str, truth: str, expected: float) -> None:
    assert boxed("s", response, truth, {}) == expected


def test_boxed_format_score_needs_a_box() -> None:
    scores = [boxed("s", text, "1", {}, format_score=0.1) for text in (r"\boxed{2}", r"\boxed{ }", "2")]
    assert scores == [0.1, 0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{a{b}c}", "a{b}c"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"} \boxed{3} }", "3"),
        (r"{ \boxed{3}", "3"),
        (r"\boxed 3", None),
        (r"\boxed{" * 1000, None),
    ],
)
def test_last_boxed(text: str, expected: str | None) -> None:
    assert last_boxed(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("72", Fraction(72)),
        ("72.0", Fraction(72)),
        (" $1,234.5. ", Fraction(2469, 2)),
        ("-3 / 6", Fraction(-1, 2)),
        (".5", Fraction(1, 2)),
        ("5%", Fraction(5)),
        ("1/0", None),
        ("1e9", None),
        ("1,2", None),
        ("nan", None),
        ("٣", None),
        ("9" * 5000, None),
        ("", None),
    ],
)
def test_parse_number(text: str, expected: Fraction | None) -> None:
    assert parse_number(text) == expected


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        ("Answer: 42", "42", 1.0),
        ("steps\nAnswer: $42$", "42", 1.0),
        ("answer : 42.0", "42", 1.0),
        (r"Answer: \boxed{\frac{1}{2}}", "1/2", 1.0),
        ("Answer: 1\nAnswer: 42", "42", 1.0),
        ("Answer: 42\nAnswer: 1", "42", -1.0),
        ("Answer: \n42", "42", -1.0),
        ("42", "42", -1.0),
        ("Answer: 42" + " " * 300, "42", -1.0),  # only the end is read
        ("Answer: x + 1", "x+1", 1.0),
    ],
)
def test_dapo_math(response: str, truth: str, expected: float) -> None:
    assert dapo_math("s", response, truth, {}) == expected


SAME = [
    ("5 cm", "5"),
    ("5", r"5 \text{ cm}"),
    (r"5\text{ cm}", "5 centimeters"),
    (r"5\,\mathrm{m}", "5"),
    (r"12 \text{ m}^2", "12"),
    ("12 square meters", r"12\text{ m}^2"),
    ("12 cm²", "12"),
    (r"2.5~\text{hours}", "5/2"),
    ("60 km/h", "60"),
    ("9 ways", "9"),
    ("7 units.", "7"),
    (r"\$42", "42"),
    ("$42", "42 dollars"),
    ("42 dollars", r"\$42"),
    (r"\$1{,}250", "1250"),
    (r"90^\circ", "90"),
    (r"90^{\circ}", "90"),
    (r"$90^\circ$", "90 degrees"),
    ("90°", r"90^{\circ}"),
    ("90 degrees", "90"),
    ("25 percent", r"25\%"),
    ("x=5", "5"),
    ("$x = 5$", "5"),
    ("x_1 = -3", "-3"),
    ("m + n = 33", "33"),
    ("f(2) = 7", "7"),
    (r"\angle ABC = 30^\circ", "30"),
    (r"\text{Area} = 12", "12"),
    (r"\theta = 3", "3"),
    ("5", "x = 5"),
    ("x = 5 cm", "5"),
    ("1{,}000", "1000"),
    ("1{,}234{,}567", "1,234,567"),
    (r"1,\!000", "1000"),
    (r"1\,000", "1000"),
    (r"\sqrt3", r"\sqrt{3}"),
    (r"2\sqrt 3", r"2\sqrt{3}"),
    (r"\frac{\sqrt3}{2}", r"\dfrac{\sqrt{3}}{2}"),
    (r"3\sqrt{2} \text{ cm}", r"3\sqrt2"),
    (r"\(42\)", "42"),
    (r"\textbf{42}", "42"),
    ("+5", "5"),
    (r"\text{Tuesday}", "Tuesday"),
]
OTHER = [
    ("5 cm", "5 m"),
    (r"5\text{ cm}", r"5\text{ m}"),
    ("5 cm", "6"),
    ("5 cm", "50"),
    ("12 cm^2", "12 cm"),
    ("12 square meters", "12 cubic meters"),
    ("42 cents", r"\$42"),
    ("42 cents", "42 dollars"),
    ("90 degrees", "90 radians"),
    (r"50\%", "0.5"),
    (r"50\%", "50 cm"),
    ("5m", "5"),  # a product, perhaps
    ("5s", "5"),
    ("5 apples", "5"),
    ("5 or 6", "5"),
    ("cm", ""),
    ("y=5", "x=5"),
    ("x=5", "-5"),
    ("x=1, y=2", "2"),
    ("x=1 or x=2", "2"),
    ("x=1 and x=2", "2"),
    ("x=1; x=2", "2"),
    ("x=2=5", "5"),
    ("1=5", "5"),
    ("x>=5", "5"),
    (r"x \neq 5", "5"),
    (r"x \neq y = 5", "5"),
    (r"x \approx 5", "5"),
    ("x=5y", "5"),
    ("x=5,6", "6"),
    ("5=x", "x"),
    ("1{,}2", "12"),
    ("1{,}2", "1"),
    ("10{,}00", "1000"),
    (r"\sqrt12", r"\sqrt{12}"),
    (r"\sqrt3", r"\sqrt{2}"),
    (r"\sqrt3", "3"),
    (r"1\frac{1}{2}", "11/2"),
    ("42a", "42"),
    ("4 2", "42,"),
    ("", "5"),
    ("x=", "5"),
    ("=", ""),
    ("(1, 2)", "(2, 1)"),
]


@pytest.mark.parametrize(("answer", "truth"), SAME)
def test_what_says_the_same(answer: str, truth: str) -> None:
    assert is_equal(answer, truth) and is_equal(truth, answer)
    assert boxed("s", rf"\boxed{{{answer}}}", truth, {}) == 1.0
    assert dapo_math("s", f"Answer: {answer}", truth, {}) == 1.0


@pytest.mark.parametrize(("answer", "truth"), OTHER)
def test_what_says_something_else(answer: str, truth: str) -> None:
    assert not is_equal(answer, truth) and not is_equal(truth, answer)


def test_a_long_answer_is_compared_as_text_in_little_time() -> None:
    for part in ("x", "x=", "(", r"\sqrt", r"\frac", "1,", r"\text{", "5 cm ", "^{2", "{,}"):
        assert is_equal(part * 100_000, part * 100_000) and not is_equal(part * 100_000, "5")
        assert not is_equal(part * (390 // len(part)), "5")


def test_math_verify_takes_the_last_box() -> None:
    symbolic = pytest.importorskip(
        "mega_rl.rewards.functions.symbolic", reason="math-verify is not installed", exc_type=ImportError
    )
    table = [
        (r"\boxed{3} so \boxed{5}", "5", 1.0),
        (r"\boxed{5} so \boxed{3}", "5", 0.0),
        (r"$\boxed{3}$ and $\boxed{5}$", "5", 1.0),
        (r"$\boxed{3}$ and $\boxed{5}$", r"\{3, 5\}", 0.0),
        (r"\boxed{3}, \boxed{4} or \boxed{5}", "3", 0.0),
        (r"\boxed{\frac{1}{2}} then $7$", "1/2", 1.0),
        (r"first $3$, then $5$", "3", 0.0),
        (r"it is $3$. No: it is $5$.", "5", 1.0),
        (r"\boxed{} and 5", "5", 0.0),
    ]
    assert [symbolic.math_verify("s", response, truth, {}) for response, truth, _ in table] == [row[2] for row in table]


def test_math_verify_compares_values() -> None:
    symbolic = pytest.importorskip(
        "mega_rl.rewards.functions.symbolic", reason="math-verify is not installed", exc_type=ImportError
    )
    table = [
        (r"so $\frac{1}{2}$", "0.5", 1.0),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
        (r"\boxed{(x+1)^2}", "x^2+1", 0.0),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1.0),
        ("the answer is 42", r"\boxed{42}", 1.0),
        ("I do not know", "42", 0.0),
    ]
    assert [symbolic.math_verify("s", response, truth, {}) for response, truth, _ in table] == [row[2] for row in table]
    with pytest.raises(ValueError, match="no mathematical expression"):
        symbolic.math_verify("s", "1", "", {})
