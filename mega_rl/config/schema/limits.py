"""What the value of a key must be besides its type: a ``Rule`` beside that type, ``Annotated[int, between(1, 8)]``.

A ``Literal`` type needs none, as it lists its words. Conditions between keys stand in ``mega_rl/config/checks``.
"""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from mega_rl.errors import shown
from mega_rl.own_code import is_own, nearest

MANY = 2**31 - 1  # of steps, tokens, processes: a larger number is a mistake
MAX_MEMORY_BYTES = 1 << 50
OWN_NAMES = ("package.module:function", "path/to/file.py:function")
_PATTERN = re.compile(r"(?:[\w.*?-]|\[!?[\w.-]+\])+", re.ASCII)


@dataclass(frozen=True)
class Rule:
    holds: Callable[[Any], bool]
    expected: str  # completes "... is 3: set it to"
    names: tuple[str, ...] = ()  # all words that hold, if only a few do, own code aside; of a list: for each entry

    def problem(self, key: str, value: Any) -> str | None:
        """A sentence if the rule does not hold for the value of a key."""
        if self.holds(value):
            return None
        wrong = [item for item in (value if isinstance(value, list) else [value]) if item not in self.names]
        guess = next((near for item in wrong if (near := nearest(str(item), self.names))), "")
        return f"{key} is {'null' if value is None else shown(value)}: set it to {self.expected}{guess}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def one_of(*names: str) -> Rule:
    return Rule(lambda value: value in names, ("one of " if len(names) > 1 else "") + ", ".join(names), names)


def one_of_or_own(words: Any) -> Rule:
    """For the words of a ``Literal``, or the name of a user's own function."""
    names = typing.get_args(words)
    expected = f"one of {', '.join(names)}, or {' or '.join(OWN_NAMES)}"
    return Rule(lambda value: value in names or (isinstance(value, str) and is_own(value)), expected, names)


def between(low: float, most: float) -> Rule:
    return Rule(lambda value: _is_number(value) and low <= value <= most, f"a number >= {low} and <= {most}")


def at_least(low: float) -> Rule:
    return Rule(lambda value: _is_number(value) and value >= low, f"a number >= {low}")


def above(low: float, most: float | None = None) -> Rule:
    """``most`` None: no upper bound."""
    end = "" if most is None else f" and <= {most}"
    limit = math.inf if most is None else most
    return Rule(lambda value: _is_number(value) and low < value <= limit, f"a number > {low}{end}")


def fraction(end: float = 1) -> Rule:
    """For 0 <= value < ``end``."""
    return Rule(lambda value: _is_number(value) and 0 <= value < end, f"a number >= 0 and < {end}")


def other_than_0() -> Rule:
    return Rule(lambda value: _is_number(value) and 0 < abs(value) <= MANY, "a whole number other than 0")


def any_number() -> Rule:
    return Rule(_is_number, "a finite number")


def seed() -> Rule:
    # numpy's legacy generator, which several libraries seed, takes 32 bits
    return Rule(lambda value: _is_number(value) and 0 <= value < 2**32, "a whole number >= 0 and < 2**32")


def step_interval() -> Rule:
    expected = f"-1 (only at the end) or steps >= 1 and <= {MANY}"
    return Rule(lambda value: value == -1 or (_is_number(value) and 1 <= value <= MANY), expected)


def count_or_share() -> Rule:
    def holds(value: Any) -> bool:
        return _is_number(value) and (0 <= value < 1 or (value <= MANY and float(value).is_integer() and value > 0))

    return Rule(holds, "a whole number >= 0, or a share of the run that is below 1")


def text() -> Rule:
    return Rule(lambda value: isinstance(value, str) and bool(value.strip()), "a string that is not empty")


def not_empty() -> Rule:
    return Rule(bool, "a string that is not empty")


def two_texts() -> Rule:
    return Rule(lambda v: isinstance(v, list) and len(v) == 2 and all(v), "a list of two texts, as [<a>, </a>]")


def name_pattern() -> Rule:
    """A shell pattern that can match the name of a tensor."""
    return Rule(lambda value: bool(_PATTERN.fullmatch(value)), "a shell pattern of a tensor's name, such as *.0.*")


def list_of(rule: Rule) -> Rule:
    expected = f"a list in which each entry is {rule.expected}"
    return Rule(lambda value: all(rule.holds(item) for item in value), expected, rule.names)


def nullable(rule: Rule) -> Rule:
    return Rule(lambda value: value is None or rule.holds(value), f"null or {rule.expected}", rule.names)


PositiveInt = Annotated[int, between(1, MANY)]
NonNegativeInt = Annotated[int, between(0, MANY)]
PositiveFloat = Annotated[float, above(0)]
NonNegativeFloat = Annotated[float, at_least(0)]
Fraction = Annotated[float, fraction()]
Weight = Annotated[float, between(0, 1000)]  # of a term of the loss
LearningRate = Annotated[float, between(0, 100)]
Temperature = Annotated[float, between(0.01, 1000)]  # vLLM samples lower ones at 0.01, and the trainer would not
AnswerSeconds = Annotated[float, between(0.01, 7 * 24 * 3600)]
StepInterval = Annotated[int, step_interval()]
Seed = Annotated[int, seed()]
Text = Annotated[str, text()]
