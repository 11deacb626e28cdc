"""Ends Ray's helpers once the process that started Ray is gone: ``python ray_cleanup.py PROCESS_ID RAYLET_ID``.

Ray has the kernel kill its main processes with the one that started them. The helpers of its raylet then wait a minute
for an answer of a dead server before they end; this program, a child of the same process, ends them at once.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress

import psutil

INTERVAL_S = 0.5


def main(starter: int, raylet_id: int) -> None:
    """Returns when ``starter``, the parent of this process, is gone, and the raylet's children with it."""
    children: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        raylet = psutil.Process(raylet_id)
        children = raylet.children()
    while os.getppid() == starter:
        with suppress(psutil.NoSuchProcess):
            children = raylet.children() or children  # those of a raylet that has just died belong to an init
        time.sleep(INTERVAL_S)
    for child in children:
        with suppress(psutil.NoSuchProcess):  # also if its number is now another process's
            child.kill()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
