"""What the pages for developers name in code spans is in the tree: files, keys, commands, functions, classes."""

from __future__ import annotations

import ast
import functools
import re
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path

import pytest

from mega_rl.observe.metrics.declared import is_declared
from tests.style.test_glossary import words
from tests.style.test_layers import LEVEL, ROOMS
from tests.style.test_tree import REPO, tracked_files
from tests.unit.tools.pages.test_docs import is_key, spans

SELF = "tests/style/test_names_in_pages.py"  # its own examples of wrong names are none
PAGES = [REPO / "CONTRIBUTING.md", *sorted(REPO.glob("examples/*/README.md"))]
DOCS = sorted({*REPO.glob("docs/*.md"), *REPO.glob("*.md")} - {*PAGES, REPO / "CHANGELOG.md"})
# Names of other software, files that are made, and words that are no names of anything.
FOREIGN = words(
    """.venv ~/.cache/mega_rl npu_emulation/ mega-rl make gcc binutils torchrun pip uv fail warn assert async
    TransformerConfig save_pretrained torch.cuda "nccl" torch.lock logits_TV _s _bytes _tokens num_ utils
    package.module:function vision_config config.json run.log MEGA_RL_VENV_CACHE"""
)


@functools.cache
def paths() -> frozenset[str]:
    """Every tracked file and folder."""
    files = tracked_files()
    return frozenset({*files, *(str(folder) for path in files for folder in Path(path).parents)})


@functools.cache
def names() -> frozenset[str]:
    """What our Python files define, and the words that they have as strings: roles, columns, environment variables."""
    found: set[str] = set()
    for path in tracked_files():
        if path.endswith(".py") and path.split("/")[0] in ("mega_rl", "tests", "tools", "examples") and path != SELF:
            found |= names_of(path)
    return frozenset(found)


@functools.cache
def names_of(path: str) -> frozenset[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse((REPO / path).read_text(encoding="utf-8"))):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.Name(ctx=ast.Store()):
                found.add(node.id)
            case ast.arg():
                found.add(node.arg)
            case ast.Import() | ast.ImportFrom():
                found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            case ast.Constant(value=str(text)) if text.isidentifier():
                found.add(text)
    return frozenset(found)


def is_path(word: str) -> bool:
    """Whether a tracked path is this, or ends with it; so do NAME, ROOM, <...> and a star with any name."""
    pattern = re.sub(r"NAME|ROOM|<\w+>", "*", word.rstrip("/"))
    return any(fnmatchcase(path, pattern) or fnmatchcase(path, f"*/{pattern}") for path in paths())


def is_command(given: list[str]) -> bool:
    """Whether the target of make, or the file or module that is run, is there."""
    if given[0] == "make":
        targets = re.findall(r"^([\w .-]+):", (REPO / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        return given[1] in " ".join(targets).split()
    run = [word.replace(".", "/") if before == "-m" else word for before, word in pairwise(given)]
    return given[0] in ("bash", "python") and any(is_path(word) or is_path(f"{word}.py") for word in run)


def is_of_package(parts: list[str]) -> bool:
    """Whether these are the parts of a module's name, and of a name in it."""
    whole, module = "/".join(parts), "/".join(parts[:-1]) + ".py"
    return {whole, f"{whole}.py"} & paths() != set() or (module in paths() and parts[-1] in names_of(module))


def unknown(span: str) -> bool:
    """Whether a code span names something that is not here; spans with a value or an index are taken by their name."""
    if span in FOREIGN or span.split()[0] in ("uv", "pip"):
        return False
    if " " in span and span.split()[0] in ("make", "bash", "python"):
        return not is_command(span.split())
    word = re.sub(r"(\(.*\)|\[.*\]|=.*| [>:] ?.*)$", "", span)
    parts = word.split(".")
    if not word:  # the shape of a tensor
        return False
    if is_path(word) or is_declared(word) or word in ROOMS or word in LEVEL or is_key(word):
        return False
    if parts[0] == "mega_rl":
        return not is_of_package(parts)
    return word not in names()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_what_is_named_is_here(page: Path) -> None:
    assert sorted(span for span in spans(page.read_text(encoding="utf-8")) if unknown(span)) == []


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_modules_that_the_docs_name_are_here(page: Path) -> None:
    ours = [span for span in spans(page.read_text(encoding="utf-8")) if re.match(r"mega_rl[./]", span)]
    assert sorted(span for span in ours if unknown(span)) == []


@pytest.mark.parametrize(
    "span",
    ["_tower_modules", "mega_rl/megatron/tower.py", "mega_rl.models.shape.FAMILY", "rollout.vllms", "make all-of-it"]
    + ["python tools/trian.py", "TowerKind", "rollout/kll", "bridge.mappings"],
)  # fmt: skip
def test_what_is_not_here_is_found(span: str) -> None:
    assert unknown(span)


def test_what_is_here_is_accepted() -> None:
    known = "tower_module mega_rl/stages/NAME.py mega_rl.models.shape.FAMILIES rollout.vllm bridge.mapping rollout/kl"
    assert [word for word in [*known.split(), "make test-unit", "parallel.tensor > 1"] if unknown(word)] == []
