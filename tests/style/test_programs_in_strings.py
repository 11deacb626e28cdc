"""Programs that tests hold as strings import what there is: no tool that renames or checks code sees them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from tests.style.test_layers import REPO
from tests.style.test_tree import tracked_files

IMPORT = re.compile(r"^from (mega_rl[\w.]*) import (\([^)]*\)|[^\n#;]+)", re.MULTILINE)
OF_BEFORE = "tests/unit/test_own_code.py"  # imports a module that has moved, to be told where to


@cache
def names_of(module: str) -> set[str] | None:
    """What a module of ours has at its top, modules inside a package included; None: there is none."""
    place = REPO.joinpath(*module.split("."))
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    if not file.is_file():
        return None
    inner = (
        {path.stem for path in place.iterdir() if path.is_dir() or path.suffix == ".py"} if place.is_dir() else set()
    )
    return inner | set(names_at_top(ast.parse(file.read_text(encoding="utf-8"))))


def names_at_top(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def absent(source: str) -> list[str]:
    """Imports within the strings of a source file of what is not there."""
    strings = [n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    asked = [
        (found[1], name.strip().split(" as ")[0])
        for text in strings
        for found in IMPORT.finditer(text)
        for name in found[2].strip("()\n ").split(",")
        if name.strip()
    ]
    return [f"{module}.{name}" for module, name in asked if name not in (names_of(module) or ())]


def test_what_programs_import_is_there() -> None:
    tests = [path for path in tracked_files() if path.startswith("tests/") and path.endswith(".py")]
    paths = [path for path in tests if not path.startswith("tests/style/") and path != OF_BEFORE]
    found = {path: absent((REPO / path).read_text(encoding="utf-8")) for path in paths}
    assert len(paths) > 100 and {path: names for path, names in found.items() if names} == {}


def test_an_absent_name_is_found() -> None:
    program = "import sys\\nfrom mega_rl.types import Prompt, Nothing\\nfrom mega_rl.nowhere import a"
    assert absent(f'X = "{program}"') == ["mega_rl.types.Nothing", "mega_rl.nowhere.a"]
