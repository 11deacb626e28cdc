"""A configuration of ours while it is made from one of theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from mega_rl.config.reading.tables import Table, reasons
from mega_rl.errors import shown
from mega_rl.importers.draft.reading import Given

Became = Literal["mapped", "same", "none", "unknown"]
Stage = Literal["rl", "pt", "sft", "rm", "dpo", "kto"]
ONLY_RL = ("rollout.", "algorithm.", "aqn.", "critic.", "validation.n", "validation.temperature")


@dataclass(frozen=True)
class KeyOutcome:
    """What became of one key of theirs."""

    became: Became
    text: str


@dataclass
class Draft:
    """What has been set so far, and the outcome of every key."""

    table: Table
    given: Given
    num_devices: int | None  # the user's word; None: what their configuration says
    defaults: dict[str, Any] = field(default_factory=dict)  # dotted key of theirs -> what holds where none is given
    stage: Stage = "rl"
    result: dict[str, Any] = field(default_factory=dict)  # dotted key of ours -> value
    outcomes: dict[str, KeyOutcome] = field(default_factory=dict)  # key of theirs -> what became of it
    rewards: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what is left to be done by hand
    divided_by: str = ""  # the key of theirs that divides weights over all ranks, where no size of ours does

    def get(self, *keys: str, default: Any = None) -> Any:
        """The value of the first of these keys that is given and not null; else ``default``.

        Between the two, their own default of the first key that is not given and has one.
        """
        given = self.given.values
        for key in keys:
            if given.get(key) is not None and key not in self.given.unresolved:
                return given[key]
        found = (self.defaults[key] for key in keys if key not in given and self.defaults.get(key) is not None)
        return next(found, default)

    def word(self, *keys: str, default: Any = None) -> Any:
        """As ``get``, of one plain value; a list or a section is refused, and ``default`` holds."""
        value = self.get(*keys, default=default)
        if isinstance(value, list | dict):
            self._refuse(keys, value, "one word or number")
            return default
        return value

    def number(self, *keys: str, default: float | None = None) -> float | None:
        """As ``get``, of a number; anything else is refused, and ``default`` holds."""
        value = self.get(*keys, default=default)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            return value
        self._refuse(keys, value, "a number")
        return default

    def _refuse(self, keys: tuple[str, ...], value: Any, expected: str) -> None:
        named = [key for key in keys if self.given.values.get(key) == value]
        self.lack(named, "other_word", f"{shown(value)}, where {expected} is expected")

    def count(self, *keys: str, default: int | None = None) -> int | None:
        """As ``number``, of a whole number >= 1; anything less means that it is not set."""
        value = self.number(*keys, default=default)
        if value is None or value < 1:
            return default
        return int(value)

    def has(self, *keys: str) -> bool:
        return any(key in self.given.values for key in keys)

    def set(self, ours: str, value: Any, theirs: Iterable[str] = ()) -> None:
        """Sets a key of ours; ``theirs`` are the keys that it came from."""
        if self.stage != "rl" and ours.startswith(ONLY_RL):
            self.same(theirs, "only_rl")
            return
        self.result[ours] = value
        for key in theirs:
            self.note(key, "mapped", f"{ours} = {_plain(value)}")

    def note(self, theirs: str, became: Became, text: str) -> None:
        """Adds to the outcome of a key, if it is given."""
        if theirs not in self.given.values:
            return
        before = self.outcomes.get(theirs)
        if before is not None and before.became == became and text not in before.text:
            text = f"{before.text}; {text}"
        if before is None or before.became == became or became == "none":
            self.outcomes[theirs] = KeyOutcome(became, text)

    def same(self, theirs: Iterable[str], reason: str) -> None:
        for key in theirs:
            self.note(key, "same", reasons()["same"][reason]["en"])

    def lack(self, theirs: Iterable[str], reason: str, detail: str = "") -> None:
        for key in theirs:
            self.note(key, "none", reasons()["none"][reason]["en"] + (f" ({detail})" if detail else ""))


Rule = Callable[[Draft], None]


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
