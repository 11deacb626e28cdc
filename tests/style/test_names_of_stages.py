"""No room below ``stages`` names a stage: ``config`` says what follows from it."""

from __future__ import annotations

import ast

import pytest

from tests.style.test_layers import REPO, ROW, source_files

NAMES = {"rl", "sft", "dpo", "kto"}  # not "pt", which is how safetensors calls torch, and not the command "rm"


def names_of_stages(source: str) -> list[str]:
    """Strings that are the name of a stage; docstrings and comments may speak of them."""
    found = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    return [f"line {node.lineno}: {node.value!r}" for node in found if node.value in NAMES]


def below_stages() -> list[str]:
    paths = [path for path in source_files() if path.startswith("mega_rl/") and path.count("/") > 1]
    rooms = {path: path.split("/")[1] for path in paths}
    return [path for path, room in rooms.items() if room != "config" and ROW[room] < ROW["stages"]]


@pytest.mark.parametrize("path", below_stages())
def test_no_stage_is_named(path: str) -> None:
    assert names_of_stages((REPO / path).read_text(encoding="utf-8")) == []


def test_a_comparison_is_found() -> None:
    assert names_of_stages('"""Of rl."""\nx = 1.0 if config.trainer.stage == "rl" else 2.0') == ["line 2: 'rl'"]
