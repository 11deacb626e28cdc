"""Names in a package read from its files, unpacked or installed; nothing of it is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Found:
    """A module, class, function, or assignment, and the module where it stands."""

    module: str
    node: ast.AST
    name: str


class Package:
    """A folder of packages, such as an unpacked wheel, and folders of what these are built upon."""

    def __init__(self, *roots: Path) -> None:
        self.roots = roots
        self._parse = cache(self._read)

    def _file(self, module: str) -> Path | None:
        paths = [root.joinpath(*module.split(".")) for root in self.roots]
        files = [file for path in paths for file in (path / "__init__.py", path.with_suffix(".py"))]
        return next((file for file in files if file.is_file()), None)

    def _read(self, module: str) -> ast.Module | None:
        file = self._file(module)
        return None if file is None else ast.parse(file.read_text(encoding="utf-8"))

    def find(self, path: str) -> Found | None:
        """What a dotted path names; "()" after a name stands for what calling it returns. None: there is no such."""
        names = path.split(".")
        for count in range(len(names), 0, -1):
            module = ".".join(names[:count])
            if (tree := self._parse(module)) is not None:
                return self._descend(Found(module, tree, module), names[count:])
        return None

    def _descend(self, found: Found | None, names: list[str]) -> Found | None:
        for name in names:
            if found is None:
                return None
            plain = name.removesuffix("()")
            found = self._member(found, plain)
            if found is not None and name != plain and isinstance(found.node, ast.FunctionDef):
                found = self._annotated(found.node.returns, found.module)
        return found

    def _member(self, owner: Found, name: str) -> Found | None:
        if isinstance(owner.node, ast.Module):
            return self._of_module(owner.module, name)
        if not isinstance(owner.node, ast.ClassDef):  # a field, a property: what it is annotated with
            if name in _choices(getattr(owner.node, "value", None)):
                return Found(owner.module, ast.Constant(name), name)
            typed = self._typed(owner)
            return None if typed is None else self._member(typed, name)
        for node in owner.node.body:
            if name in _defined(node):
                return Found(owner.module, node, name)
        assigned = [Found(owner.module, node, name) for node in _assigned(owner.node, name)]
        if assigned:
            return next((found for found in assigned if self._typed(found)), assigned[0])
        bases = (self._annotated(base, owner.module) for base in owner.node.bases)
        members = (self._member(base, name) for base in bases if base and base.node is not owner.node)
        return next((found for found in members if found), None)

    def _of_module(self, module: str, name: str) -> Found | None:
        if self._file(f"{module}.{name}"):
            return self.find(f"{module}.{name}")
        is_package, declared = (file := self._file(module)) is not None and file.name == "__init__.py", None
        for node in _statements(self._parse(module)):
            if isinstance(node, ast.ImportFrom):
                base = _absolute(node, module, is_package)
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.find(f"{base}.{alias.name}")
                    if alias.name == "*" and base != module and (found := self._of_module(base, name)):
                        return found
            elif name in _defined(node):
                found = Found(module, node, name)
                if getattr(node, "value", node) is not None:
                    return found
                declared = found  # a bare annotation: the value comes later, or at run time
            elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
                # the lazy names of a package: {"LLM": ".entrypoints.llm:LLM"}
                for key, value in zip(node.value.keys, node.value.values, strict=True):
                    if getattr(key, "value", None) == name and ":" in str(getattr(value, "value", "")):
                        return self.find(module + value.value.replace(":", "."))  # type: ignore[attr-defined]
        return declared

    def _typed(self, found: Found) -> Found | None:
        node = found.node
        annotation = node.returns if isinstance(node, ast.FunctionDef) else getattr(node, "annotation", None)
        value = getattr(node, "value", None)
        if annotation is None and isinstance(value, ast.Call):  # x = Class(...)
            annotation = value.func
        return self._annotated(annotation, found.module)

    def _annotated(self, annotation: ast.expr | None, module: str) -> Found | None:
        """The first class of the package that an annotation or a base names."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        for node in ast.walk(annotation) if annotation is not None else ():
            if isinstance(node, ast.Name | ast.Attribute):
                found = self._descend(
                    Found(module, self._parse(module) or ast.Module([], []), module), _text(node).split(".")
                )
                if found is not None and isinstance(found.node, ast.ClassDef):
                    return found
        return None

    def lineage(self, found: Found) -> Iterator[Found]:
        """A class of the package and the bases of it that are in the package, nearest first."""
        yield found
        assert isinstance(found.node, ast.ClassDef)
        for base in found.node.bases:
            if (parent := self._annotated(base, found.module)) and parent.node is not found.node:
                yield from self.lineage(parent)

    def describe(self, path: str) -> dict[str, Any] | None:
        """The entry of a record: None where the package has no such name."""
        found = self.find(path)
        if found is None:
            return None
        if isinstance(found.node, ast.FunctionDef):
            return {"kind": "function", "parameters": _parameters(found.node)}
        if isinstance(found.node, ast.ClassDef):
            return self._describe_class(found)
        return {"kind": "module" if isinstance(found.node, ast.Module) else "value"}

    def _describe_class(self, found: Found) -> dict[str, Any]:
        entry: dict[str, Any] = {"kind": "class"}
        fields: dict[str, None] = {}
        abstract: dict[str, Any] = {}
        concrete: set[str] = set()
        for part in self.lineage(found):
            assert isinstance(part.node, ast.ClassDef)
            for node in part.node.body:
                if isinstance(node, ast.AnnAssign) and "ClassVar" not in _text(node.annotation):
                    fields[_text(node.target)] = None
                if not isinstance(node, ast.FunctionDef):
                    continue
                if node.name == "__init__":
                    entry.setdefault("parameters", _parameters(node))
                is_abstract = any("abstractmethod" in _text(d) for d in node.decorator_list)
                if is_abstract and node.name not in concrete:
                    abstract[node.name] = _parameters(node)
                concrete.add(node.name)
        if "parameters" not in entry:
            entry["parameters"] = [{"name": name, "kind": "keyword", "optional": True} for name in fields]
        if fields and any("dataclass" in _text(d) or "config" in _text(d) for d in found.node.decorator_list):
            entry["fields"] = list(fields)
        return entry | ({"abstract": abstract} if abstract else {})

    def version(self, package: str) -> str:
        """The version that a package states in its ``_version.py``."""
        node = self._of_module(f"{package}._version", "version")
        value = getattr(node.node if node else None, "value", None)
        assert isinstance(value, ast.Constant), f"{package} states no version"
        return str(value.value).partition("+")[0]


def _text(node: ast.AST | None) -> str:
    return "" if node is None else ast.unparse(node)


def _choices(value: ast.AST | None) -> list[str]:
    """The members of ``Literal[...]``, or the keys of a dictionary."""
    nodes = value.keys if isinstance(value, ast.Dict) else ast.walk(value) if isinstance(value, ast.Subscript) else ()
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def _statements(tree: ast.Module | None) -> Iterator[ast.stmt]:
    """Of a module, those within if and try included."""
    pending: list[ast.AST] = [] if tree is None else list(tree.body)
    while pending:
        node = pending.pop(0)
        if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            pending = [*ast.iter_child_nodes(node), *pending]
        elif isinstance(node, ast.stmt):
            yield node


def _defined(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [_text(target) for target in node.targets]
    return [_text(node.target)] if isinstance(node, ast.AnnAssign) else []


def _assigned(owner: ast.ClassDef, name: str) -> list[ast.AST]:
    """Every ``self.name = ...`` in the methods of a class."""
    found = []
    for method in (n for n in owner.body if isinstance(n, ast.FunctionDef)):
        for node in ast.walk(method):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if isinstance(node, ast.Assign | ast.AnnAssign) and any(
                isinstance(t, ast.Attribute) and t.attr == name and _text(t.value) == "self" for t in targets
            ):
                found.append(_with_type(node, method))
    return found


def _with_type(node: ast.Assign | ast.AnnAssign, method: ast.FunctionDef) -> ast.AST:
    """``self.x = x`` as annotated as the method's parameter is."""
    if isinstance(node, ast.AnnAssign):
        return node
    annotations = {a.arg: a.annotation for a in (*method.args.args, *method.args.kwonlyargs)}
    annotation = annotations.get(_text(node.value))
    return node if annotation is None else ast.AnnAssign(node.targets[0], annotation, node.value, 0)


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    base = parts[: len(parts) - node.level + is_package]
    return ".".join([*base, *([node.module] if node.module else [])])


def _parameters(node: ast.FunctionDef) -> list[dict[str, Any]]:
    """Parameters without ``self``: name, kind (positional, keyword, args, kwargs), and whether it may be left out."""
    arguments = node.args
    is_static = any(_text(d) == "staticmethod" for d in node.decorator_list)
    positional = [*arguments.posonlyargs, *arguments.args]
    needed = len(positional) - len(arguments.defaults)
    found = [{"name": a.arg, "kind": "positional", "optional": i >= needed} for i, a in enumerate(positional)]
    if found and found[0]["name"] in ("self", "cls") and not is_static:
        found = found[1:]
    if arguments.vararg:
        found.append({"name": arguments.vararg.arg, "kind": "args", "optional": True})
    for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append({"name": a.arg, "kind": "keyword", "optional": default is not None})
    if arguments.kwarg:
        found.append({"name": arguments.kwarg.arg, "kind": "kwargs", "optional": True})
    return found
