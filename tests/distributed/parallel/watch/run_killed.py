"""``tools/train.py`` of which, at torchrun's first start, a rank is killed: ``run_killed.py RANK STEP ARGUMENTS``.

It dies in the middle of the step after STEP; before that, every checkpoint on the disk is made unreadable.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from mega_rl.stages.run.notice import Notice
from tools import train


def die(rank: int, after: int, output_dir: Path) -> None:
    is_given, asked = Notice.is_given, 0

    def changed(self: Notice) -> bool:
        nonlocal asked
        asked += 1
        if asked > after and int(os.environ["RANK"]) == rank:
            for manifest in output_dir.glob("checkpoints/*/manifest.json"):
                manifest.write_text("unreadable")
            print(f"killed at {time.monotonic():.3f}\n", end="", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return is_given(self)

    Notice.is_given = changed  # type: ignore[method-assign]


if __name__ == "__main__":
    rank, after, *arguments = sys.argv[1:]
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        output_dir = next(a.partition("=")[2] for a in arguments if a.startswith("trainer.output_dir="))
        die(int(rank), int(after), Path(output_dir))
    try:
        train.main(arguments)
    except Exception as error:  # noqa: BLE001 - as tools/train.py has it
        train.fail(error)
