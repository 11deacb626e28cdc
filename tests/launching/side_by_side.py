"""Make targets side by side: ``python -m tests.launching.side_by_side test-npu test-unit test-distributed``.

Every line of output has its target's name in front. At the end stand pytest's words on what failed, so that the end of
a log names it, and the closing lines of all targets, as they were printed; the exit status is 1 if a target has failed.
A target that fails does not end the others.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import psutil

OURS = "[side by side] "
FAILURE = ("E  ", "FAILED ", "ERROR ")  # how pytest begins its lines on what went wrong and where
MAX_FAILURE_LINES = 40  # repeated at the end, of each target the last ones: those that name the tests


class Target:
    """One of them, from its start to its end."""

    def __init__(self, name: str) -> None:
        self.name, self.closing_line, self.status = name, "", -1
        self.failures: deque[str] = deque(maxlen=MAX_FAILURE_LINES)
        self.thread = threading.Thread(target=self._follow)
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self._begin = time.monotonic()
        command = ("make", "--no-print-directory", self.name)
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        self.thread.start()

    def _follow(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        for line in self.process.stdout:
            say(f"[{self.name}] {line.rstrip()}")
            if not line.startswith(("make: ", "make[")):  # make's own word on a failure comes after pytest's
                self.closing_line = line.rstrip()
            if line.startswith(FAILURE):
                self.failures.append(line.rstrip())
        self.status = self.process.wait()
        say(f"{OURS}{self.name}: status {self.status}, {time.monotonic() - self._begin:.0f} s after the start")

    def interrupt(self) -> None:
        """As Ctrl-C does: pytest then ends what its tests have started, which a signal to `make` alone would leave."""
        if self.process is None:
            return
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGINT)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")  # one write, so that no thread cuts the line of another
    sys.stdout.flush()


def main(names: Sequence[str]) -> int:
    targets = [Target(name) for name in names]
    signal.signal(signal.SIGTERM, lambda *_: [target.interrupt() for target in targets])
    for target in targets:
        target.start()
    for target in targets:
        while target.thread.is_alive():
            try:
                target.thread.join()
            except KeyboardInterrupt:  # Ctrl-C has reached the targets too
                say(f"{OURS}interrupted: the targets are ending")
    for target in targets:
        for line in target.failures:
            say(f"[{target.name}] {line}")
    for target in targets:
        say(target.closing_line)
    return int(any(target.status for target in targets))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
