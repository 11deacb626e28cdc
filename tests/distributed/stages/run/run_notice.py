"""``tools/train.py`` whose rank 0 stays in the middle of a step: ``run_notice.py notice|ever STEP ARGUMENTS``.

``notice``: until it has been told that the run is to end. ``ever``: for ever.
"""

from __future__ import annotations

import os
import sys
import time

from mega_rl.errors import Stopped
from mega_rl.stages.run.notice import Notice
from tools import train


def stay(until: str, step: int) -> None:
    is_given, asked = Notice.is_given, 0

    def held(self: Notice) -> bool:
        nonlocal asked
        asked += 1
        if asked == step and os.environ["RANK"] == "0":
            print(f"within step {step}\n", end="", flush=True)
            while until == "ever" or self._given is None:
                time.sleep(0.05)
        return is_given(self)

    Notice.is_given = held  # type: ignore[method-assign]


if __name__ == "__main__":
    until, step, *arguments = sys.argv[1:]
    stay(until, int(step))
    try:
        train.main(arguments)
    except Stopped as reason:
        train.stop(reason)
    except Exception as error:  # noqa: BLE001 - as tools/train.py has it
        train.fail(error)
