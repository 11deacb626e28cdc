"""From YAML files and ``key=value`` overrides to a typed ``RunConfig``; every problem is reported at once."""

from __future__ import annotations

import dataclasses
import os
import re
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mega_rl.config.checks.algorithm import apply_preset
from mega_rl.config.reading.interpolations import interpolation_problem
from mega_rl.config.reading.tables import NEIGHBOURS, recognised, sections
from mega_rl.config.reading.typed import Checker, build, unknown_key
from mega_rl.config.reading.yaml_text import MAX_CHARACTERS, MAX_DEPTH, parse_yaml
from mega_rl.config.schema.sampling import AqnConfig
from mega_rl.config.schema.sections import RunConfig
from mega_rl.errors import MAX_LISTED, InputError, input_error, shortened, shown
from mega_rl.models.cached import local_directory

BASE = "base.yaml"  # what the files of a folder of recipes have in common
ALIAS = "trainer.noise_injection"  # the verl NPU guide's name for the section ``aqn``
_AQN_KEYS = frozenset(field.name for field in dataclasses.fields(AqnConfig))


Files = str | Path | Sequence[str | Path] | None


def load_config(files: Files, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of one run; what ``algorithm.name`` stands for is filled in.

    Args:
        files: a YAML file or several, each of which changes those before it: sections are merged, lists replaced. What
            they all leave out has the schema's default. ``${other.key}`` interpolations are resolved in the whole.
            None: the overrides are all there is.
        overrides: ``key=value`` with dotted keys (``rewards[0].weight=2``, ``data.val_files=[a,b]``, ``aqn.seed=7``);
            values are YAML; sections are merged, lists replaced.

    Raises:
        InputError: naming every unknown key (with the nearest valid one), missing key, wrong type, malformed override;
            or the one thing that keeps a file from being read. Of several files each is named with its own problems.
    """
    files = _listed(files)
    where = f"configuration {' + '.join(map(str, files))}" if files else "the command line"
    problems: list[str] = []
    spellings: dict[str, str] = {}
    if len(files) > 1:
        tree = _merged_files(files, spellings)
    else:
        tree = _read(files[0]) if files else {}
        _move_alias(tree, problems, spellings)
    _apply_overrides(tree, overrides, problems, spellings)
    _move_alias(tree, problems, spellings)
    apply_preset(tree)
    checker = Checker(problems, spellings, has_interpolations=True)
    checked = checker.section(RunConfig, tree)
    if problems:
        raise InputError(
            f"{input_error(where, problems)}{_whose(checker.unknown, files[0] if files else 'COMMAND_LINE')}"
        )
    resolved = _resolved(checked, where)
    values = Checker(problems, spellings, has_interpolations=False).section(RunConfig, resolved)
    if problems:
        raise input_error(where, problems)
    config = build(RunConfig, values)
    assert isinstance(config, RunConfig)
    config.model.path = local_directory(config.model.path)
    if config.critic.path is not None:
        config.critic.path = local_directory(config.critic.path)
    return config


def _listed(files: Files) -> list[Path]:
    """
    Raises:
        InputError: a file is there twice.
    """
    paths = [] if files is None else [Path(file) for file in ([files] if isinstance(files, str | Path) else files)]
    seen: set[str] = set()
    for path in paths:
        if (real := os.path.realpath(path)) in seen:
            raise InputError(f"configuration {path} is given twice: give it once, and what changes it after it")
        seen.add(real)
    return paths


@contextmanager
def naming_forgotten_bases(files: Files) -> Iterator[None]:
    """An InputError from inside names the ``base.yaml`` of a folder whose other file was given without it."""
    paths = _listed(files)
    bases = [file.parent / BASE for file in paths if file.name != BASE and (file.parent / BASE).is_file()]
    given = {os.path.realpath(file) for file in paths}
    forgotten = [base for base in bases if os.path.realpath(base) not in given]
    try:
        yield
    except InputError as error:
        if not forgotten:
            raise
        hint = f"A file of that folder may need its base: put --config {forgotten[0]} first"
        raise InputError(f"{error}\n{hint}") from error


def _merged_files(files: Sequence[Path], spellings: dict[str, str]) -> dict[str, Any]:
    """
    Raises:
        InputError: what is wrong in each file by itself, under its name.
    """
    tree: dict[str, Any] = {}
    errors: list[str] = []
    for file in files:
        part = _read(file)
        problems: list[str] = []
        _move_alias(part, problems, spellings)
        checker = Checker(problems, spellings, has_interpolations=True, is_whole=False)
        checker.section(RunConfig, part)
        if problems:
            errors.append(f"{input_error(f'configuration {file}', problems)}{_whose(checker.unknown, file)}")
        tree = _over(tree, part, RunConfig)
    if errors:
        raise InputError("\n".join(errors))
    return tree


def _over(old: Any, new: Any, kind: Any) -> Any:
    """``new`` of a later file over ``old``; a section of the schema ``kind`` that is empty changes nothing."""
    if isinstance(old, dict) and isinstance(new, dict):
        kinds = typing.get_type_hints(kind) if dataclasses.is_dataclass(kind) else {}
        return old | {key: _over(old.get(key), value, kinds.get(key)) for key, value in new.items()}
    return old if new is None and dataclasses.is_dataclass(kind) else new


def _whose(unknown: Sequence[str], file: str | Path) -> str:
    """A line that names the tool for keys of another trainer, if at least two of the unknown ones are that."""
    owners = [name for key in unknown[:MAX_LISTED] for name in recognised(key) or filter(None, [sections().get(key)])]
    if not owners:
        return ""
    owner = max(NEIGHBOURS, key=owners.count)
    if owners.count(owner) < 2 and not any(key in sections() for key in unknown):
        return ""
    command = f"python tools/import_config.py --from {owner} {shortened(str(file))} -o run.yaml"
    return f"\nThese look like keys of {NEIGHBOURS[owner]}: {command} makes a configuration from them"


def _resolved(tree: dict[str, Any], where: str) -> dict[str, Any]:
    """The tree over the defaults, with every ``${other.key}`` replaced by its value."""
    problem = interpolation_problem(tree)
    if problem is not None:
        raise input_error(where, [problem])
    try:
        whole = OmegaConf.merge(OmegaConf.create(dataclasses.asdict(RunConfig())), tree)
        resolved = OmegaConf.to_container(whole, resolve=True)
    except OmegaConfBaseException as error:
        name = f"{error.full_key}: " if error.full_key else ""
        raise input_error(where, [f"{name}{_first_line(error)}"]) from error
    except (RecursionError, ValueError, TypeError, LookupError, AttributeError) as error:  # OmegaConf's, now and then
        cause = "it refers to itself" if isinstance(error, RecursionError) else _first_line(error)
        raise input_error(where, [f"a value with ${{...}} cannot be resolved ({cause}): write it out"]) from error
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _read(file: Path) -> dict[str, Any]:
    if os.path.exists(file) and not os.path.isfile(file):  # opening a pipe would wait for its writer
        raise InputError(f"configuration {file} is no regular file: give a YAML file")
    try:
        with file.open(encoding="utf-8") as text:
            tree = parse_yaml(text.read(MAX_CHARACTERS + 1))
    except UnicodeDecodeError as error:
        raise InputError(f"configuration {file} is not UTF-8 text: give a YAML file") from error
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InputError(
            f"configuration {file} cannot be read ({reason}): give an existing YAML file; recipes: configs/README.md"
        ) from error
    except ValueError as error:
        raise InputError(f"configuration {file} is not valid YAML: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise InputError(f"configuration {file} holds no sections of keys: begin it with a line such as 'model:'")
    return tree


def _move_alias(tree: dict[str, Any], problems: list[str], spellings: dict[str, str]) -> None:
    """Moves ``trainer.noise_injection`` to ``aqn``, in place."""
    trainer = tree.get("trainer")
    if not isinstance(trainer, dict) or "noise_injection" not in trainer:
        return
    section = trainer.pop("noise_injection")
    if section is None:
        return
    if not isinstance(section, dict):
        problems.append(f"{ALIAS} is {shown(section)} ({type(section).__name__}): expected a section of keys (dict)")
        return
    if tree.get("aqn") is None:
        tree["aqn"] = {}
    target = tree["aqn"]
    if not isinstance(target, dict):
        return  # the walk over the schema reports it
    for key, value in section.items():
        if key not in _AQN_KEYS:
            problems.append(unknown_key(f"{ALIAS}.{key}", AqnConfig, f"{ALIAS}."))
        elif key in target and target[key] != value:
            problems.append(_conflict(f"aqn.{key}", target[key], value))
        else:
            target[key] = value
            spellings[f"aqn.{key}"] = f"{ALIAS}.{key}"


def _conflict(name: str, value: Any, alias_value: Any) -> str:
    alias = ALIAS + name.removeprefix("aqn")
    return f"{name} is {shown(value)} but its other spelling {alias} is {shown(alias_value)}: give one of the two"


def _apply_overrides(
    tree: dict[str, Any], overrides: Sequence[str], problems: list[str], spellings: dict[str, str]
) -> None:
    given: dict[tuple[str, bool], Any] = {}  # (dotted key, through the alias) -> value
    for override in overrides:
        name, equals, text = override.partition("=")
        name = name.strip()
        parts = [part for part in re.split(r"\.|\[|\]\.?", name) if part]
        if not equals or not parts:
            fix = f"give it as --config {shortened(name)}" if name.endswith(".yaml") else "write it as key=value"
            problems.append(f"override {shown(override)} is malformed: {fix}")
            continue
        if len(parts) > MAX_DEPTH:
            problems.append(f"override {shown(override)} has a key of more than {MAX_DEPTH} parts: shorten it")
            continue
        try:
            value = parse_yaml(text)
        except ValueError as error:
            fix = "quote it as in key='\"value\"'"
            problems.append(f"override {shown(override)} has no readable value ({error}): {fix}")
            continue
        through_alias = parts[:2] == ALIAS.split(".") and len(parts) > 2 and parts[2] in _AQN_KEYS
        if through_alias:
            parts = ["aqn", *parts[2:]]
            spellings[".".join(parts)] = name
        dotted = ".".join(parts)
        given[dotted, through_alias] = value
        if (dotted, not through_alias) in given and given[dotted, not through_alias] != value:
            problems.append(_conflict(dotted, given[dotted, False], given[dotted, True]))
        problem = _assign(tree, parts, value)
        if problem:
            problems.append(f"override {shown(override)}: {problem}")


def _assign(tree: dict[str, Any], parts: Sequence[str], value: Any) -> str | None:
    """Sets one value in place; returns a sentence if the path cannot be followed."""
    node: Any = tree
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        if isinstance(node, list):
            listed = ".".join(parts[:depth])
            places = {str(place): place for place in range(len(node))}
            if part not in places:
                wanted = f"has {len(node)} entries and no entry {shortened(part)}"
                return f"{listed} {wanted}: give the whole list, {listed}=[...]"
            key: Any = places[part]
        elif isinstance(node, dict):
            key = part
        else:
            return f"{'.'.join(parts[:depth])} is {shown(node)} and has no keys below it: leave {part!r} out of the key"
        if last:
            old = node[key] if isinstance(node, list) else node.get(key)
            node[key] = _merged(old, value)
        elif isinstance(node, dict) and node.get(key) is None:
            node[key] = {}
        if not last:
            node = node[key]
    return None


def _merged(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {key: _merged(old.get(key), value) for key, value in new.items()}
    return new
