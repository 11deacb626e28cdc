"""From the section ``environment`` of a configuration to environments: classes and functions by their names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mega_rl.config.checks.environment import BUILT_IN, TOOLS
from mega_rl.config.schema.learning import EnvironmentConfig
from mega_rl.environments.protocol import Environment
from mega_rl.environments.tools import Parser
from mega_rl.errors import InputError, shown
from mega_rl.own_code import load
from mega_rl.types import Prompt

FUNCTIONS = {
    "calculate": "mega_rl.environments.built_in.functions:calculate",
    "local_search": "mega_rl.environments.built_in.functions:local_search",
    "code_interpreter": "mega_rl.environments.built_in.python:code_interpreter",
}
# Are called for a tool even if there are no options for them.
RETURN_TOOLS = {FUNCTIONS[name] for name in ("local_search", "code_interpreter")}
PROBE = Prompt(0, (0,), "", "", "")  # an environment made for it is asked what it offers, and nothing else


class Maker:
    """Makes the environments of a run.

    Args:
        config: with a name.
        parse: reads tool calls; only the environment ``tools`` has a use for it.

    Raises:
        InputError: nothing of that name, or options that it does not take.
    """

    def __init__(self, config: EnvironmentConfig, parse: Parser) -> None:
        assert config.name is not None, "a run of single turns makes no environments"
        self._kind = load(BUILT_IN.get(config.name, config.name), "environment.name", "class", is_found_elsewhere=True)
        self._options = dict(config.options)
        if config.name == TOOLS:
            functions = [tool(entry) for entry in self._options["functions"]]
            self._options |= {"functions": functions, "parse": parse}
        try:
            inspect.signature(self._kind).bind(PROBE, 0, **self._options)
            self._probe = made = self(PROBE, 0)
        except InputError as error:
            raise InputError(f"environment.options: {error}") from error
        except Exception as error:  # the user's code
            raise InputError(
                f"environment.name {config.name} cannot be made with environment.options ({type(error).__name__}: "
                f"{error}); correct them"
            ) from error
        self.tools: Sequence[dict[str, Any]] = [dict(schema) for schema in getattr(made, "tools", ())]
        self.roles: Sequence[str] = tuple(getattr(made, "roles", ()))
        if not callable(getattr(made, "step", None)):
            raise InputError(f"environment.name {config.name} has no method step(turn); write one")

    def check(self) -> None:
        """Whether what the environment needs works; it is asked, if it has a method ``check_at_start``.

        Raises:
            InputError: it does not, in the environment's words.
        """
        check = getattr(self._probe, "check_at_start", None)
        if check is None:
            return
        if inspect.iscoroutinefunction(check):
            raise InputError(
                "environment.name: the method check_at_start is async, so nobody waits for it; make it plain"
            )
        try:
            check()
        except InputError as error:
            raise InputError(f"environment.options: {error}") from error
        except Exception as error:  # the user's code
            raise InputError(
                f"environment.name: check_at_start of the environment failed ({type(error).__name__}: {error}); fix "
                "what it says, or the method"
            ) from error

    def __call__(self, prompt: Prompt, sample_index: int) -> Environment:
        made: Environment = self._kind(prompt, sample_index, **self._options)
        return made


def placed(config: EnvironmentConfig) -> tuple[EnvironmentConfig, list[Path]]:
    """The same for a process in any directory: files of classes and functions by absolute paths; and these files."""
    files: list[Path] = []

    def absolute(name: Any) -> Any:
        if isinstance(name, Mapping):
            return {**name, "name": absolute(name.get("name"))}
        source, _, attribute = str(name).rpartition(":")
        if not source.endswith(".py"):
            return name
        files.append(Path(source).absolute())
        return f"{files[-1]}:{attribute}"

    options = dict(config.options)
    if config.name == TOOLS:
        options["functions"] = [absolute(entry) for entry in options["functions"]]
    return replace(config, name=absolute(config.name), options=options), files


def tool(entry: Any) -> Callable[..., Any]:
    """A function by its name, or what a function of that name returns for options: ``{name: ..., options: {...}}``."""
    key = "environment.options.functions"
    name, options = (entry.get("name"), entry.get("options")) if isinstance(entry, Mapping) else (entry, None)
    if not isinstance(name, str) or not isinstance(options, Mapping | None):
        raise InputError(f"{key} has {shown(entry)}: give a name, or name and options")
    path = FUNCTIONS.get(name, name)
    function = load(path, key, is_found_elsewhere=True)
    if options is None and path not in RETURN_TOOLS:
        return function
    try:
        made = function(**(options or {}))
    except TypeError as error:
        raise InputError(f"{key}: {name} does not take these options ({error})") from error
    if not callable(made):
        raise InputError(f"{key}: {name} with options returns {shown(made)}, which is no function")
    return made  # type: ignore[no-any-return]
