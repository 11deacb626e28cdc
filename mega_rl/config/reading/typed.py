"""Comparing a plain tree of values with the schema: unknown keys, missing keys and wrong types, all of them at once.

Which words a ``Literal`` type takes is not asked here but in ``rules``, so that ``validate`` names a wrong word
together with every other wrong value.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from omegaconf import MISSING

from mega_rl.config.reading.old_keys import is_old_section, old_key_answer
from mega_rl.config.reading.tables import NEIGHBOURS, reason, recognised, sections
from mega_rl.config.reading.yaml_text import parse_yaml, unusable_text
from mega_rl.config.schema.sections import RunConfig
from mega_rl.errors import MAX_LISTED, MAX_SHOWN, shown

_WORDS = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}
# One text stands for a list of one.
ONE_OR_MANY = ("data.train_files", "data.val_files", "tuning.adapter.targets")
_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}


class Checker:
    """Walks a tree beside the dataclasses; ``problems`` grows, and what the walk returns holds valid values only.

    Args:
        problems: sentences, to which the walk adds.
        spellings: dotted key -> the alias under which the user gave it.
        has_interpolations: whether the tree may still hold ``${other.key}``, which has no type yet. If not, text in the
            place of a number is what an interpolation such as ``${oc.env:NAME}`` gave, and is read as YAML.
        is_whole: whether a key that must be set has to be in the tree; not in one of several files.
    """

    def __init__(
        self, problems: list[str], spellings: Mapping[str, str], has_interpolations: bool, is_whole: bool = True
    ) -> None:
        self.problems, self.spellings, self.has_interpolations = problems, spellings, has_interpolations
        self.is_whole = is_whole
        self.unknown: list[str] = []  # the names of unknown keys, in the order of their problems

    def section(self, schema: Any, tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
        """The valid entries of ``tree`` under ``schema``, a dataclass; an empty section (null) means its defaults."""
        hints = typing.get_type_hints(schema)
        for key, given in tree.items():
            if key not in hints:
                self._unknown(f"{prefix}{_word(key)}", given, schema, prefix)
        checked: dict[str, Any] = {}
        for field in dataclasses.fields(schema):
            name, hint = f"{prefix}{field.name}", hints[field.name]
            given = tree.get(field.name, MISSING)
            if dataclasses.is_dataclass(hint) and given in (None, MISSING):
                given = {}
            if isinstance(given, str) and given == MISSING:
                if field.default == MISSING and self.is_whole:
                    self.problems.append(f"{name} is not set: give it in the file or as {name}=VALUE")
                continue
            checked[field.name] = self.value(hint, given, name)
        return checked

    def _unknown(self, name: str, given: Any, schema: Any, prefix: str) -> None:
        self.unknown.append(name)
        if len(self.problems) > MAX_LISTED:  # looking for the nearest key takes time, and nobody reads on
            self.problems.append(f"unknown key {name}")
        elif isinstance(given, Mapping) and given and is_old_section(name):
            for key, value in given.items():
                self._unknown(f"{name}.{_word(key)}", value, schema, prefix)
        else:
            self.problems.append(old_key_answer(name) or unknown_key(name, schema, prefix))

    def value(self, hint: Any, given: Any, name: str) -> Any:
        """``given`` as the type ``hint``; a value of the wrong type is reported and returned as it is."""
        if self.has_interpolations and isinstance(given, str) and "${" in given:
            return given
        if is_nullable(hint):
            if given is None:
                return None
            return self.value(not_null(hint), given, name)
        if dataclasses.is_dataclass(hint):
            return self.section(hint, given, f"{name}.") if self._is(dict, given, name, "a section of keys") else given
        if typing.get_origin(hint) is list:
            if name in ONE_OR_MANY and isinstance(given, str):
                given = [given]
            if not self._is(list, given, name, "a list such as [a, b]"):
                return given
            (inner,) = typing.get_args(hint)
            return [self.value(inner, item, f"{name}[{i}]") for i, item in enumerate(given)]
        if typing.get_origin(hint) is dict:
            if self._is(dict, given, name, "a section of keys"):
                self._options(given, name)
            return given
        return self._scalar(str if typing.get_origin(hint) is Literal else hint, given, name)

    def _options(self, options: Mapping[Any, Any], name: str) -> None:
        """Check a section of free keys: every key must be a word, and every text one that a file can hold."""
        for key in options:
            if not isinstance(key, str):
                self.problems.append(f"{name} has the key {shown(key)} ({type(key).__name__}): give a word")
        self._texts(options, name)

    def _texts(self, value: Any, name: str) -> None:
        if isinstance(value, str):
            problem = unusable_text(value)
            if problem is not None:
                self.problems.append(f"{name}: {problem}: remove it")
        elif isinstance(value, Mapping | list):
            parts = [*value, *value.values()] if isinstance(value, Mapping) else value
            for part in parts:
                self._texts(part, name)

    def _scalar(self, hint: Any, given: Any, name: str) -> Any:
        self._texts(given, name)
        if not self.has_interpolations and isinstance(given, str) and hint is not str:
            given = _read_again(given)
        number = isinstance(given, int | float) and not isinstance(given, bool)
        if hint is bool and isinstance(given, str) and given.lower() in _WORDS:
            return _WORDS[given.lower()]
        if hint is int and number and float(given).is_integer():
            return int(given)
        if hint is float and number:
            return float(given)
        if hint is str and number and isinstance(given, int):
            return str(given)  # a project named 7 needs no quotes
        self._is(hint, given, name, _NAMES[hint])
        return given

    def _is(self, kind: type, given: Any, name: str, expected: str) -> bool:
        # bool is an int to Python, and would pass for one
        good = isinstance(given, kind) and not (isinstance(given, bool) and kind is not bool)
        if not good:
            found = "null" if given is None else f"{shown(given)} ({type(given).__name__})"
            alias = f" (given as {self.spellings[name]})" if name in self.spellings else ""
            self.problems.append(f"{name}{alias} is {found}: expected {expected} ({kind.__name__})")
        return good


def _word(key: Any) -> str:
    """A key as a sentence names it: quoted and shortened if it is not a short word."""
    text = str(key)
    return text if text.isprintable() and len(text) <= MAX_SHOWN else shown(text)


def _read_again(text: str) -> Any:
    """The value of a text as YAML; the text itself if it is not valid YAML, which then fits no type but text."""
    try:
        return parse_yaml(text)
    except ValueError:
        return text


def unknown_key(name: str, schema: Any, prefix: str) -> str:
    """One sentence that names the unknown key and the nearest valid one: a sibling, else the same key elsewhere."""
    last = name.removeprefix(prefix)
    theirs = their_key(name)
    siblings = [field.name for field in dataclasses.fields(schema)]
    cutoff = 0.6 if theirs is None else 0.9  # what has another name elsewhere may look like a key of ours by chance
    near = [prefix + match for match in difflib.get_close_matches(last, siblings, n=1, cutoff=cutoff)]
    if not near and theirs is not None:
        return f"unknown key {name}: {theirs}"
    if not near:
        elsewhere = {leaf.rpartition(".")[2]: leaf for leaf in reversed(leaf_names())}
        near = [elsewhere[match] for match in difflib.get_close_matches(last, list(elsewhere), n=1, cutoff=0.75)]
    if near:
        return f"unknown key {name}: did you mean {near[0]}?"
    return f"unknown key {name}: valid keys here are {', '.join(siblings)}"


def their_key(name: str) -> str | None:
    """What a key of another trainer is here, as the end of a sentence; None if no other trainer has it."""
    neighbour, entry = next(iter(recognised(name).items()), (None, None))
    if neighbour is None or entry is None:
        neighbour = sections().get(name)
        return neighbour and f"a section of {NEIGHBOURS[neighbour]}"
    whose = f"the name of {NEIGHBOURS[neighbour]} for"
    if entry.to:
        return f"{whose} {', '.join(entry.to)}"
    return f"a key of {NEIGHBOURS[neighbour]}: {reason(entry)}" if entry.reason else None


def is_nullable(hint: Any) -> bool:
    return typing.get_origin(hint) in (types.UnionType, typing.Union)


def not_null(hint: Any) -> Any:
    """``X`` of the type ``X | None``."""
    return next(arg for arg in typing.get_args(hint) if arg is not type(None))


def leaves(schema: Any = RunConfig, prefix: str = "", has_rules: bool = False) -> Iterator[tuple[str, Any]]:
    """Dotted name and type of every key of the schema; the names of a list of sections begin with ``rewards[].``.

    Args:
        has_rules: the types are as the schema has them, with ``Annotated`` rules; otherwise without these.
    """
    for key, hint in typing.get_type_hints(schema, include_extras=has_rules).items():
        inner = typing.get_args(hint)[0] if typing.get_origin(hint) is list else hint
        if dataclasses.is_dataclass(inner):
            yield from leaves(inner, f"{prefix}{key}{'' if inner is hint else '[]'}.", has_rules)
        else:
            yield prefix + key, hint


def leaf_names() -> list[str]:
    """The dotted names of all keys of the schema."""
    return [name for name, _ in leaves()]


def build(schema: Any, values: Mapping[str, Any]) -> Any:
    """The dataclass of a tree that a ``Checker`` returned; keys that are left out have their defaults."""
    hints = typing.get_type_hints(schema)
    return schema(**{key: _built(hints[key], value) for key, value in values.items()})


def _built(hint: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(hint):
        return build(hint, value)
    if typing.get_origin(hint) is list:
        (inner,) = typing.get_args(hint)
        return [_built(inner, item) for item in value]
    return value
