"""How large a folder and a module's surroundings may grow, and what must stay out of whose way.

Every list of exceptions may only shrink: an entry that is no longer needed fails the test.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.style.test_layers import REPO, import_graph, imports, module_name, source_files
from tests.style.test_tree import tracked_files

MAX_FILES = 12
LARGE_FOLDERS = {
    "tools": "one file for each command of the command line, which names it",
    "tests/npu": "one emulation with the tests that run on it, in a process of its own",
}
MAX_IMPORTS = 25
OFFLINE = ("pt", "sft", "rm", "dpo", "kto")  # stages that learn from files
SAMPLING = ("rollout", "fleet", "rewards", "environments", "evaluation")
TOP = ("importers", "report", "serving", "simulation")  # only tools and tests import them


def large_folders(paths: Iterable[str]) -> set[str]:
    """Folders in which more Python files lie flat than one takes in at a glance."""
    sizes = Counter(str(Path(path).parent) for path in paths if path.endswith(".py"))
    return {folder for folder, size in sizes.items() if size > MAX_FILES}


@cache
def sources() -> dict[str, str]:
    """The modules of the package, by their paths."""
    return {p: (REPO / p).read_text(encoding="utf-8") for p in source_files() if p.startswith("mega_rl/")}


@cache
def graph_of_the_package() -> dict[str, set[str]]:
    return import_graph(sources())


def reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """All modules that Python runs for one, itself included."""
    seen, left = set[str](), [start]
    while left:
        module = left.pop()
        if module not in seen:
            seen.add(module)
            left += graph[module]
    return seen


def named_twice(texts: Mapping[str, str]) -> dict[str, list[str]]:
    """Public classes at the top of more than one module."""
    found: dict[str, list[str]] = defaultdict(list)
    for path, text in texts.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path)
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def own_imports(path: str, text: str) -> set[str]:
    """The modules of ours that a module names."""
    files = {module_name(other) for other in sources()}
    found = {target for _, target, _ in imports(ast.parse(text), path) if target.startswith("mega_rl.")}
    return {target if target in files else target.rpartition(".")[0] for target in found} - {"mega_rl"}


def test_folders_are_small() -> None:
    assert large_folders(tracked_files()) == set(LARGE_FOLDERS)


def test_modules_import_few_others() -> None:
    numbers = {path: len(own_imports(path, text)) for path, text in sources().items()}
    assert {path: number for path, number in numbers.items() if number > MAX_IMPORTS} == {}


@pytest.mark.parametrize("stage", OFFLINE)
def test_a_stage_that_learns_from_files_reaches_nothing_that_samples(stage: str) -> None:
    modules = reached(graph_of_the_package(), f"mega_rl.stages.{stage}")
    assert len(modules) > 100 and sorted(m for m in modules if m.split(".")[1] in SAMPLING) == []


def test_nothing_imports_what_stands_on_top() -> None:
    rooms = {(a, b, f"{b}.".split(".")[1]) for a, others in graph_of_the_package().items() for b in others}
    assert sorted((a, b) for a, b, room in rooms if room in TOP and a.split(".")[1] != room) == []


def test_a_class_has_its_name_for_itself() -> None:
    assert named_twice(sources()) == {}


def test_each_of_these_is_found() -> None:
    flat = [f"mega_rl/a/m{number}.py" for number in range(MAX_FILES + 1)]
    assert large_folders(flat) == {"mega_rl/a"} and large_folders(flat[1:]) == set()
    twice = {"a.py": "class A: ...\nclass _B: ...", "b.py": "class A: ...\nclass _B: ...\ndef f():\n    class C: ..."}
    assert named_twice(twice) == {"A": ["a.py", "b.py"]}
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert reached(graph, "a") == {"a", "b", "c"}
    text = "from mega_rl.config import RunConfig\nfrom mega_rl.bridge import series\nimport mega_rl\nimport torch"
    assert own_imports("mega_rl/stages/a.py", text) == {"mega_rl.config", "mega_rl.bridge.series"}
