"""Collectives on Python objects of the default group in each step of a run, and what a rank gives to them, by caller.

    python -m benchmarks.overhead.collectives [--ranks N] [--json PATH] ARGUMENTS OF tools/train.py

It runs ``tools/train.py`` under torchrun with the arguments, and has every rank write down what it asks of the others.
A call counts once, however many exchanges it takes; the bytes are those of the largest pickle that a rank gave.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.report import publish, table
from tests.launching.counted_collectives import read, total
from tests.launching.launch import run, torchrun_command
from tests.launching.training import COUNTED

HEADER = ["step", "collectives", "largest pickle, bytes", "callers: times x bytes"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "asked.jsonl"
        run(torchrun_command(COUNTED, log, *arguments, nproc=options.ranks), timeout=3600.0).check()
        found = read(log)
    rows = []
    for step in sorted(found.keys() - {0}):
        asked = found[step]
        words = ", ".join(f"{caller} {one.count} x {one.num_bytes}" for caller, one in sorted(asked.items()))
        largest = max(one.num_bytes for one in asked.values())
        rows.append([step, total(asked), largest, words])
    results = {"steps": [dict(zip(HEADER, row, strict=True)) for row in rows]}
    publish("Collectives on objects in a step", table(HEADER, rows), "cpu", results, options.json)


if __name__ == "__main__":
    main()
