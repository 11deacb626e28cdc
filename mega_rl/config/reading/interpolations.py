"""``${other.key}`` in a configuration: found harmless before anything is resolved, because a few of them can double a
text forty times.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mega_rl.config.reading.yaml_text import MAX_CHARACTERS, MAX_DEPTH
from mega_rl.errors import shown

MARK = "${"
_ONE = re.compile(r"\$\{([^${}]*)\}")
_PARTS = re.compile(r"[^.\[\]]+")
_ENVIRONMENT = "oc.env:"


def interpolation_problem(tree: Mapping[str, Any]) -> str | None:
    """Why the tree must not be resolved; None if it may be, which does not say that every key is there."""
    sizes = _Sizes(tree)
    total = 0
    for path, text in _texts(tree, ()):
        if MARK in _ONE.sub("", text):
            return f"{shown(text)} has ${{...}} inside ${{...}}, or one without its end: write it out"
        for inner in _ONE.findall(text):
            if ":" in inner and not inner.strip().startswith(_ENVIRONMENT):
                return f"{shown(text)} calls a function: only ${{other.key}} and ${{oc.env:NAME}} can be used"
        total += sizes.of(text, path, 0)
        if sizes.is_too_deep:
            return f"{shown(text)} leads to another ${{...}} more than {MAX_DEPTH} times, or to itself: write it out"
        if total > MAX_CHARACTERS:
            return f"values with ${{...}} come to more than {MAX_CHARACTERS} characters: write them out"
    return None


def _texts(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every text with an interpolation, and where it stands."""
    if isinstance(value, str) and MARK in (text := value.replace("\\" + MARK, "")):  # an escaped one is text
        yield path, text
    elif isinstance(value, Mapping | list):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _texts(item, (*path, str(key)))


class _Sizes:
    """How many characters a value has once it is resolved."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.is_too_deep = False
        self._tree = tree
        self._known: dict[tuple[str, ...], int] = {}

    def of(self, value: Any, path: tuple[str, ...], depth: int) -> int:
        """``depth``: interpolations on the way here."""
        if path in self._known:
            return self._known[path]
        if self.is_too_deep or depth > MAX_DEPTH:  # once is enough: two in one text would be followed 2^32 times
            self.is_too_deep = True
            return 0
        size = 1
        if isinstance(value, str):
            size = len(value)
            for inner in _ONE.findall(value):
                target = _target(inner, path)
                size += self.of(self._at(target), target, depth + 1)
        elif isinstance(value, Mapping | list):
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            size += sum(self.of(item, (*path, str(key)), depth) for key, item in items)
        if not self.is_too_deep:
            self._known[path] = size
        return size

    def _at(self, path: tuple[str, ...]) -> Any:
        node: Any = self._tree
        for part in path:
            if isinstance(node, list):
                node = node[int(part)] if part.isdecimal() and len(part) < 6 and int(part) < len(node) else None
            else:
                node = node.get(part) if isinstance(node, Mapping) else None
        return node


def _target(inner: str, path: tuple[str, ...]) -> tuple[str, ...]:
    """The path that an interpolation names; one that begins with dots is relative to where it stands."""
    inner = inner.strip()
    num_dots = len(inner) - len(inner.lstrip("."))
    base = path[: max(0, len(path) - num_dots)] if num_dots else ()
    return (*base, *_PARTS.findall(inner))
