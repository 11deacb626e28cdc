"""What becomes of every configuration file of a neighbour's checkout: files read, exit 0, and keys by their outcome.

    python -m benchmarks.importing.published --from verl CHECKOUT/examples [--devices 8] [--unknown] [--json PATH]

Files are those of the neighbour's kind (shell scripts, YAML, Python) below the folders that are given, or the files
themselves; those without any key that its table knows (``not of it``) are counted apart. ``--unknown`` lists the keys
that the table does not know, the most frequent first, and why files were not read.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.report import publish, table
from mega_rl.config.reading.tables import NEIGHBOURS
from mega_rl.errors import InputError
from mega_rl.importers.convert import convert
from mega_rl.importers.draft.draft import Draft
from mega_rl.importers.draft.reading import read_given

SUFFIXES = {
    "verl": (".sh",),
    "trl": (".yaml", ".py"),
    "openrlhf": (".sh",),
    "slime": (".sh",),
    "swift": (".sh", ".yaml"),
}  # others: YAML
OUTCOMES = {"mapped": "set", "same": "needless", "none": "no counterpart", "unknown": "unknown"}


def files(neighbour: str, places: list[Path]) -> list[Path]:
    suffixes = SUFFIXES.get(neighbour, (".yaml",))
    found = [path for place in places for path in ([place] if place.is_file() else place.rglob("*"))]
    return sorted(path for path in found if path.is_file() and (path in places or path.suffix in suffixes))


def read(neighbour: str, path: Path, devices: int | None) -> Draft | str:
    """The draft of a file, or why there is none."""
    try:
        return convert(neighbour, read_given([str(path)], {}), devices)
    except InputError as error:
        return str(error)


def _is_another(draft: Draft | str) -> bool:
    """Of a file without any key, or without any that the table knows: tokens to be added, a program without a run."""
    if isinstance(draft, str):
        return "holds no keys" in draft or "calls no " in draft
    return all(outcome.became == "unknown" for outcome in draft.outcomes.values())


def measure(neighbour: str, paths: list[Path], devices: int | None) -> dict[str, Any]:
    """Counts of files and keys, and which keys and files are odd."""
    counts: Counter[str] = Counter(dict.fromkeys(["files", "not of it", "read", "exit 0", *OUTCOMES.values()], 0))
    unknown: Counter[str] = Counter()
    unread: dict[str, str] = {}
    for path in paths:
        draft = read(neighbour, path, devices)
        if _is_another(draft):
            counts["not of it"] += 1
            continue
        counts["files"] += 1
        if isinstance(draft, str):
            unread[str(path)] = draft
            continue
        outcomes = Counter(OUTCOMES[outcome.became] for outcome in draft.outcomes.values())
        counts["read"] += 1
        counts["exit 0"] += not outcomes["no counterpart"] and not outcomes["unknown"]
        counts.update(outcomes)
        unknown.update(key for key, outcome in draft.outcomes.items() if outcome.became == "unknown")
    return {"from": neighbour, **counts, "different unknown": len(unknown), "keys": dict(unknown), "unread": unread}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="neighbour", required=True, choices=NEIGHBOURS)
    parser.add_argument("places", nargs="+", type=Path, metavar="FOLDER_OR_FILE")
    parser.add_argument("--devices", type=int, default=8, help="of a run whose file does not say it; default 8")
    parser.add_argument("--unknown", action="store_true", help="list the unknown keys and the files that are not read")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    found = measure(options.neighbour, files(options.neighbour, options.places), options.devices)
    header = [name for name in found if name not in ("keys", "unread")]
    text = table(header, [[found[name] for name in header]])
    if options.unknown:
        frequent = sorted(found["keys"].items(), key=lambda item: (-item[1], item[0]))
        text += "\n" + "\n".join(f"\n{count} x {key}" for key, count in frequent)
        text += "\n" + "\n".join(f"\n{path}: {why}" for path, why in found["unread"].items())
    publish(f"Published files of {NEIGHBOURS[options.neighbour]}", text, "cpu", found, options.json)


if __name__ == "__main__":
    main()
