"""Published files of a neighbour, imported, against the interpreter of its semantics in ``meaning.py``.

    python -m tests.unit.importers.compare --from verl CHECKOUT/examples [--draw 20] [--seed 28]

Prints a row for each file: values compared, what differs, and values that the import itself refuses (it says so, and
they are not compared). Files of stages that the interpreter has no words for are left out before the draw.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from benchmarks.importing.published import files, is_another, read
from benchmarks.report import table
from mega_rl.importers.draft.draft import Draft
from mega_rl.importers.rules.hf_learned import trl_program
from tests.unit.importers.meaning import INTERPRETERS, differing, is_told, ours, refused_parts


def compared(neighbour: str, draft: Draft, devices: int) -> tuple[int, dict[str, object], list[str]]:
    """Number of values compared, those that differ (theirs, ours), and those that the import refuses."""
    given = {key: value for key, value in draft.given.values.items() if key not in draft.given.unresolved}
    program = {"program": trl_program(draft)} if neighbour == "trl" else {}
    wanted = INTERPRETERS[neighbour](given, draft.num_devices or devices, **program)
    refused = refused_parts(draft)
    found = {name: pair for name, pair in differing(ours(draft.result), wanted).items() if name not in refused}
    return len(vars(wanted)) - len(refused), found, sorted(refused)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="neighbour", required=True, choices=INTERPRETERS)
    parser.add_argument("places", nargs="+", type=Path)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--draw", type=int, default=20)
    parser.add_argument("--seed", type=int, default=28)
    options = parser.parse_args()
    paths = files(options.neighbour, options.places)
    drafts = ((path, read(options.neighbour, path, options.devices)) for path in paths)
    told = [(path, draft) for path, draft in drafts if isinstance(draft, Draft) and not is_another(draft)]
    told = [(path, draft) for path, draft in told if is_told(options.neighbour, draft)]
    drawn = random.Random(options.seed).sample(told, min(options.draw, len(told)))
    rows, wrong = [], 0
    for path, draft in sorted(drawn, key=lambda pair: pair[0]):
        number, found, refused = compared(options.neighbour, draft, options.devices)
        wrong += len(found)
        shown = "; ".join(f"{name} {pair}" for name, pair in found.items())
        rows.append([f"{path.parent.name}/{path.name}", number, shown or 0, ", ".join(refused) or "-"])
    print(f"{options.neighbour}: {len(drawn)} of {len(told)} files drawn, {wrong} wrong values")
    print(table(["file", "values compared", "wrong", "refused, so not compared"], rows))


if __name__ == "__main__":
    main()
