"""Every key of the published commands of the neighbours has an entry in its table, and none is lost on the way."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from mega_rl.config.reading.tables import NEIGHBOURS, key_lines, metric_lines, reasons, table
from mega_rl.config.reading.typed import leaf_names
from mega_rl.errors import InputError
from mega_rl.importers.convert import as_tree, convert
from mega_rl.importers.draft.reading import Given
from mega_rl.observe.metrics.declared import match
from tests.launching.launch import REPO

HERE = Path(__file__).parent


def published(neighbour: str) -> dict[str, Any]:
    """Key -> a published value; None where it was a path or long."""
    lines = (HERE / "published" / f"{neighbour}.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.partition(" = ") for line in lines if not line.startswith("#"))
    return {key: json.loads(value) if value else None for key, _, value in pairs}


@pytest.mark.parametrize("neighbour", NEIGHBOURS)
def test_every_published_key_is_mapped_or_refused_with_a_reason(neighbour: str) -> None:
    given = published(neighbour)
    assert len(given) > 90
    draft = convert(neighbour, Given(dict(given)), num_devices=8)
    names = {table(neighbour).renamed(key) for key in given}
    assert draft.outcomes.keys() == names
    assert [key for key, outcome in draft.outcomes.items() if outcome.became == "unknown"] == []
    assert all(outcome.text for outcome in draft.outcomes.values())


@pytest.mark.parametrize("neighbour", NEIGHBOURS)
def test_tables_name_real_keys_and_reasons(neighbour: str) -> None:
    free = ("rollout.vllm", "rewards[]", "trainer.megatron")
    ours = {*leaf_names(), *free}
    for entry in table(neighbour).entries.values():
        assert all(key in ours or key.startswith(free) for key in entry.to), entry
        assert bool(entry.reason) == (entry.kind in ("rules", "same", "none")), entry
        if entry.reason:
            assert set(reasons()[entry.kind][entry.reason]) == {"en", "zh"}, entry


def test_every_reason_is_used() -> None:
    used = {(entry.kind, entry.reason) for name in NEIGHBOURS for entry in table(name).entries.values()}
    spare = {(kind, name) for kind, names in reasons().items() for name in names} - used
    rules = "".join(path.read_text(encoding="utf-8") for path in (REPO / "mega_rl/importers").rglob("*.py"))
    assert sorted(name for _, name in spare if f'"{name}"' not in rules) == []


@pytest.mark.parametrize("neighbour", NEIGHBOURS)
def test_an_unknown_key_is_listed(neighbour: str) -> None:
    draft = convert(neighbour, Given({"no_such_key_of_theirs": 1}), num_devices=8)
    assert draft.outcomes["no_such_key_of_theirs"].became == "unknown"


@pytest.mark.parametrize("neighbour", NEIGHBOURS)
def test_odd_values_are_converted_or_refused_in_a_sentence(neighbour: str) -> None:
    odd = [None, True, False, "", "x", "a,b", "1", 0, -1, 3, 0.5, 1e30, [], [1], ["a", None], {}, {"a": 1}, "${b}"]
    draw = random.Random(neighbour)
    keys = list(published(neighbour))
    for _ in range(40):
        given = Given({key: draw.choice(odd) for key in draw.sample(keys, draw.randint(1, len(keys)))})
        try:
            draft = convert(neighbour, given, draw.choice([None, 1, 8]))
        except InputError as error:
            assert "\n" not in str(error) and ":" in str(error)
            continue
        assert draft.outcomes.keys() == given.values.keys()
        json.dumps(as_tree(draft.result))


@pytest.mark.parametrize("neighbour", NEIGHBOURS)
@pytest.mark.parametrize("language", ["en", "zh"])
def test_pages_have_the_tables(neighbour: str, language: str) -> None:
    suffix = {"en": "", "zh": "_zh"}[language]
    page = (REPO / f"docs/from_{neighbour}{suffix}.md").read_text(encoding="utf-8")
    for lines in (metric_lines(neighbour), key_lines(neighbour, language)):
        assert "\n".join(["```text", *lines, "```"]) in page, "python tools/import_config.py --from NAME prints them"


@pytest.mark.parametrize("neighbour", NEIGHBOURS)
def test_metrics_are_ours(neighbour: str) -> None:
    for name in table(neighbour).metrics.values():
        match(name)
