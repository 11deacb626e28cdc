"""The tables of other trainers' keys: what becomes of each. The YAML files beside this module are the data.

A key that is not among the exact ones takes the pattern with the longest text that matches it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Literal

from mega_rl.config.reading.yaml_text import parse_yaml

NEIGHBOURS = {
    "verl": "verl",
    "trl": "TRL",
    "llamafactory": "LLaMA-Factory",
    "areal": "AReaL",
    "openrlhf": "OpenRLHF",
    "mindspeed_rl": "MindSpeed-RL",
    "slime": "slime",
    "swift": "ms-swift",
}
HERE = Path(__file__).resolve().parent
Kind = Literal["set", "rules", "same", "none", "passed"]


@dataclass(frozen=True)
class Entry:
    """What becomes of one key of theirs, or of those that match a pattern."""

    pattern: str
    kind: Kind
    to: tuple[str, ...] = ()  # keys of ours
    words: dict[Any, Any] = field(default_factory=dict)  # kind set: their word -> ours; empty: as it is
    reason: str = ""  # kinds rules, same and none: the sentence in reasons*.yaml, and the name of the rule
    off: tuple[Any, ...] = ()  # kind none: values that mean that the feature is off, so that nothing is missing


@dataclass(frozen=True)
class Table:
    """All entries of one neighbour."""

    name: str
    entries: dict[str, Entry]
    aliases: dict[str, str]  # earlier names of their keys, and sections that hold what another one does, with a dot
    metrics: dict[str, str]  # their name of a metric -> ours

    def find(self, key: str) -> Entry | None:
        """The entry of a key; None if the table does not know it."""
        if key in self.entries:
            return self.entries[key]
        fits = [entry for pattern, entry in self.entries.items() if "*" in pattern and fnmatchcase(key, pattern)]
        passed = [entry for entry in self.entries.values() if entry.kind == "passed" and _below(key, entry.pattern)]
        return max(fits + passed, key=lambda entry: len(entry.pattern), default=None)

    def renamed(self, key: str) -> str:
        """The key under its present name, and in the section that it counts in."""
        section, dot, last = key.partition(".")
        return self.aliases.get(key) or self.aliases.get(section + dot, section + dot) + last

    def find_rule(self, name: str) -> list[str]:
        """The keys that a rule reads, in the order of the table."""
        return [entry.pattern for entry in self.entries.values() if entry.kind == "rules" and entry.reason == name]


def _below(key: str, pattern: str) -> bool:
    return key.startswith(f"{pattern}.") or key == pattern


@cache
def reasons() -> dict[str, dict[str, dict[str, str]]]:
    """Kind -> name -> language (``en`` or ``zh``) -> sentence."""
    tree: dict[str, dict[str, dict[str, str]]] = _read("reasons") | _read("reasons_of_rules")
    return tree


def reason(entry: Entry, language: str = "en") -> str:
    return reasons()[entry.kind][entry.reason][language]


@cache
def table(name: str) -> Table:
    """The table of a neighbour, by its name in ``NEIGHBOURS``."""
    tree = _read(name)
    entries = list(_entries(tree))
    own = {entry.pattern for entry in entries}
    for other, section in (tree.get("include") or {}).items():
        taken = (replace(entry, pattern=section + entry.pattern) for entry in _entries(_read(other)))
        entries += [entry for entry in taken if entry.pattern not in own]
    patterns = [entry.pattern for entry in entries]
    assert len(patterns) == len(set(patterns)), sorted({key for key in patterns if patterns.count(key) > 1})
    return Table(
        name,
        {entry.pattern: entry for entry in entries},
        tree.get("aliases") or {},
        tree["metrics"],
    )


def _entries(tree: dict[str, Any]) -> Iterator[Entry]:
    for theirs, ours in tree.get("set", {}).items():
        yield Entry(theirs, "set", (ours,))
    for theirs, wanted in tree.get("words", {}).items():
        yield Entry(theirs, "set", (wanted["to"],), wanted["words"])
    for theirs, ours in tree.get("passed", {}).items():
        yield Entry(theirs, "passed", (ours,))
    for name, rule in tree.get("rules", {}).items():
        yield from (Entry(theirs, "rules", tuple(rule["to"]), reason=name) for theirs in rule["keys"])
    for name, keys in tree.get("same", {}).items():
        yield from (Entry(theirs, "same", reason=name) for theirs in keys)
    for name, keys in tree.get("none", {}).items():
        for theirs in keys:
            with_values = theirs if isinstance(theirs, dict) else {theirs: []}
            yield from (Entry(key, "none", reason=name, off=tuple(off)) for key, off in with_values.items())


def _read(name: str) -> Any:
    return parse_yaml((HERE / f"{name}.yaml").read_text(encoding="utf-8"))


@cache
def _names() -> dict[str, dict[str, Entry]]:
    """Key of theirs, whole or its last word -> neighbour -> entry; a last word of several entries is left out."""
    found: dict[str, dict[str, Entry]] = {}
    for neighbour in NEIGHBOURS:
        entries = [entry for entry in table(neighbour).entries.values() if "*" not in entry.pattern]
        lasts = [entry.pattern.rpartition(".")[2] for entry in entries]
        names = {last: entry for last, entry in zip(lasts, entries, strict=True) if lasts.count(last) == 1}
        names |= {old: entry for old, now in table(neighbour).aliases.items() if (entry := table(neighbour).find(now))}
        names |= {entry.pattern: entry for entry in entries}
        for name, entry in names.items():
            found.setdefault(name, {})[neighbour] = entry
    return found


def recognised(key: str) -> dict[str, Entry]:
    """The neighbours that have such a key, with what becomes of it; by its whole name, else by its last word."""
    by_name = _names()
    last = key.rpartition(".")[2]
    patterns = {n: entry for n in NEIGHBOURS if "." in key and (entry := table(n).find(key)) and "." in entry.pattern}
    return by_name.get(key) or patterns or by_name.get(last, {})


def sections() -> dict[str, str]:
    """First words of dotted keys that only one neighbour has -> that neighbour."""
    found: dict[str, set[str]] = {}
    for neighbour in NEIGHBOURS:
        for pattern in table(neighbour).entries:
            if "." in pattern:
                found.setdefault(pattern.partition(".")[0], set()).add(neighbour)
    return {first: next(iter(names)) for first, names in found.items() if len(names) == 1}


def key_lines(name: str, language: str) -> list[str]:
    """What becomes of every key of a neighbour, one line each: ``theirs -> ours  # sentence``, in their order.

    In the place of ours stands ``=`` if nothing has to be set, and ``-`` if there is no counterpart; the values in
    brackets are those for which none is needed.
    """
    lines = []
    for theirs, entry in sorted(table(name).entries.items()):
        ours = ", ".join(entry.to) + (".*" if entry.kind == "passed" else "")
        ours = ours or {"same": "=", "none": "-"}.get(entry.kind, "torchrun")
        text = reason(entry, language).replace("`", "") if entry.reason else ""
        text = text or ", ".join(f"{word}: {now}" for word, now in entry.words.items() if word != now)
        off = f" ({', '.join(map(_yaml_word, entry.off))})" if entry.off else ""
        lines.append(f"{theirs} -> {ours}" + (f"  # {text}{off}" if text else ""))
    return lines + [f"{old} -> {now}".rstrip() for old, now in sorted(table(name).aliases.items())]


def metric_lines(name: str) -> list[str]:
    """Their name of a metric and ours, one line each."""
    return [f"{theirs} -> {ours}" for theirs, ours in table(name).metrics.items()]


def _yaml_word(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value) or '""'
