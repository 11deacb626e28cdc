"""``tools/train.py`` whose engines are watched: ``run_struck_fleet.py KIND[,STEP,...] ARGUMENTS``.

The loop is held before the steps that are named; kinds are those of ``tests/pretended/struck_fleet.py``.
"""

from __future__ import annotations

import sys

from tests.pretended import struck_fleet
from tools import train

if __name__ == "__main__":
    kind, *held = sys.argv[1].split(",")
    struck_fleet.watch(kind, list(map(int, held)))
    train.end_with_torchrun()
    try:
        train.main(sys.argv[2:])
    except Exception as error:  # noqa: BLE001 - as tools/train.py has it
        train.fail(error)
