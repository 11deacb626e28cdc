"""Single values of a Hugging Face config.json, checked as they are read."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from mega_rl.errors import shown

PLACEHOLDER = 1  # what a reading returns for a value that is bad; no shape is made of it
MAX_SIZE = 2**31 - 1  # of any size in the file


class ConfigValues:
    """The values of one config.json; whatever is wrong with them is collected as sentences in ``problems``.

    Reading goes on after a bad value, so that a user sees all of them at once. A condition between several values asks
    ``good`` first, or it would complain about placeholders.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        """``where`` names the file in the sentences."""
        self.values = values
        self.where = where
        self.problems: list[str] = []
        self._bad: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """The unchecked value of ``key``; the default if the file has none."""
        return self.values.get(key, default)

    def good(self, *keys: str) -> bool:
        """Whether none of these keys has been complained about so far."""
        return self._bad.isdisjoint(keys)

    def add(self, sentence: str, *keys: str) -> None:
        """Add a problem of these keys."""
        self.problems.append(f"{self.where}: {sentence}")
        self._bad.update(keys)

    def integer(self, key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        """The value of ``key`` or the default: an integer from 1 to ``most``."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.add(f"{key} is {shown(value)}; it must be a positive integer", key)
            return PLACEHOLDER
        if value > most:
            self.add(f"{key} is {shown(value)}; no model has more than {most}", key)
            return PLACEHOLDER
        return value

    def number(self, key: str, default: float) -> float:
        """The value of ``key`` or the default: a finite number > 0."""
        value = self.get(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max:
            return float(value)
        self.add(f"{key} is {shown(value)}; it must be a positive number", key)
        return PLACEHOLDER

    def flag(self, key: str) -> bool:
        """The value of ``key``, false if there is none."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            self.add(f"{key} is {shown(value)}; it must be true or false", key)
        return bool(value)

    def section(self, key: str) -> Mapping[str, Any]:
        """The JSON object at ``key``, empty if there is none."""
        value = self.get(key) or {}
        if isinstance(value, Mapping):
            return value
        self.add(f"{key} is {shown(value)}; it must be a JSON object or null", key)
        return {}

    def require(self, key: str, supported: Any) -> None:
        """Complains if ``key`` is there and not the one value that is supported."""
        if self.get(key, supported) != supported:
            self.add(f"{key} is {shown(self.get(key))}; only {supported!r} is supported", key)
