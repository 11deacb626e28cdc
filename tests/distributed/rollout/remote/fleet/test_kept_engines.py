"""Engines on a Ray cluster of the user's own: they outlive a trainer that is killed, but not for ever."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

from mega_rl.fleet.tickets import Key
from tests.distributed.rollout.remote.fleet.run_kept_engines import RULES, requests, value
from tests.launching.launch import Launched, alive, run_copy
from tests.launching.ray_cluster import cluster
from tests.pretended.engine_process import digest
from tests.pretended.tokens import Response

pytest.importorskip("ray", reason="engines in other processes need Ray: install mega_rl[separate]")
pytestmark = pytest.mark.slow

SCRIPT = Path("tests/distributed/rollout/remote/fleet/run_kept_engines.py")
LOOPBACK_ONLY = {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
LIMIT_S = 100.0


def tokens(step: int) -> list[list[list[int]]]:
    """What every engine has to sample for a step."""
    weights = digest({"model.norm.weight": torch.full((5,), value(step))})
    samples = range(RULES.group_size)
    keys = [Key(step, ticket) for ticket in range(RULES.num_groups)]
    responses = [[Response(request, step) for request in requests(key, samples)] for key in keys]
    return [[one.to_its_end(step, weights).sampled_ids.tolist() for one in group] for group in responses]


def engines(launched: Launched) -> list[int]:
    (found,) = re.findall(r"ENGINES \[(.*)\] LIVES", launched.stdout)
    return [int(process) for process in found.split(",")]


def left_of(processes: list[int]) -> list[int]:
    """Those that still run when the limit has passed."""
    until = time.monotonic() + LIMIT_S
    while any(map(alive, processes)) and time.monotonic() < until:
        time.sleep(0.1)
    return [process for process in processes if alive(process)]


def holders(processes: list[int]) -> list[int]:
    """Those that still hold memory of a weight store when the limit has passed."""

    def holds(process: int) -> bool:
        with suppress(psutil.NoSuchProcess):
            return any("mega_rl_weights" in place.path for place in psutil.Process(process).memory_maps())
        return False

    until = time.monotonic() + LIMIT_S
    while any(map(holds, processes)) and time.monotonic() < until:
        time.sleep(0.1)
    return [process for process in processes if holds(process)]


def test_engines_wait_for_the_next_trainer_and_end_if_none_comes(tmp_path: Path) -> None:
    """Two runs are killed with work in hand. Nobody goes on with one; the other's next trainer finds its engines."""

    def trainer(run: str, num_engines: int, first: int, lease_s: float) -> Launched:
        (tmp_path / run).mkdir(exist_ok=True)
        env = {**LOOPBACK_ONLY, "RAY_ADDRESS": address}
        return run_copy(SCRIPT, tmp_path / run, num_engines, first, lease_s, env=env)

    with cluster("--num-cpus", "3", env=LOOPBACK_ONLY) as address, ThreadPoolExecutor() as threads:
        kept = threads.submit(trainer, "kept", 2, 0, 10_000)
        left = threads.submit(trainer, "left", 1, 0, 2)
        first, alone = kept.result(), left.result()
        assert "STEP 0" in first.stdout and "STEP 0" in alone.stdout and "STEP 1" not in first.stdout
        assert left_of(engines(alone)) == [], "2 s without a trainer are over"
        assert all(map(alive, engines(first))) and holders(engines(first)) == []
        second = trainer("kept", 2, 1, 0).check()
    assert "ATTACHED 0" in first.stdout and "ATTACHED 2" in second.stdout
    assert engines(second) == engines(first) and "LIVES [0, 0]" in second.stdout
    for launched, steps in ((first, [0]), (second, [1, 2, 3])):
        found = [line for line in launched.stdout.splitlines() if line.startswith("STEP")]
        assert found == [f"STEP {step} {tokens(step)}" for step in steps]
    assert "LEFT []" in second.stdout, "neither of its engines nor of the other run"
