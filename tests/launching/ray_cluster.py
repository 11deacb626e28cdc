"""A Ray cluster of one machine, as a user starts it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.launching.launch import free_port, started


@contextmanager
def cluster(*options: str, env: Mapping[str, str]) -> Iterator[str]:
    """Its address. Ray takes no more than 30 s for its start, which is little on a busy machine: three attempts."""
    ray = str(Path(sys.executable).with_name("ray"))
    quiet = ["--disable-usage-stats", "--include-dashboard", "false", "--object-store-memory", "134217728"]
    for is_last in (False, False, True):
        port = free_port()
        with TemporaryDirectory(prefix="ray") as scratch:  # Ray's sockets lie there: a long path is refused
            place = ("--head", "--block", "--temp-dir", scratch, "--port", str(port))
            with started((ray, "start", *place, *quiet, *options), env=env) as running:
                try:
                    running.wait_for("Ray runtime started", timeout=200)
                except AssertionError:
                    if is_last:
                        raise
                    continue
                yield f"127.0.0.1:{port}"
                return
