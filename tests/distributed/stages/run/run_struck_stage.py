"""``tools/train.py`` whose ranks are all killed in the middle of a step: ``run_struck_stage.py STEPS_BEFORE ...``."""

from __future__ import annotations

import os
import signal
import sys

from mega_rl.stages.run.notice import Notice
from tools import train


def die(after: int) -> None:
    is_given, asked = Notice.is_given, 0

    def changed(self: Notice) -> bool:
        nonlocal asked
        asked += 1
        if asked > after:
            os.kill(os.getpid(), signal.SIGKILL)
        return is_given(self)

    Notice.is_given = changed  # type: ignore[method-assign]


if __name__ == "__main__":
    step, *arguments = sys.argv[1:]
    die(int(step))
    train.main(arguments)
