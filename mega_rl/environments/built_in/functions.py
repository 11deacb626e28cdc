"""Tools to begin with: a calculator, and a search over a file of this machine."""

from __future__ import annotations

import ast
import json
import math
import operator
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from mega_rl.errors import InputError

MAX_EXPRESSION = 1000  # characters
MAX_BITS = 4096  # of a power
OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
NAMES = {"pi": math.pi, "e": math.e}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(math, name) for name in ("sqrt", "exp", "log", "log2", "log10", "sin", "cos", "tan", "floor", "ceil")
} | {"abs": abs, "round": lambda number: round(number), "min": min, "max": max}
WORD = re.compile(r"\w+")


def calculate(expression: str) -> str:
    """Compute the value of an arithmetic expression, such as 2 * (3 + 4) or sqrt(2) / 3.

    Args:
        expression: numbers, + - * / // % **, parentheses, pi, e and functions such as sqrt, log, sin, round and max.
    """
    if len(expression) > MAX_EXPRESSION:
        return f"error: the expression has more than {MAX_EXPRESSION} characters"
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
        return f"error: {error}"


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.Name(id=name) if name in NAMES:
            return NAMES[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(operand))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(left), _value(right))
        case ast.Call(func=ast.Name(id=name), args=given, keywords=[]) if name in FUNCTIONS:
            return FUNCTIONS[name](*map(_value, given))
    raise ValueError(f"{ast.unparse(node):.60} is not arithmetic")


def _power(base: Any, exponent: Any) -> Any:
    if abs(exponent) * math.log2(abs(base) + 2) > MAX_BITS:
        raise ValueError("the power is too large")
    return base**exponent


def local_search(path: str, num_results: int = 3) -> Callable[[str], str]:
    """A tool ``search`` over the texts of a file; its index is made once for each file.

    Args:
        path: .jsonl with a ``text`` in each row, or any other file with a text on each line.
        num_results: that one search returns.

    Raises:
        InputError: no file, or one without texts.
    """
    texts, counts = _index(path)

    def search(query: str) -> str:
        """Search a collection of texts for words.

        Args:
            query: the words to look for.
        """
        words = set(WORD.findall(query.lower()))
        spread = Counter(word for text in counts for word in words & text.keys())
        scores = [
            (sum(_weight(text[word], len(texts), spread[word]) for word in words & text.keys()), -number)
            for number, text in enumerate(counts)
        ]
        best = [-number for score, number in sorted(scores, reverse=True)[:num_results] if score > 0]
        return "\n".join(f"[{number}] {texts[number]}" for number in best) or "nothing found"

    return search


def _weight(count: int, num_texts: int, spread: int) -> float:
    """Of a word in a text: saturating with its count, larger for words of few texts (BM25 without lengths)."""
    return math.log(1 + (num_texts - spread + 0.5) / (spread + 0.5)) * count * 2.2 / (count + 1.2)


@cache
def _index(path: str) -> tuple[list[str], list[Counter[str]]]:
    try:
        lines = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
        texts = [str(json.loads(line)["text"]) for line in lines] if path.endswith(".jsonl") else lines
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"local_search: {path} cannot be read ({error}); give a text file, or .jsonl with a text in each row"
        ) from error
    if not texts:
        raise InputError(f"local_search: {path} holds no texts; give a file with at least one")
    return texts, [Counter(WORD.findall(text.lower())) for text in texts]
