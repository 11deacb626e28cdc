"""How many settings a configuration may have, and that every one stands in a table of ``docs/configuration.md``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from mega_rl.config.reading.typed import leaf_names

REPO = Path(__file__).resolve().parents[2]
# Lowered whenever a key goes; a new key takes the place of another one. The last two are rollout.batch_invariant: what
# a step's samples promise must be part of a checkpoint's rules, which an environment variable is not; rewards[].only:
# which rows a reward is for has no other place than its entry.
MAX_SETTINGS = 207


def settings(names: Iterable[str]) -> set[str]:
    """The keys that a file can give: those of the schema, and the lists whose entries have keys (``rewards``)."""
    names = set(names)
    return names | {name.partition("[]")[0] for name in names}


def keys_of_tables(text: str) -> set[str]:
    """The code span that begins each row of a table."""
    return set(re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE))


def test_there_are_not_more_settings() -> None:
    number = len(settings(leaf_names()))
    assert number <= MAX_SETTINGS, f"{number} settings, at most {MAX_SETTINGS}: remove one that follows from others"


def test_every_setting_stands_in_a_table() -> None:
    page = (REPO / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert keys_of_tables(page) == set(leaf_names()), "run `make reference`"


def test_settings_and_rows_are_found() -> None:
    assert settings(["a.b", "rewards[].name", "rewards[].weight"]) == {
        "a.b", "rewards", "rewards[].name", "rewards[].weight",
    }  # fmt: skip
    assert keys_of_tables("| key | takes |\n|---|---|\n| `a.b` | `int` |\nand `c.d`\n") == {"a.b"}
