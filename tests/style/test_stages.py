"""A stage composes parts by what they can do: it never asks what type one is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

STAGES = Path(__file__).resolve().parent.parent.parent / "mega_rl" / "stages"
FILES = sorted(str(path.relative_to(STAGES)) for path in STAGES.rglob("*.py"))


def type_questions(source: str) -> list[int]:
    """The lines that ask for the type of something."""
    names = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)]
    return [name.lineno for name in names if name.id in ("isinstance", "issubclass")]


@pytest.mark.parametrize("path", FILES)
def test_a_stage_asks_for_no_type(path: str) -> None:
    assert type_questions((STAGES / path).read_text(encoding="utf-8")) == []


def test_a_question_is_found() -> None:
    assert type_questions("x = 1\nif isinstance(x, int):\n    pass") == [2]
