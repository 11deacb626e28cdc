"""No function of mega_rl has many parameters: what belongs together is a record."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.style.test_layers import REPO

MAX_PARAMETERS = 7
PACKAGE = REPO / "mega_rl"
# The functions that may have more, and how many they have. The list only gets shorter.
MORE = {
    # A user gives these options by their names in the configuration.
    "rewards/functions/code.py code_tests": 9,
    "rewards/functions/text.py overlong": 8,
    "environments/built_in/python.py PythonSandbox.__init__": 10,
    # The signature of flash-attention, whose terms the operator has.
    "platform/dispatch.py varlen_attention": 9,
    # Megatron calls it by its own signature.
    "megatron/layers/host_linear.py install.linear": 9,
}


def functions(node: ast.AST, name: str = "", is_class: bool = False) -> Iterator[tuple[str, int]]:
    """Every function by its qualified name, and its number of parameters without ``self`` or ``cls``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            own = child.args
            names = [one.arg for one in (*own.posonlyargs, *own.args, *own.kwonlyargs, own.vararg, own.kwarg) if one]
            is_bound = is_class and names[:1] in (["self"], ["cls"])
            yield f"{name}{child.name}", len(names) - is_bound
            yield from functions(child, f"{name}{child.name}.")
        elif isinstance(child, ast.ClassDef):
            yield from functions(child, f"{name}{child.name}.", is_class=True)
        else:
            yield from functions(child, name, is_class)


def many(source: str) -> dict[str, int]:
    return {name: number for name, number in functions(ast.parse(source)) if number > MAX_PARAMETERS}


def test_only_the_listed_functions_have_more() -> None:
    found = {
        f"{path.relative_to(PACKAGE).as_posix()} {name}": number
        for path in PACKAGE.rglob("*.py")
        for name, number in many(path.read_text(encoding="utf-8")).items()
    }
    new = {name: number for name, number in found.items() if number > MORE.get(name, MAX_PARAMETERS)}
    assert not new, f"more than {MAX_PARAMETERS} parameters: make a record of those that belong together: {new}"
    outdated = {name: number for name, number in MORE.items() if found.get(name, 0) < number}
    assert not outdated, f"fewer parameters than the list allows: take these off it, or lower their numbers: {outdated}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(a, b, c, d, e, f, g): ...", {}),
        ("def f(a, b, /, c, d, *, e, f, g, h): ...", {"f": 8}),
        ("class A:\n    def f(self, a, b, c, d, e, f, g): ...", {}),
        ("class A:\n    if True:\n        async def f(self, a, b, c, d, e, f, *g, **h): ...", {"A.f": 8}),
        ("def f():\n    def g(self, a, b, c, d, e, f, g): ...", {"f.g": 8}),
    ],
)
def test_parameters_are_counted(source: str, expected: dict[str, int]) -> None:
    assert many(source) == expected
