"""A user's own function or class by its name in a configuration: rewards, environments, tools, losses, advantages.

The name is ``package.module:name`` or ``path/to/file.py:name``. A file is imported once in a process, as any module is.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from mega_rl.errors import InputError, shortened, shown

# Modules that a user's configuration or file may name and that are elsewhere now: folder before and now -> their names.
_MOVED = {
    ("mega_rl.environments", "mega_rl.environments.built_in"): "functions guessing gymnasium_games mcp_tools python",
    ("mega_rl.rewards", "mega_rl.rewards.functions"): "code extraction forms images math registry symbolic text",
    ("mega_rl.rollout", "mega_rl.serving"): "agent_address endpoint sessions verifiers_agents",
}
MOVED = {f"{old}.{name}": f"{now}.{name}" for (old, now), names in _MOVED.items() for name in names.split()}


def is_own(name: str) -> bool:
    """Whether a name is that of a user's code, and not that of something built in."""
    return ":" in name


def name_problem(name: str, kind: str = "function") -> str | None:
    """What is wrong with the name of a user's code before anything is imported: the end of a sentence that names it.

    Args:
        kind: what the name should be of.
    """
    place, _, attribute = name.rpartition(":")
    if not (place and attribute.isidentifier()):
        return f": write package.module:{kind} or path/to/file.py:{kind}"
    if place.endswith(".py") and not os.path.isfile(place):
        return f", but {shortened(place)} is not a file: give an existing Python file"
    return None


def load(name: str, key: str, kind: str = "function", is_found_elsewhere: bool = False) -> Callable[..., Any]:
    """What stands behind a name.

    Args:
        key: of the configuration, which begins every sentence.
        kind: what the name should be of, for the sentences.
        is_found_elsewhere: other processes import a file's module by its name, so it has the name of the file, and its
            directory is one that modules are looked for in. Otherwise files of the same name do not meet.

    Raises:
        InputError: nothing of that name can be imported, or it cannot be called.
    """
    place, _, attribute = name.rpartition(":")
    if place.endswith(".py"):
        module = _module_of_file(Path(place), name, key, is_found_elsewhere)
    else:
        module = _module(place, name, key)
    value = getattr(module, attribute, None)
    if not callable(value):
        known = [entry for entry, found in vars(module).items() if callable(found)]
        guess = nearest(attribute, known)
        raise InputError(f"{key}: {place} has no {kind} {shown(attribute)}{guess}; correct the name")
    return value  # type: ignore[no-any-return]


def nearest(name: str, choices: Iterable[str]) -> str:
    """A guess at what was meant, for a sentence; empty if nothing is like it."""
    near = difflib.get_close_matches(name, list(choices), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _module(place: str, name: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except BaseException as error:  # importing runs the user's code
        raise InputError(
            f"{key}: {shown(name)} cannot be imported ({_cause(error)}); correct the name, or fix or install the module"
        ) from error


def _cause(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name in MOVED:
        return f"{error.name} is now {MOVED[error.name]}"
    return f"{type(error).__name__}: {error}"


def _module_of_file(path: Path, name: str, key: str, is_found_elsewhere: bool) -> ModuleType:
    if not path.is_file():
        raise InputError(f"{key}: {shown(name)} names {path}, which is no file; correct the path")
    try:
        module = _by_its_own_name(path) if is_found_elsewhere else _by_its_path(path)
    except BaseException as error:  # importing runs the user's code
        raise InputError(f"{key}: {path} cannot be imported ({_cause(error)}); fix that file") from error
    if not os.path.samefile(module.__file__ or os.devnull, path):
        raise InputError(f"{key}: {shown(name)} has the file name of another module, {path.stem}; rename the file")
    return module


def _by_its_own_name(path: Path) -> ModuleType:
    directory = str(path.absolute().parent)
    if directory not in sys.path:
        sys.path.append(directory)  # last: a file of its directory must not stand in for another module
    return importlib.import_module(path.stem)


def _by_its_path(path: Path) -> ModuleType:
    digest = hashlib.blake2b(str(path.resolve()).encode(), digest_size=8).hexdigest()
    spec = importlib.util.spec_from_file_location(f"mega_rl_own_{path.stem}_{digest}", path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    if spec.name in sys.modules:
        return sys.modules[spec.name]
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module
