"""A function of the user's that is called in a process of its own: nothing that it does reaches further."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from mega_rl.environments.protocol import ToolResult
from mega_rl.errors import InputError
from mega_rl.rewards.sandbox.sandbox import ProgramLimits, run_program

# What the function prints goes nowhere; what it returns is the output, after a digit: 1 if it failed, else 0.
PROGRAM = """
import importlib, importlib.util, json, os, sys
answer = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")
os.dup2(2, 1)
def text_of(value):
    if isinstance(value, str): return value
    if isinstance(value, bytes): return value.decode(errors="replace")
    return json.dumps(value, ensure_ascii=False, default=str)
try:
    function = importlib.import_module(MODULE)
    for name in NAME.split("."):
        function = getattr(function, name)
    value = function(**json.loads(sys.stdin.buffer.read()))
    protocol = sys.modules.get("mega_rl.environments.protocol")
    if protocol is not None and isinstance(value, protocol.ToolResult):
        text, has_failed = value.text, value.has_failed
    else:
        text = text_of(value)
        has_failed = text.startswith("error:")
except BaseException as error:
    text, has_failed = f"error: {type(error).__name__}: {error}", True
answer.write("01"[bool(has_failed)] + text)
answer.close()
os._exit(0)
"""


class CalledFunction:
    """A plain function of a module; each call is a fork of a process that has imported the module."""

    def __init__(self, function: Callable[..., Any], timeout_s: float, memory_bytes: int) -> None:
        """Raises InputError: another process cannot find it by its module and name."""
        module, name = function.__module__, function.__qualname__
        if module == "__main__" or "<" in name or inspect.ismethod(function) or not _is_found(module, name):
            raise InputError(
                f"the tool {function.__name__} cannot be imported by another process, so that it could not be ended "
                "when it hangs; put it at the top level of a module, or set is_in_process"
            )
        self.__name__ = function.__name__
        self._module = module
        self._program = PROGRAM.replace("MODULE", repr(module)).replace("NAME", repr(name))
        self._limits = ProgramLimits(timeout_s, memory_bytes, namespaces=False)

    def __call__(self, arguments: Mapping[str, Any]) -> ToolResult:
        """What the model is told, whatever the function does."""
        run = run_program(
            self._program,
            json.dumps(arguments),
            self._limits,
            preload=(self._module,),
            trusted_paths=_paths(),
        )
        if run.exit_code is None:
            return ToolResult(f"error: {self.__name__} gave nothing within {self._limits.timeout_s:g} s", True)
        if run.exit_code != 0:
            return ToolResult(f"error: {self.__name__} ended its process with exit status {run.exit_code}", True)
        return ToolResult(run.output[1:], run.output[:1] == "1")


def _is_found(module: str, name: str) -> bool:
    found: Any = sys.modules.get(module)
    spec = getattr(found, "__spec__", None)
    for part in name.split("."):
        found = getattr(found, part, None)
    return spec is not None and callable(found) and any(str(spec.origin).startswith(path) for path in _paths())


def _paths() -> tuple[str, ...]:
    """Where this process looks for modules; the empty path is the working directory."""
    return tuple(os.path.abspath(path) for path in sys.path)
