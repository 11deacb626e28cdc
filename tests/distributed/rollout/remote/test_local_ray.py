"""A Ray that a run starts for itself: nobody else gets in, and whatever is killed, none of its processes stays."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.launching.launch import REPO, Running, run_copy, started, torchrun_command
from tests.launching.listening import open_to_others
from tests.launching.training import RUN_MARK, executors, survivors

pytest.importorskip("ray", reason="engines in other processes need Ray: install mega_rl[separate]")
pytestmark = pytest.mark.slow

SCRIPT = REPO / "tests" / "distributed" / "rollout" / "remote" / "run_local_ray.py"
LIMIT_S = 30.0  # Ray's helpers by themselves take a minute
CLIENT = """
import sys
from ray._raylet import GcsClient

try:
    GcsClient(address=sys.argv[1]).internal_kv_keys(b"", namespace=b"", timeout=100)
    print("let in")
except Exception as error:
    print("refused", type(error).__name__)
"""


@contextmanager
def launched() -> Iterator[tuple[Running, str, int, str]]:
    """A launch of two ranks, its mark, its engine's process and Ray's address."""
    token = uuid.uuid4().hex
    with started(torchrun_command(SCRIPT), env={RUN_MARK: token, "RAY_ADDRESS": ""}) as running:
        running.wait_for("READY ", 200)
        _, engine, address = next(line for line in running.output().splitlines() if line.startswith("READY")).split()
        yield running, token, int(engine), address


def test_nobody_else_gets_in(tmp_path: Path) -> None:
    script = tmp_path / "client.py"
    script.write_text(CLIENT)
    with launched() as (running, token, _, address):
        ours = [
            process for process in executors(token) if process.pid != running.process.pid
        ]  # its store is torchrun's
        names = {process.name() for process in ours}
        assert {"gcs_server", "raylet"} <= names and any(name.startswith("ray::") for name in names), names
        assert open_to_others(ours) == []
        (own,) = {process.environ().get("RAY_AUTH_TOKEN") for process in ours if process.name() == "raylet"}
        for mode, secret, answer in (
            ("disabled", "", "refused AuthenticationError"),
            ("token", "0" * 64, "refused AuthenticationError"),
            ("token", own, "let in"),
        ):
            client = run_copy(script, address, env={"RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": secret})
            assert client.stdout.splitlines()[-1] == answer, client.stdout


def rank_of(running: Running) -> psutil.Process:
    """The rank that started Ray."""
    children = psutil.Process(running.process.pid).children()
    return next(rank for rank in children if any(child.name() == "raylet" for child in rank.children()))


KILLS: dict[str, Callable[[Running, int], None]] = {
    "engine": lambda running, engine: os.kill(engine, signal.SIGKILL),
    "rank": lambda running, engine: rank_of(running).kill(),
    "raylet": lambda running, engine: next(c for c in rank_of(running).children() if c.name() == "raylet").kill(),
    "torchrun": lambda running, engine: running.process.kill(),
    "torchrun_politely": lambda running, engine: running.process.terminate(),
}


def left_after(kill: str) -> tuple[list[str], float]:
    """What is left, and the seconds until it was all."""
    with launched() as (running, token, engine, _):
        begin = time.monotonic()
        KILLS[kill](running, engine)
        return survivors(token, LIMIT_S), time.monotonic() - begin


def test_nothing_is_left_whatever_is_killed(record_property: Callable[[str, object], None]) -> None:
    with ThreadPoolExecutor(len(KILLS)) as threads:
        found = dict(zip(KILLS, threads.map(left_after, KILLS), strict=True))
    for kill, (_, seconds) in found.items():
        record_property(f"seconds {kill}", seconds)
    assert {kill: left for kill, (left, _) in found.items()} == dict.fromkeys(KILLS, [])
