"""What a neighbour's data sets mean here: the rewards of their rows, and how many of these are read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mega_rl.config.schema.data_file import bounded
from mega_rl.importers.draft.draft import Draft
from mega_rl.importers.draft.units import as_list

TRAIN, HELD_OUT = "data.train_files", "data.val_files"


@dataclass(frozen=True)
class KnownData:
    """A published data set."""

    part: str  # of the name of its files, in lower case
    sources: tuple[str, ...]  # what the column data_source of its rows says, as names or shell patterns
    rewards: tuple[dict[str, Any], ...]  # entries of the list ``rewards``


GSM8K = ("openai/gsm8k",)
GEOMETRY = ("hiyouga/geometry3k",)
DAPO = ("math_dapo*", "math", "aime*")
MATH = ("*/MATH*", "hendrycks_math")
CODE = ("codecontests", "apps", "codeforces", "taco", "*code*")
# The first whose part stands in a name counts.
KNOWN = (
    KnownData("gsm8k", GSM8K, ({"name": "gsm8k"},)),
    KnownData("geo3k", GEOMETRY, ({"name": "math_verify"},)),
    KnownData("geometry3k", GEOMETRY, ({"name": "math_verify"},)),
    KnownData("dapo", DAPO, ({"name": "dapo_math"},)),
    KnownData("aime", DAPO, ({"name": "dapo_math"},)),
    KnownData("math", MATH, ({"name": "math_verify"},)),
    KnownData("code", CODE, ({"name": "code_tests"},)),
)


def add_rewards(
    draft: Draft, trained: Iterable[Any], held_out: Iterable[Any] = (), known: Sequence[KnownData] = KNOWN
) -> None:
    """The rewards for data sets of these names, with a note: of several sets each for its own data source."""

    def find(name: str) -> KnownData | None:
        return next((data for data in known if data.part in name.lower()), None)

    names = [str(part) for name in trained for part in as_list(name) if part]
    tested = [str(part) for name in held_out for part in as_list(name) if part]
    kinds = [data for data in map(find, [*names, *tested]) if data is not None]
    by_sources = {data.sources: data for data in reversed(kinds)}
    if not by_sources:
        return
    others = [name for name in names if find(name) is None]
    if len(by_sources) == 1 and not others:
        (data,) = by_sources.values()
        draft.rewards += [dict(entry) for entry in data.rewards]
        chosen = " and ".join(entry["name"] for entry in data.rewards)
        draft.notes.append(f"rewards: {chosen}, by the name of the data: check that it fits")
        return
    for data in reversed(by_sources.values()):
        draft.rewards += [entry | {"only": list(data.sources)} for entry in data.rewards]
    draft.notes.append(
        "rewards: by the names of the data sets, each for the rows whose data_source is in its list only: check them"
    )
    for name in others:
        draft.notes.append(f"rewards: none is known for {name}: add an entry for the data_source of its rows")


def limit_rows(draft: Draft, key: str, fields: Sequence[str] = (TRAIN,), is_each: bool = True) -> None:
    """The first rows only of the files.

    Args:
        key: theirs; what is no number from 1 on means that there is no limit.
        is_each: theirs limits each data set; else all of them together, which here only one file can be.
    """
    if not draft.has(key):
        return
    rows, listed = draft.count(key), {field: as_list(draft.result.get(field)) for field in fields}
    if rows is None:
        draft.note(key, "same", "no limit, as here")
    elif not any(listed.values()) or (not is_each and any(len(files) > 1 for files in listed.values())):
        draft.lack([key], "row_limit")
    else:
        for field, files in listed.items():
            if files:
                draft.set(field, [bounded(str(file), rows) for file in files], [key])
