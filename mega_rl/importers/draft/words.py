"""The words of a shell text, line by line, without running anything."""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from mega_rl.errors import InputError, shortened

LITERAL = "\ue000"  # stands for a dollar sign between single quotes, which expands nothing
UNKNOWN = "\ue001"  # begins the name of a variable whose value the text does not hold
_ENDS = ";|&\n"
_ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*)=(.*)$", re.DOTALL)
_ARRAY = re.compile(r"^([A-Za-z_]\w*)\+?=\((.*)$", re.DOTALL)
_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
MAX_CHARACTERS = 1 << 18
MAX_DEPTH = 20  # variables that refer to variables
MAX_VALUE = 1 << 20  # characters that one word may expand to


@dataclass
class Scan:
    """A position in a text."""

    text: str
    at: int = 0
    line: list[str] = field(default_factory=list)
    lines: list[list[str]] = field(default_factory=list)

    def bracketed(self) -> str:
        """``$(...)``, ``$((...))`` or ``${...}`` from here, through its end."""
        start = self.at
        opened, closed = self.text[self.at + 1], {"(": ")", "{": "}"}[self.text[self.at + 1]]
        depth = 0
        while self.at < len(self.text):
            depth += {opened: 1, closed: -1}.get(self.text[self.at], 0)
            self.at += 1
            if depth == 0 and self.at > start + 1:
                return self.text[start : self.at]
        raise InputError(f"the shell text has {shortened(self.text[start:])!r}, which does not end: correct it")

    def quoted(self, quote: str) -> str:
        start = self.at = self.at + 1
        found = ""
        while self.at < len(self.text) and self.text[self.at] != quote:
            if self.text[self.at] == "\\" and quote == '"' and self.text[self.at + 1 : self.at + 2] in ('"', "\\", "$"):
                self.at += 1
                found += LITERAL if self.text[self.at] == "$" else self.text[self.at]
                self.at += 1
            elif quote == '"' and self.text[self.at : self.at + 2] in ("$(", "${"):
                found += self.bracketed()
            else:
                found += self.text[self.at]
                self.at += 1
        if self.at >= len(self.text):
            raise InputError(f"the shell text has an open {quote} before {shortened(self.text[start:])!r}: close it")
        self.at += 1
        return found.replace("$", LITERAL) if quote == "'" else found

    def word(self) -> str:
        found = ""
        while self.at < len(self.text) and self.text[self.at] not in " \t\r" + _ENDS:
            character = self.text[self.at]
            if character in "'\"":
                found += self.quoted(character)
            elif self.text[self.at : self.at + 2] in ("$(", "${"):
                found += self.bracketed()
            elif character == "\\" and self.text[self.at + 1 : self.at + 2] == "\n":
                return found
            elif character == "\\":
                found += self.text[self.at + 1 : self.at + 2].replace("$", LITERAL)
                self.at += 2
            else:
                found += character
                self.at += 1
        return found


def shell_lines(text: str) -> list[list[str]]:
    """The words of every command, quotes taken off; variables are still to be expanded.

    Raises:
        InputError: an open quote or bracket.
    """
    scan = Scan(text)
    while scan.at < len(text):
        character = text[scan.at]
        if character == "\\" and text[scan.at + 1 : scan.at + 2] == "\n":
            scan.at += 2
        elif character == "#":
            end = text.find("\n", scan.at)
            scan.at = len(text) if end < 0 else end
        elif character in _ENDS:
            scan.at += 1
            scan.lines.append(scan.line)
            scan.line = []
        elif character in " \t\r":
            scan.at += 1
        else:
            scan.line.append(scan.word())
    return [line for line in [*scan.lines, scan.line] if line]


def variables(lines: list[list[str]]) -> dict[str, str]:
    """Name -> raw value of every assignment; the last one counts, but for those that only refer to themselves."""
    found: dict[str, str] = {}
    for line in lines:
        for word in line:
            assignment = _ASSIGNMENT.match(word)
            if assignment is None:
                if word not in ("export", "local", "declare", "readonly"):
                    break
                continue
            name, value = assignment[1], assignment[2]
            if not re.fullmatch(rf"\$\{{?{name}\}}?", value) and not value.startswith("("):
                before = found.get(name, "")  # what ``A="$A more"`` adds to
                value = re.sub(rf"\$(?:{name}\b|\{{{name}\}})", lambda _, text=before: text, value)
                if len(value) <= MAX_VALUE:
                    found[name] = value
    return found


def arrays(lines: list[list[str]]) -> dict[str, list[str]]:
    """Name -> raw words of every ``NAME=(...)``."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in (word for line in lines for word in line):
        assignment = _ARRAY.match(word)
        if assignment is not None:
            name, word = assignment[1], assignment[2]
            found[name] = []
        if name:
            found[name] += [word.rstrip(")")] if word.rstrip(")") else []
            name = "" if word.endswith(")") else name
    return found


def expanded(word: str, known: Mapping[str, str], depth: int = 0) -> str:
    """The word with its variables; one that nobody sets is left as ``UNKNOWN`` and its name.

    ``$HOME``, ``$USER`` and ``$PWD`` become what a configuration file calls them, ``${oc.env:HOME}``.

    Raises:
        InputError: variables that refer to one another without end.
    """
    if depth > MAX_DEPTH:
        raise InputError(f"the shell variables in {shortened(word)!r} refer to one another without end: correct them")

    def put(found: re.Match[str]) -> str:
        if found["sum"] is not None:
            return _arithmetic(found["sum"], known, depth)
        if found["command"] is not None:
            return f"{UNKNOWN}(...)"
        name = found["plain"] or found["name"]
        if name in known:
            return expanded(known[name], {key: value for key, value in known.items() if key != name}, depth + 1)
        if found["default"] is not None:
            return expanded(found["default"].strip("\"'"), known, depth + 1)
        if name in "@*#" or name.isdigit():
            return ""
        return f"${{oc.env:{name}}}" if name in ("HOME", "USER", "PWD") else UNKNOWN + name

    result = _EXPANSION.sub(put, word)
    if len(result) > MAX_VALUE:
        raise InputError(f"the shell text has {shortened(word)!r}, which becomes too long: shorten it")
    return result.replace(LITERAL, "$") if depth == 0 else result


_EXPANSION = re.compile(
    r"\$\(\((?P<sum>.*?)\)\)(?!\))|\$\((?P<command>[^()]*(?:\([^()]*\)[^()]*)*)\)"
    r"|\$\{(?P<name>\w+|[@*#])(?:\[[@*]\])?(?::?[-=](?P<default>(?:[^{}]|\{[^{}]*\})*))?[^{}]*\}|\$(?P<plain>\w+|[@*#])",
    re.DOTALL,
)


def _arithmetic(text: str, known: Mapping[str, str], depth: int) -> str:
    names = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", lambda found: f"${{{found[1]}}}", text)
    plain = expanded(names, known, depth + 1)
    try:
        return str(_value(ast.parse(plain.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return f"{UNKNOWN}(({os.path.basename(text.strip())}))"


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and abs(node.value) < 1 << 62:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return int(_OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError("not a sum of whole numbers")
