"""Single values of a Hugging Face config.json, checked as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mega_rl.errors import InputError


def positive_integer(config: Mapping[str, Any], key: str, where: str) -> int:
    """The value of ``key``; InputError, in which ``where`` names the file, unless it is an integer >= 1."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{where}: {key} is {value!r}; it must be a positive integer")
    return value


def positive_number(config: Mapping[str, Any], key: str, default: float, where: str) -> float:
    """The value of ``key`` or the default; InputError unless it is a number > 0."""
    value = config.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise InputError(f"{where}: {key} is {value!r}; it must be a positive number")
    return float(value)


def refuse_unless(config: Mapping[str, Any], key: str, supported: Any, where: str) -> None:
    """InputError where ``key`` is there and not the one value that is supported."""
    if config.get(key, supported) != supported:
        raise InputError(f"{where}: {key} is {config[key]!r}; only {supported!r} is supported")
