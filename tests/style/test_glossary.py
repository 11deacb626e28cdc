"""What the code's classes are named after is explained in ``docs/glossary.md``, unless it is a plain word."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping

from tests.style.test_contributing import table
from tests.style.test_tree import REPO, tracked_files

NUM_IMPORTS = 5  # a class that so many modules import is one of those that a reader meets


def words(text: str) -> set[str]:
    return set(text.split())


# Words of any dictionary or of programming in general, in which these classes mean nothing else.
PLAIN = words(
    """answer batch check condition config count data denominators draft dropped end error file files host images
    key limits location noise operators plan pushed reader record role row rule rules set setting source spec
    stats sync timers tokens wanted"""
)
# What only a few classes, or metrics, are named after, but no dictionary explains; a hyphen is read as a blank.
TERMS = words(
    """adapter attempt certificate control-request copy-server doctor environment episode executor fleet heartbeat
    importer lease lease-actor node-agent partial-group picture-set place probe rendezvous replica reshard-plan
    routing-replay sandbox simulation sink stall-detector staleness step-window tail ticket trajectory-store
    trajectory-summary validation version weight-store zygote"""
)


def rows(page: str, first_column: str) -> list[list[str]]:
    """The rows of all tables of a glossary."""
    text = (REPO / "docs" / page).read_text(encoding="utf-8")
    return [row for part in re.split(r"^## .*$", text, flags=re.MULTILINE)[1:] for row in table(part, first_column)]


def terms() -> set[str]:
    """The terms of the glossary, those of one row apart, without hyphens."""
    return {term.strip().replace("-", "") for row in rows("glossary.md", "term") for term in row[0].split(",")}


def head(name: str) -> str:
    """The last word of a class's name."""
    return re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z]+", name)[-1].lower()


def imported(sources: Mapping[str, str]) -> Counter[str]:
    """How many modules import each public class of ``mega_rl``, by its name."""
    trees = {path: ast.parse(source) for path, source in sources.items()}
    classes = {
        (path.removesuffix(".py").replace("/", "."), node.name)
        for path, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }
    found: Counter[str] = Counter()
    for tree in trees.values():
        lines = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        found.update({alias.name for node in lines for alias in node.names if (node.module, alias.name) in classes})
    return found


def unexplained(counts: Mapping[str, int], known: set[str]) -> list[str]:
    plain = PLAIN | {word for term in known for word in (term, term.split(" of ")[0].split()[-1])}
    heads = {name: head(name) for name, count in counts.items() if count >= NUM_IMPORTS}
    return sorted(name for name, word in heads.items() if not {word, word.removesuffix("s")} & plain)


def test_classes_that_many_modules_import_are_named_after_terms() -> None:
    sources = {
        path: (REPO / path).read_text(encoding="utf-8")
        for path in tracked_files()
        if path.startswith("mega_rl/") and path.endswith(".py")
    }
    counts = imported(sources)
    assert unexplained(counts, terms()) == [], "a term of docs/glossary.md is missing, or the name is no good one"


def test_terms_of_the_code_are_explained() -> None:
    assert {term.replace("-", " ") for term in TERMS} - terms() == set()


def test_both_glossaries_have_the_same_words_once() -> None:
    words_of = [row[:2] for row in rows("glossary.md", "term")]
    assert words_of == [row[:2] for row in rows("glossary_zh.md", "英文")]
    assert [word for word, count in Counter(english for english, _ in words_of).items() if count > 1] == []
    assert [word for word, count in Counter(chinese for _, chinese in words_of).items() if count > 1] == []


def test_an_unexplained_name_is_found() -> None:
    importers = {f"mega_rl/b{i}.py": "from mega_rl.a import Steward, WeightSink" for i in range(NUM_IMPORTS)}
    counts = imported({"mega_rl/a.py": "class Steward: ...\nclass WeightSink: ...\n", **importers})
    assert counts == {"Steward": NUM_IMPORTS, "WeightSink": NUM_IMPORTS}
    assert unexplained(counts, {"sink"}) == ["Steward"] and unexplained({"Steward": 1}, set()) == []
